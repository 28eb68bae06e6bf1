"""Gives each virtual rank what a process has to itself, although all ranks share one process.

Only one rank runs at a time. ProcessStates lists the attributes of which each rank has its own
value. Whenever the turn passes from one rank to another, the values of the first are put away,
and those of the second are put in their place:

    rank 0 blocks ──▶ ProcessStates.switch(1) ──▶ rank 1 runs

    torch.distributed   the default group and all others, as `dist.get_rank()` and DDP find them
                        (record/torch_private.RankWorld)
    modules             those that the program imports from its own files, with their globals, and
                        `__main__` (modules.py)
    random numbers      torch's, Python's and NumPy's, and torch's default dtype (random_states.py)
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
    - modules that were loaded before the run (see modules.py)
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.modules import RankModules
from parallel101.laboratory.sim.random_states import (
    functions_of_running_rank,
    own_random_states,
)

ACCELERATE = "accelerate.state"
ITS_CLASSES = ("PartialState", "AcceleratorState", "GradientState")


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
        for owner, name, fresh in (*own_random_states(), *own_attributes()):
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

    def use_profiler(self) -> None:
        """Note that a rank starts or stops torch's profiler.

        Two ranks that do so at the same time would crash the process.
        """
        rank = self.running
        if self.profiled not in (None, rank):
            raise RuntimeError(
                f"rank {rank} uses torch's profiler while rank {self.profiled} does. torch has one "
                "profiler per process, and all ranks of the sim backend are one process. Profile "
                "one rank (if dist.get_rank() == 0), or use backend='gloo'"
            )
        self.profiled = rank

    def profiler_stopped(self) -> None:
        self.profiled = None


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
