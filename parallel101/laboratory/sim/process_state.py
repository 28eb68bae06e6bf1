"""Gives each virtual rank what a process has to itself, although all ranks share one process.

Only one rank runs at a time. ProcessStates lists the attributes of which each rank has its own
value. Whenever the turn passes from one rank to another, the values of the first are put away,
and those of the second are put in their place:

    rank 0 blocks ──▶ ProcessStates.switch(1) ──▶ rank 1 runs

    torch.distributed   the default group and all others, as `dist.get_rank()` and DDP find them
                        (record/torch_private.RankWorld)
    modules             those that the program imports from its own files, with their globals, and
                        `__main__`
    random numbers      torch's, Python's and NumPy's, and torch's default dtype. torch starts every
                        rank from the default seed, as in a fresh process. Python and NumPy would
                        seed a fresh process from the system. Here they are seeded with the rank's
                        number instead: ranks differ, and a run is the same every time
    os.environ          with RANK, WORLD_SIZE, … (ranks/program.py sets them)
    logging             the root logger and the loggers that the program makes, with handlers and
                        levels. There is one root logger object, since the loggers of libraries hold
                        it as their parent. Loggers from before the run, as torch's, are shared.
    print, sys.stdout, sys.stderr
                        if a rank replaces them, as programs do to silence all ranks but one
    accelerate          the dict that all instances of PartialState and two other classes have in a
                        process: the rank, the device, whether gradients are synchronized, …

A thread has its own no_grad, autocast and default device anyway, and ranks are threads.

A rank's own copy of each module would be one mechanism for all of this. It is only for the
program's own files: a library would be imported once a rank, for seconds, and torch, which can't be
loaded twice, holds on to objects of logging, random and os.

Still shared by all ranks, unlike in processes:

    - libraries: what a program assigns in a module of torch, NumPy or the standard library; classes
      and operators that it registers there; the loggers that torch and other libraries had made
      before the run; `warnings` filters, signal handlers
    - torch's switches for the whole process: use_deterministic_algorithms, set_num_threads,
      torch.backends.…
    - torch's profiler: one rank may use it, and a second one at the same time gets a RuntimeError
    - the working directory, sys.path, sys.argv, open files, and the environment that C code and
      child processes see
    - modules that were loaded before the run
"""

from __future__ import annotations

import builtins
import itertools
import logging
import os
import random
import site
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import _bootstrap
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from parallel101.laboratory.record import torch_private

ACCELERATE = "accelerate.state"
ITS_CLASSES = ("PartialState", "AcceleratorState", "GradientState")
MAIN = "__main__"
# a module is locked by its name while it is imported, and a rank may communicate meanwhile
importing: Any = _bootstrap
LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
    }
)


class ProcessStates:
    """Attributes of modules, classes and objects, of which each rank has its own value.

    What isn't an attribute in Python, such as the state of torch's generator, is a property of an
    object made for it. Rank 0's values are in use first, and `restore()` brings back those from
    before the run.

    Args:
        worlds: each rank's state of torch.distributed.
    """

    def __init__(self, worlds: Sequence[torch_private.RankWorld]):
        self.running = 0
        self.owners: list[Any] = []
        self.names: list[str] = []
        self.own: list[list[Any]] = [[] for _ in worlds]
        self.undo = ExitStack()
        self.restore = self.undo.close
        self.profiled: int | None = None  # the rank whose profiler is running
        self.add(*torch_private.WORLD, iter(worlds).__next__)
        modules = self.undo.enter_context(RankModules())
        self.add(modules, "loaded", lambda: modules.at_start)
        self.undo.enter_context(functions_of_running_rank())
        for owner, name, fresh in own_attributes():
            self.add(owner, name, fresh)
        self.knows_accelerate = self.add_accelerate()

    def add(
        self, owner: Any, name: str, fresh: Callable[[], Any], keeps: int | None = None
    ) -> None:
        """Give each rank its own value of an attribute, which `fresh` makes.

        The rank `keeps` has the present value, which it has made in the run.
        """
        present, values = getattr(owner, name), [fresh() for _ in self.own]
        if keeps is not None:
            present, values[keeps] = values[keeps], present
        self.owners.append(owner)
        self.names.append(name)
        self.undo.callback(setattr, owner, name, present)
        for of_rank, value in zip(self.own, values):
            of_rank.append(value)
        setattr(owner, name, values[keeps or 0])

    def add_accelerate(self, importer: int | None = None) -> bool:
        """Let each rank have its own state of accelerate. False if it isn't imported.

        `importer`: the rank that has imported it in the run.
        """
        module = sys.modules.get(ACCELERATE)
        for kind in (getattr(module, name, None) for name in ITS_CLASSES):
            if isinstance(kind, type) and type(vars(kind).get("_shared_state")) is dict:
                self.add(kind, "_shared_state", dict, importer)
        return module is not None

    def switch(self, rank: int) -> None:
        """Switch from the state of the running rank to that of `rank`. It takes a microsecond."""
        if not self.knows_accelerate and ACCELERATE in sys.modules:
            self.knows_accelerate = self.add_accelerate(self.running)
        owners, names = self.owners, self.names
        self.own[self.running] = leaving = [*map(getattr, owners, names)]
        self.running = rank
        for owner, name, value, present in zip(owners, names, self.own[rank], leaving):
            if value is not present:
                setattr(owner, name, value)

    def use_profiler(self, over: bool) -> None:
        """Note that a rank starts or stops torch's profiler, or that it is over.

        Two ranks that use it at the same time would crash the process.
        """
        rank = self.running
        if self.profiled not in (None, rank):
            raise RuntimeError(
                f"rank {rank} uses torch's profiler while rank {self.profiled} does. torch has one "
                "profiler per process, and all ranks of the sim backend are one process. Profile "
                "one rank (if dist.get_rank() == 0), or use backend='gloo'"
            )
        self.profiled = None if over else rank


def own_attributes() -> Iterator[tuple[Any, str, Callable[[], Any]]]:
    """Yield attributes of which each rank has its own value, and what makes the next rank's."""
    of_torch, fresh = TorchRandom(), torch.Generator().get_state()
    yield of_torch, "state", lambda: fresh
    yield of_torch, "dtype", torch.get_default_dtype
    for _, module, name, make in hidden_generators():
        yield module, name, map(make, itertools.count()).__next__
    environ: Any = os.environ  # not the name in os: the program may have imported it by name
    yield environ, "_data", lambda: dict(environ._data)
    for owner, name in ((builtins, "print"), (sys, "stdout"), (sys, "stderr")):
        yield owner, name, partial(getattr, owner, name)
    root, manager = logging.root, logging.root.manager

    def own_root() -> dict[str, Any]:
        lists = {"handlers": [*root.handlers], "filters": [*root.filters]}
        return {**vars(root), **lists, "_cache": {}}

    yield root, "__dict__", own_root
    yield manager, "__dict__", lambda: {**vars(manager), "loggerDict": {**manager.loggerDict}}
    yield logging, "_handlers", weakref.WeakValueDictionary
    yield logging, "_handlerList", list


# ── The program's own modules


class RankModules:
    """Keeps apart which modules are loaded, as one attribute.

        rank 0: import parallel_state ──▶ a module of rank 0 ─┐
        rank 1: import parallel_state ──▶ a module of rank 1 ─┘
            sys.modules holds those of the rank that runs; a switch exchanges them

    Each rank has its own copies of the modules among the program's own files, and so its own
    globals in them. Shared are modules that were loaded before the run, the standard library,
    everything in site-packages, and modules in machine code.

    It is in `sys.meta_path` during the run, to see what is imported. Until a rank imports a module
    of the program (`in_use`) or replaces `__main__`, there is nothing to switch.
    """

    # a rank's modules, and the locks of those that it is importing
    at_start: tuple[dict[str, ModuleType], dict[str, Any]] = {}, {}

    def __init__(self) -> None:
        self.before_run = set(sys.modules)  # a package is in it with its modules
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
    paths = [spec.origin] if spec.has_location and spec.origin else spec.submodule_search_locations
    return any(
        "site-packages" in path or "dist-packages" in path or path.startswith(LIBRARIES)
        for path in paths or ()
    )


# ── Random numbers


class TorchRandom:
    """What torch keeps once a process, as attributes: its generator's state and default dtype."""

    def __init__(self) -> None:
        # changes with every draw; get_state() would copy 5 kB at each switch
        self._fingerprint: Callable[[], Any] = torch_private.generator_memory() or object
        self._last: Any = None
        self._state = torch.empty(0)

    @property
    def state(self) -> torch.Tensor:
        """The generator's state: the same tensor until a number is drawn."""
        if (fingerprint := self._fingerprint()) != self._last:
            self._state, self._last = torch.default_generator.get_state(), fingerprint
        return self._state

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)
        self._state, self._last = state, self._fingerprint()

    @property
    def dtype(self) -> torch.dtype:
        return torch.get_default_dtype()

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)


def hidden_generators() -> list[tuple[ModuleType, Any, str, Callable[[int], Any]]]:
    """Return where `random` and NumPy keep their generator.

    Each is (the module whose functions are its methods, its owner, its name there, what makes one
    from a seed). SciPy, scikit-learn and NumPy's own seed() use NumPy's.
    """
    hidden: list[tuple[ModuleType, Any, str, Callable[[int], Any]]] = [
        (random, random, "_inst", random.Random)
    ]
    # np.random is imported here, as a rank that imported it later would share one generator
    # with all
    if "numpy" in sys.modules:
        import numpy as np

        hidden.append((np.random, np.random.mtrand, "_rand", np.random.RandomState))
    return hidden


@contextmanager
def functions_of_running_rank() -> Iterator[None]:
    """Let the functions of `random` and `numpy.random` use the running rank's generator inside.

    They are methods of the generator from before the run, and programs import them by name.
    """

    def follow(owner: Any, generator: str, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(getattr(owner, generator), name)(*args, **kwargs)

        function.__name__ = name
        return function

    with ExitStack() as undo:
        for module, owner, generator, _ in hidden_generators():
            before = getattr(owner, generator)
            functions: dict[str, Any] = {
                name: follow(owner, generator, name)
                for name, function in vars(module).items()
                if getattr(function, "__self__", None) is before
            }
            undo.enter_context(mock.patch.multiple(module, **functions))
        yield
