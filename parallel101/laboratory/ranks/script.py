"""One rank of `parallel101 run`: an unmodified script, run as torchrun would run it.

It is `__main__`, with torchrun's environment.

    parallel101 run train.py --lr 0.1 ──▶ launch(run_script, script)
        ──▶ each rank: sys.argv, sys.path, __main__, then train.py's code
    torchrun … -m parallel101 run --record DIR train.py ──▶ join_job(run_script)
        ──▶ the same in a rank of torchrun's job

The process group exists before the script starts. Its own init_process_group only says so if it
names another backend (program.py). On sim, functions that the script registers with `atexit` are
not called, because all ranks are one process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.util
import os
import shlex
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallel101.laboratory.ranks.torchrun import in_a_job
from parallel101.laboratory.record.host_time import HostTime, host_time
from parallel101.laboratory.record.last_events import LAST_EVENTS
from parallel101.laboratory.record.rank_files import RankFiles
from parallel101.laboratory.record.recorder import RankRecorder
from parallel101.spans import OPTIMIZER_STEP, recorder, span


@dataclass(frozen=True)
class Script:
    """The script that `parallel101 run` was asked to run.

    Attributes:
        target: a file, or with `as_module` the name of a module, as after `python -m`.
        arguments: what the script finds in sys.argv[1:].
    """

    target: str
    arguments: tuple[str, ...] = ()
    as_module: bool = False

    @property
    def name(self) -> str:
        """Return the script and its arguments, as they are typed."""
        name = self.target if self.as_module else os.path.basename(self.target)
        return shlex.join([name, *self.arguments])

    @property
    def directory(self) -> str:
        """Return the directory that Python puts first in sys.path."""
        return os.getcwd() if self.as_module else os.path.dirname(os.path.abspath(self.target))

    def load(self) -> tuple[CodeType, ModuleType]:
        """Return the script's code, and a new `__main__` to run it in.

        Raises OSError, ImportError or SyntaxError if it can't be run.
        """
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        if not self.as_module:
            main.__file__, main.__package__ = self.target, None
            source = Path(self.target).read_bytes()
            return compile(source, self.target, "exec", dont_inherit=True), main
        spec = importlib.util.find_spec(self.target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{self.target}.__main__")
        code = None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        if spec is None or code is None:
            raise ImportError(f"there is no module {self.target!r} that can be run")
        main.__spec__, main.__loader__ = spec, spec.loader
        main.__file__, main.__package__ = spec.origin or self.target, spec.parent
        return code, main


def free_port() -> int:
    """Return a port on loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_script(
    script: Script, last_events: int = LAST_EVENTS, directory: Path | None = None
) -> None:
    """Run a script on this rank, inside a launch.

    Each time in which it is blocked in a call of torch.distributed is recorded as a wait.

    Args:
        last_events: the record has at least this many of the newest events, and sums of the others.
            On sim all events are kept.
        directory: where the record is written while the script runs, or None.
    """
    if (target := recorder()) is not None:
        target.record_waits = True  # type: ignore[attr-defined]
    # launch's default on NCCL is the rank's GPU; a script for torchrun does not expect that
    torch.set_default_device(None)
    code, main = script.load()
    sys.modules["__main__"] = main
    sys.argv = [main.__file__ or script.target, *script.arguments]
    keeping: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(target, RankRecorder):
        backend = "nccl" if "nccl" in dist.get_backend() else "gloo"
        where = (target.rank, dist.get_world_size(), backend)
        files = None if directory is None else RankFiles(directory, *where)
        keeping = target.keeping_last(last_events, files)
    with keeping, host_time(target, dist.get_backend()) as own, steps_marked(target, own):
        _mark("start", script)
        try:
            with _end_of_process():
                try:
                    exec(code, main.__dict__)
                except SystemExit as stopped:
                    if stopped.code not in (None, 0):
                        raise
            # as Python does at its end: files are written, and workers stopped
            main.__dict__.clear()
            gc.collect()
        finally:
            _mark("end", script, own)


def _mark(moment: str, script: Script, own: HostTime | None = None) -> None:
    """Record the start of the script, before its first call, and its end, after its last one."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    labels = {"script": script.name, "host": socket.gethostname(), "attempt": attempt}
    if own is not None and own.steps == 0:
        labels |= own.step(last=True)._asdict()
    with span(f"{moment} of the script", **labels):
        pass


@contextlib.contextmanager
def steps_marked(target: Any, own: HostTime | None = None) -> Iterator[None]:
    """Mark each step of one of torch's optimizers in this rank's record, inside the block.

    A run's page finds the training steps by these marks. If there are several optimizers, the first
    one to make a step counts.
    """
    first: list[weakref.ref] = []

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if recorder() is not target:  # on sim, this is a step of another rank
            return
        if not first or first[0]() is None:
            first[:] = [weakref.ref(optimizer)]
        if first[0]() is optimizer:
            with span(OPTIMIZER_STEP, **({} if own is None else own.step()._asdict())):
                pass

    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _end_of_process() -> Iterator[None]:
    """Do after the script the work that Python does before a process ends.

    Python waits for threads, and calls the functions registered with atexit. In torchrun's job
    Python does this itself. On sim, nobody does: the process is that of all ranks.
    """
    if in_a_job() or dist.get_backend().startswith("sim"):
        yield
        return
    before = set(threading.enumerate())
    # what was registered before is the launch's, and a rank's process ends without it
    atexit._clear()
    yield
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
