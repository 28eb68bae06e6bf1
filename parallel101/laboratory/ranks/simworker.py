"""The process of a sim launch: all virtual ranks are threads of it, and it ends after the run.

    control ◀── job, program        ──▶ simulate(): a thread a rank ──▶ record, results or failure

Each virtual rank unpickles its own copy of the program, imports its own copies of the program's
modules, and pickles what it returns, as a process would. What ranks share is listed in
sim/process_state.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import cloudpickle
import torch

from parallel101.laboratory.ranks.diagnosis import rank_lines, stuck_text
from parallel101.laboratory.ranks.pickling import pack, pack_result
from parallel101.laboratory.ranks.program import (
    failure_of,
    forked_children_exit,
    own_init_accepted,
    pack_failure,
    slow_imports,
    torchrun_environment,
    unpack_program,
)
from parallel101.laboratory.ranks.watcher import ControlThread, QuietClock, stack_lines
from parallel101.laboratory.ranks.wire import (
    FAILURE,
    RECORD,
    RESULT,
    Job,
    RankRecord,
    RankStack,
    VirtualExit,
    Wire,
)
from parallel101.laboratory.record.events import EventRow
from parallel101.laboratory.record.program_lines import where
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.record.wait_for import RankStatus, WaitForGraph
from parallel101.laboratory.sim.clock import World
from parallel101.laboratory.sim.group import SharedState
from parallel101.laboratory.sim.simulate import simulate
from parallel101.laboratory.sim.virtual_gpu import GpuCount, VirtualGPU, virtual_gpu


def run_virtual_ranks(job: Job, wire: Wire, loaded: set[str]) -> None:
    """Run the program on all ranks of a job, on the virtual clock."""
    _, body, buffers = wire.receive_packed()
    threads: dict[int, int] = {}
    failures: dict[int, tuple[bytes, list]] = {}  # pickled, by rank
    gpus: dict[int, GpuCount] = {}
    watcher = SimWatcher(threads, wire, job.stuck_after)
    watcher.start()
    sys.stdout, sys.stderr = _PrefixedStream(sys.stdout), _PrefixedStream(sys.stderr)
    _make_exits_virtual()

    def rank_main(rank: int) -> tuple[bytes, list]:
        threads[rank] = threading.get_ident()
        _this_thread.rank = rank
        os.environ.update(torchrun_environment(rank, job.world_size))
        try:
            # cloudpickle makes a class once per process, and all ranks would share it
            own_classes = weakref.WeakValueDictionary()  # type: ignore[var-annotated]
            with mock.patch.object(
                cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", own_classes
            ):
                function, args, kwargs = unpack_program(
                    body, [bytearray(buffer) for buffer in buffers]
                )
            with virtual_device(job.device) as gpu, forked_children_exit():
                value = function(*args, **kwargs)
            if gpu is not None:
                gpus[rank] = gpu.count()
            return pack_result(value, rank)
        except Exception as error:
            # now, while the rank's modules are loaded
            failures[rank] = pack_failure(failure_of(rank, error))
            raise
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.end_line()  # type: ignore[union-attr]

    with own_init_accepted():
        run = simulate(
            rank_main,
            job.world_size,
            job.network,
            rules=job.rules,
            payload_bytes=job.payload_bytes,
            mirrors=job.mirrors,
            recording=job.recording,
            keep_waiting=job.keep_waiting,
            on_start=watcher.watch,
        )
    _this_thread.rank = None
    of_gpus = [gpus[rank] for rank in sorted(gpus)] if job.device is not None else None
    imported = slow_imports(loaded)
    record = RankRecord(
        run.events, run.unfinished, run.unwaited, of_gpus, run.warnings, (), imported
    )
    wire.send(RECORD, (record, RankStatus()))
    if run.error is None:
        wire.send_packed(RESULT, *pack(run.results))
    else:
        rank = run.failed_rank
        failure = failures.get(rank) if rank is not None else None
        wire.send_packed(FAILURE, *(failure or pack_failure(failure_of(rank or 0, run.error))))
    watcher.may_exit.wait()


@contextlib.contextmanager
def virtual_device(name: str | None) -> Iterator[VirtualGPU | None]:
    """Give this rank the virtual GPU of that name inside the block.

    torch makes its tensors there: on the meta device, where they have shapes and no values. None:
    the rank has the CPU.
    """
    if name is None:
        yield None
        return
    with torch.device("meta"), virtual_gpu(name) as gpu:
        yield gpu


class SimWatcher(ControlThread):
    """Tells the launching process on request where every virtual rank is.

    It also tells what was recorded so far, and prints a report if one rank runs for more than
    `stuck_after` seconds while the others wait for their turn.
    """

    def __init__(self, threads: dict[int, int], wire: Wire, stuck_after: float):
        super().__init__(wire)
        self.threads = threads
        self.shared: SharedState | None = None
        self.stuck_after = self.pause = stuck_after
        self.clock = QuietClock()

    def look(self) -> None:
        if self.shared is None:
            return
        quiet, _ = self.times()
        if quiet == 0.0:
            self.pause = self.stuck_after
        elif quiet >= self.pause and len(self.shared.world.ranks) > 1:
            stacks = {stack.rank: stack for stack in self.stacks()}
            self.pause = 2 * self.pause + self.stuck_after
            lines = rank_lines(WaitForGraph(0), stacks, details=True)
            print(stuck_text(lines, quiet, self.pause - quiet), file=sys.stderr)

    def times(self) -> tuple[float, float]:
        world = self.shared.world  # type: ignore[union-attr]
        return self.clock.look((world.now, world.round, world._current, len(world.events)))

    def watch(self, shared: SharedState) -> None:
        self.shared = shared

    def send_record(self) -> None:
        if (shared := self.shared) is not None:
            unfinished: list[EventRow] = []
            # the ranks go on meanwhile, and may change what is being read
            with contextlib.suppress(RuntimeError):
                unfinished = shared.unfinished()
            record = RankRecord(list(shared.world.events), unfinished)
            self.wire.send(RECORD, (record, RankStatus()))

    def stacks(self) -> list[RankStack]:
        if self.shared is None:
            return []
        ranks, stacks = set(self.threads.values()), []
        # not this thread's, which would refer to itself: see _others_at_work in watcher.py
        frames = {thread: at for thread, at in sys._current_frames().items() if thread in ranks}
        running, waits = what_ranks_wait_for(self.shared.world)
        for rank, thread in sorted(self.threads.items()):
            if (frame := frames.get(thread)) is None:
                continue
            if rank != running:
                waits_for = waits.get(rank, "for its turn")
                stacks.append(RankStack(rank, where(frame), [], waits=waits_for))
                continue
            stacks.append(RankStack(rank, where(frame), stack_lines(frame), *self.times()))
        return stacks


def what_ranks_wait_for(world: World) -> tuple[int, dict[int, str]]:
    """Return the rank that runs, and for each waiting rank the call and the ranks it waits for."""
    waits = {}
    for rank in [*world.ranks, *([] if world.second is None else world.second.ranks)]:
        # the ranks go on meanwhile, and may change what is being read
        with contextlib.suppress(RuntimeError):
            work = None if rank.finished else rank.waiting
            if work is not None and (missing := work.missing()):
                waits[rank.number] = f"in {work.call().kind} for {ranks_text(missing)}"
    return world.ranks[world._current].number, waits


_this_thread = threading.local()


class _PrefixedStream(io.TextIOBase):
    """A stream that writes the rank of the current thread before each line."""

    def __init__(self, out: Any):
        self.out = out
        self.rest: dict[int | None, str] = {}  # each rank's unfinished line

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the process's own: faulthandler writes there, and torch's `record` turns it on."""
        return self.out.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.out.encoding

    def reconfigure(self, **options: Any) -> None:
        """Do nothing: whole lines are written at once."""

    def write(self, text: str) -> int:
        rank = getattr(_this_thread, "rank", None)
        *lines, self.rest[rank] = (self.rest.get(rank, "") + text).split("\n")
        for line in lines:
            self.out.write(f"[rank {rank}] {line}\n" if rank is not None else f"{line}\n")
        return len(text)

    def end_line(self) -> None:
        """Write the current rank's unfinished line as a line."""
        if self.rest.get(getattr(_this_thread, "rank", None)):
            self.write("\n")

    def flush(self) -> None:
        self.out.flush()  # whole lines only: an unfinished one stays until its end


def _make_exits_virtual() -> None:
    """Let os._exit, os.abort, and a signal to oneself end only the virtual rank that calls them."""
    kill = os.kill

    def exit_rank(code: int = 0) -> NoReturn:
        raise VirtualExit(code)

    def kill_rank(pid: int, signal: int) -> None:
        if pid == os.getpid():
            raise VirtualExit(-int(signal))
        kill(pid, signal)

    real = os._exit, os.kill, os.abort

    def restore() -> None:
        os._exit, os.kill, os.abort = real

    os._exit, os.kill, os.abort = exit_rank, kill_rank, lambda: exit_rank(-6)  # type: ignore[assignment]
    # a child that a rank has forked, such as a DataLoader's worker, is a process of its own
    os.register_at_fork(after_in_child=restore)
