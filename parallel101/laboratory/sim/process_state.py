"""Gives each virtual rank what a process has to itself, although all ranks share one process.

Only one rank runs at a time. Whenever the turn passes from one rank to another, the state of the
first is put away, and the state of the second is put in its place:

    rank 0 blocks ──▶ ProcessStates.switch(0, 1) ──▶ rank 1 runs

    torch.distributed   the default group and all others, as `dist.get_rank()` and DDP find them
                        (record/torch_private.RankWorld)
    modules             those that the program imports from its own files, with their globals, and
                        `__main__` (modules.py)
    random numbers      torch's, Python's and NumPy's, and torch's default dtype (random_states.py)
    attributes          of which each rank has its own value (RankAttributes):
      os.environ        with RANK, WORLD_SIZE, … (ranks/program.py sets them)
      logging           the root logger and the loggers that the program makes, with handlers and
                        levels. There is one root logger object, since the loggers of libraries hold
                        it as their parent. Loggers from before the run, as torch's, are shared.
      print, sys.stdout, sys.stderr
                        if a rank replaces them, as programs do to silence all ranks but one
      accelerate        the dict that all instances of PartialState and two other classes have in a
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
    - modules that were loaded before the run (see modules.py)
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.modules import RankModules
from parallel101.laboratory.sim.random_states import RandomStates

ACCELERATE = "accelerate.state"
ITS_CLASSES = ("PartialState", "AcceleratorState", "GradientState")


class RankAttributes:
    """Attributes of modules, classes and objects, of which each rank has its own value.

    Rank 0's are in use first. `restore()` brings back those from before the run.
    """

    def __init__(self, size: int):
        self.owners: list[Any] = []
        self.names: list[str] = []
        self.before_run: list[Any] = []
        self.own: list[list[Any]] = [[] for _ in range(size)]

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
        self.before_run.append(present)
        for of_rank, value in zip(self.own, values):
            of_rank.append(value)
        setattr(owner, name, values[keeps or 0])

    def switch(self, old: int, new: int) -> None:
        """Switch from the attributes of rank `old` to those of rank `new`."""
        owners, names, coming = self.owners, self.names, self.own[new]
        self.own[old] = leaving = [*map(getattr, owners, names)]
        for owner, name, value, present in zip(owners, names, coming, leaving):
            if value is not present:
                setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in zip(self.owners, self.names, self.before_run):
            setattr(owner, name, value)


class ProcessStates:
    """The states of all ranks; rank 0's is active first.

    `restore()` brings back the process as it was before the run.

    Args:
        worlds: each rank's state of torch.distributed.
    """

    def __init__(self, worlds: list[torch_private.RankWorld]):
        size = len(worlds)
        self.worlds = worlds
        self.world_before_run = torch_private.use_world(worlds[0])
        self.attributes = RankAttributes(size)
        self.random = RandomStates(size, self.attributes.add)
        self.modules = RankModules(size)
        for owner, name, fresh in own_attributes():
            self.attributes.add(owner, name, fresh)
        self.knows_accelerate = self.add_accelerate()
        self.profiled: int | None = None  # the rank whose profiler is running

    def add_accelerate(self, importer: int | None = None) -> bool:
        """Let each rank have its own state of accelerate. False if it isn't imported.

        `importer`: the rank that has imported it in the run.
        """
        module = sys.modules.get(ACCELERATE)
        for kind in (getattr(module, name, None) for name in ITS_CLASSES):
            if isinstance(kind, type) and type(vars(kind).get("_shared_state")) is dict:
                self.attributes.add(kind, "_shared_state", dict, importer)
        return module is not None

    def switcher(self) -> Callable[[int, int], None]:
        """Return switch(old, new), to call when rank `old` stops running and rank `new` runs.

        It takes a microsecond.
        """
        worlds, random_states, modules, loaded = (
            self.worlds,
            self.random,
            self.modules,
            sys.modules,
        )
        switch_attributes = self.attributes.switch

        def switch(old: int, new: int) -> None:
            torch_private.use_world(worlds[new])
            random_states.switch(old, new)
            if modules.in_use or loaded["__main__"] is not modules.main:
                modules.switch(old, new)
            if not self.knows_accelerate and ACCELERATE in loaded:
                self.knows_accelerate = self.add_accelerate(old)
            switch_attributes(old, new)

        return switch

    def use_profiler(self) -> None:
        """Note that a rank starts or stops torch's profiler.

        Two ranks that do so at the same time would crash the process.
        """
        rank = self.random.running
        if self.profiled not in (None, rank):
            raise RuntimeError(
                f"rank {rank} uses torch's profiler while rank {self.profiled} does. torch has one "
                "profiler per process, and all ranks of the sim backend are one process. Profile "
                "one rank (if dist.get_rank() == 0), or use backend='gloo'"
            )
        self.profiled = rank

    def profiler_stopped(self) -> None:
        self.profiled = None

    def restore(self) -> None:
        torch_private.use_world(self.world_before_run)
        self.random.restore()
        self.modules.restore()
        self.attributes.restore()


def own_attributes() -> Iterator[tuple[Any, str, Callable[[], Any]]]:
    """Yield attributes of which each rank has its own value, and what makes the first one."""
    environ: Any = os.environ  # not the name in os: the program may have imported it by name
    yield environ, "_data", lambda: dict(environ._data)
    for owner, name in ((builtins, "print"), (sys, "stdout"), (sys, "stderr")):
        yield owner, name, partial(getattr, owner, name)
    root, manager = logging.root, logging.root.manager
    yield (
        root,
        "__dict__",
        lambda: {
            **vars(root),
            "handlers": [*root.handlers],
            "filters": [*root.filters],
            "_cache": {},
        },
    )
    yield manager, "__dict__", lambda: {**vars(manager), "loggerDict": {**manager.loggerDict}}
    yield logging, "_handlers", weakref.WeakValueDictionary
    yield logging, "_handlerList", list
