"""Gives each virtual rank its own copies of the modules among the program's own files.

So each rank has its own globals in them.

    rank 0: import parallel_state ──▶ a module of rank 0 ─┐
    rank 1: import parallel_state ──▶ a module of rank 1 ─┘
        sys.modules holds those of the rank that runs; a switch exchanges them

Shared are modules that were loaded before the run, the standard library, everything in
site-packages, and modules in machine code.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Sequence
from importlib import _bootstrap
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType
from typing import Any

MAIN = "__main__"
# a module is locked by its name while it is imported, and a rank may communicate meanwhile
importing: Any = _bootstrap


class RankModules:
    """Keeps apart which modules are loaded, as one attribute: see process_state.py.

    It is in `sys.meta_path` during the run, to see what is imported. Until a rank imports a module
    of the program (`in_use`) or replaces `__main__`, there is nothing to switch.
    """

    # a rank's modules, and the locks of those that it is importing
    at_start: tuple[dict[str, ModuleType], dict[str, Any]] = {}, {}

    def __init__(self) -> None:
        self.before_run = {name.partition(".")[0] for name in sys.modules}
        self.main, self.locks = sys.modules[MAIN], importing._module_locks
        self.names = {MAIN}
        self.in_use = False

    def __enter__(self) -> RankModules:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        importing._module_locks = self.locks

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is not in sys.modules. Python calls this to import it."""
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if name.partition(".")[0] not in self.before_run and not in_library(spec):
                    self.names.add(name)
                    self.in_use = True
                return spec
        return None

    @property
    def loaded(self) -> tuple[dict[str, ModuleType], dict[str, Any]]:
        """The running rank's own modules."""
        loaded = sys.modules
        if not self.in_use and loaded[MAIN] is self.main:
            return self.at_start
        self.in_use = True
        own = {name: loaded[name] for name in self.names if name in loaded}
        return own, importing._module_locks

    @loaded.setter
    def loaded(self, coming: tuple[dict[str, ModuleType], dict[str, Any]]) -> None:
        own, locks = coming if coming is not self.at_start else ({MAIN: self.main}, {})
        for name in self.names - own.keys():
            sys.modules.pop(name, None)
        sys.modules.update(own)
        importing._module_locks = locks


def in_library(spec: ModuleSpec) -> bool:
    """Return whether a module belongs to Python or an installed package, or is machine code.

    Python cannot load machine code twice.
    """
    if spec.origin in ("built-in", "frozen") or isinstance(spec.loader, ExtensionFileLoader):
        return True
    paths = (
        [spec.origin]
        if spec.has_location and spec.origin
        else list(spec.submodule_search_locations or ())
    )
    return any(
        "site-packages" in path or "dist-packages" in path or path.startswith(LIBRARIES)
        for path in paths
    )


LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
    }
)
