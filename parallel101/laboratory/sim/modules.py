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
    """The modules of each rank; rank 0's are in use first.

    It is in `sys.meta_path` during the run, to see what is imported.

    Until a rank imports a module of the program (`in_use`) or replaces `__main__`, there is nothing
    to switch.
    """

    def __init__(self, size: int):
        self.before_run = {name.partition(".")[0] for name in sys.modules}
        self.main = sys.modules[MAIN]
        self.names = {MAIN}
        self.own: list[dict[str, ModuleType]] = [{MAIN: self.main} for _ in range(size)]
        self.import_locks: list[dict[str, Any]] = [
            importing._module_locks,
            *({} for _ in range(size - 1)),
        ]
        self.in_use = False
        sys.meta_path.insert(0, self)

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

    def switch(self, old: int, new: int) -> None:
        """Switch from the modules of rank `old` to those of rank `new`."""
        loaded, self.in_use = sys.modules, True
        self.own[old] = leaving = {name: loaded[name] for name in self.names if name in loaded}
        coming = self.own[new]
        for name in leaving.keys() - coming.keys():
            del loaded[name]
        loaded.update(coming)
        importing._module_locks = self.import_locks[new]

    def restore(self) -> None:
        """Unload all ranks' modules, because the run is over."""
        sys.meta_path.remove(self)
        importing._module_locks = self.import_locks[0]
        for name in self.names:
            sys.modules.pop(name, None)
        sys.modules[MAIN] = self.main


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
