"""Gives each virtual rank what a process has to itself, although all ranks share one process.

Only one rank runs at a time. Whenever the turn passes from one rank to another, the state of the
first is put away, and the state of the second is put in its place:

    rank 0 blocks ──▶ ProcessStates.switch(0, 1) ──▶ rank 1 runs

    torch.distributed   the default group and all others, as `dist.get_rank()` and DDP find them
                        (record/torch_private.RankWorld)
    modules             those that the program imports from its own files, with their globals, and
                        `__main__` (modules.py)
    os.environ          with RANK, WORLD_SIZE, … (ranks/program.py sets them)
    logging             the root logger and the loggers that the program makes, with handlers and
                        levels (logging_states.py)
    print, sys.stdout, sys.stderr
                        if a rank replaces them, as programs do to silence all ranks but one
    random numbers      torch's, Python's and NumPy's, and torch's default dtype (random_states.py)
    accelerate          what it keeps in its classes (class_states.py)

A thread has its own no_grad, autocast and default device anyway, and ranks are threads.

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
import os
import sys
from collections.abc import Callable
from typing import Any

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.class_states import ClassStates
from parallel101.laboratory.sim.logging_states import LoggingStates
from parallel101.laboratory.sim.modules import RankModules
from parallel101.laboratory.sim.random_states import RandomStates


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
        self.random = RandomStates(size)
        self.modules = RankModules(size)
        self.logging = LoggingStates(size)
        self.classes = ClassStates(size)
        self.environ_before_run: dict = os.environ._data  # type: ignore[attr-defined]
        self.environs = [dict(self.environ_before_run) for _ in range(size)]
        # the program may have imported os.environ itself by name
        os.environ._data = self.environs[0]  # type: ignore[attr-defined]
        self.profiled: int | None = None  # the rank whose profiler is running
        self.output_before_run = (builtins.print, sys.stdout, sys.stderr)
        self.outputs: list[tuple[Any, Any, Any]] = [self.output_before_run] * size

    def switcher(self) -> Callable[[int, int], None]:
        """The function switch(old, new), to call when rank `old` stops running and rank `new` runs.

        It takes a microsecond.
        """
        worlds, random_states, modules, environs, outputs = (
            self.worlds,
            self.random,
            self.modules,
            self.environs,
            self.outputs,
        )
        use_logging, use_classes = self.logging.switch, self.classes.switch
        environ: Any = os.environ
        loaded = sys.modules

        def switch(old: int, new: int) -> None:
            torch_private.use_world(worlds[new])
            random_states.switch(old, new)
            if modules.in_use or loaded["__main__"] is not modules.main:
                modules.switch(old, new)
            environ._data = environs[new]
            use_logging(new)
            use_classes(old, new)
            printing, out, err = outputs[old]
            if builtins.print is not printing or sys.stdout is not out or sys.stderr is not err:
                outputs[old] = (builtins.print, sys.stdout, sys.stderr)
            if outputs[old] is not outputs[new]:
                builtins.print, sys.stdout, sys.stderr = outputs[new]

        return switch

    def use_profiler(self) -> None:
        """A rank starts or stops torch's profiler.

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
        self.logging.restore()
        self.classes.restore()
        os.environ._data = self.environ_before_run  # type: ignore[attr-defined]
        builtins.print, sys.stdout, sys.stderr = self.output_before_run
