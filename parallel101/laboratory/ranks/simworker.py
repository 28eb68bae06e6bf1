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

from parallel101.laboratory.ranks.pickling import pack, pack_result
from parallel101.laboratory.ranks.program import (
    call,
    failure_of,
    own_init_accepted,
    pack_failure,
    slow_imports,
    torchrun_environment,
    unpack_program,
)
from parallel101.laboratory.ranks.watcher import (
    ControlThread,
    QuietClock,
    before_exits,
    stack_lines,
)
from parallel101.laboratory.ranks.wire import (
    FAILURE,
    RECORD,
    RESULT,
    Failure,
    Job,
    RankRecord,
    RankStack,
    VirtualExit,
    Wire,
)
from parallel101.laboratory.record.events import EventRow
from parallel101.laboratory.record.program_lines import caller, where
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.record.wait_for import RankStatus
from parallel101.laboratory.sim.group import SharedState
from parallel101.laboratory.sim.simulate import simulate
from parallel101.laboratory.sim.virtual_gpu import GpuCount, VirtualGPU, virtual_gpu


def run_virtual_ranks(job: Job, wire: Wire, loaded: set[str]) -> None:
    """Run the program on all ranks of a job, on the virtual clock."""
    _, body, buffers = wire.receive_packed()
    failures: dict[int, tuple[bytes, list]] = {}  # pickled, by rank
    gpus: dict[int, GpuCount] = {}
    watcher = SimWatcher(wire)

    def ends(code: int) -> NoReturn:
        """End only the virtual rank that ends itself, and not this process, which is all ranks."""
        error, rank = VirtualExit(code), getattr(_this_thread, "rank", 0)
        if watcher.threads.get(rank) != threading.get_ident():  # on a thread that the rank started
            failure = Failure(rank, error, "", "", False, caller())
            wire.send_packed(FAILURE, *pack_failure(failure))
            threading.Event().wait()
        raise error

    def rank_main(rank: int) -> tuple[bytes, list]:
        watcher.threads[rank] = threading.get_ident()
        _this_thread.rank = rank
        os.environ.update(torchrun_environment(rank, job.world_size))
        try:
            # cloudpickle makes a class once per process, and all ranks would share it
            own_classes = weakref.WeakValueDictionary()  # type: ignore[var-annotated]
            tracker = "_DYNAMIC_CLASS_TRACKER_BY_ID"
            with mock.patch.object(cloudpickle.cloudpickle, tracker, own_classes):
                program = unpack_program(body, [bytearray(buffer) for buffer in buffers])
            with virtual_device(job.device) as gpu:
                value = call(program)
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

    with own_init_accepted(), before_exits(ends), threads_of_ranks():
        run = simulate(
            rank_main,
            job.world_size,
            on_start=watcher.watch,
            **job.recorder_options,
            **job.simulated,
        )
    _this_thread.rank = None
    record = RankRecord(
        run.events,
        run.unfinished,
        run.unwaited,
        [gpus[rank] for rank in sorted(gpus)],
        run.warnings,
        imported=slow_imports(loaded),
    )
    wire.send(RECORD, (record, RankStatus()))
    if run.error is None:
        wire.send_packed(RESULT, *pack(run.results))
    else:
        rank = run.failed_rank or 0
        failure = None if run.failed_rank is None else failures.get(rank)
        wire.send_packed(FAILURE, *(failure or pack_failure(failure_of(rank, run.error))))
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
    """Tells the launching process on request where every virtual rank is, and what was recorded.

    Attributes:
        threads: by rank, once it has begun.
    """

    def __init__(self, wire: Wire):
        super().__init__(wire)
        self.threads: dict[int, int] = {}
        self.clock = QuietClock()

    def watch(self, shared: SharedState) -> None:
        """Begin, when the virtual ranks do."""
        self.shared = shared
        self.start()

    def look(self) -> None:
        """Note whether the virtual ranks make progress."""
        world = self.shared.world
        self.clock.look((world.now, world.round, world._current, len(world.events)))

    def send_record(self) -> None:
        unfinished: list[EventRow] = []
        # the ranks go on meanwhile, and may change what is being read
        with contextlib.suppress(RuntimeError):
            unfinished = self.shared.unfinished()
        record = RankRecord(list(self.shared.world.events), unfinished)
        self.wire.send(RECORD, (record, RankStatus()))

    def stacks(self) -> list[RankStack]:
        self.look()
        world, waits, stacks = self.shared.world, {}, []
        for rank in [*world.ranks, *([] if world.second is None else world.second.ranks)]:
            # the ranks go on meanwhile, and may change what is being read
            with contextlib.suppress(RuntimeError):
                work = None if rank.finished else rank.waiting
                if work is not None and (missing := work.missing()):
                    waits[rank.number] = f"in {work.call().kind} for {ranks_text(missing)}"
        ranks = {thread: rank for rank, thread in self.threads.items()}
        # not this thread's, which would refer to itself: see _others_at_work in watcher.py
        frames = {ranks[t]: frame for t, frame in sys._current_frames().items() if t in ranks}
        for number, frame in sorted(frames.items()):
            if number == world.ranks[world._current].number:
                doing = stack_lines(frame), self.clock.quiet, self.clock.busy
                stacks.append(RankStack(number, where(frame), *doing))
            else:
                waits_for = waits.get(number, "for its turn")
                stacks.append(RankStack(number, where(frame), [], waits=waits_for))
        return stacks


_this_thread = threading.local()


class PrefixedStream(io.TextIOWrapper):
    """A stream that writes the rank of the current thread before each line."""

    def __init__(self, *out: Any, **options: Any):
        super().__init__(*out, **options)
        self.rest: dict[int | None, str] = {}  # each rank's unfinished line

    def write(self, text: str) -> int:
        rank = getattr(_this_thread, "rank", None)
        *lines, self.rest[rank] = (self.rest.get(rank, "") + text).split("\n")
        for line in lines:
            super().write(f"[rank {rank}] {line}\n" if rank is not None else f"{line}\n")
        return len(text)

    def end_line(self) -> None:
        """Write the current rank's unfinished line as a line."""
        if self.rest.get(getattr(_this_thread, "rank", None)):
            self.write("\n")


@contextlib.contextmanager
def threads_of_ranks() -> Iterator[None]:
    """Inside the block, count a thread that a virtual rank starts as that rank's."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        rank, run = getattr(_this_thread, "rank", None), thread.run

        def run_for_rank() -> None:
            _this_thread.rank = rank
            run()

        thread.run = run_for_rank  # type: ignore[method-assign]
        start(thread)

    with mock.patch.object(threading.Thread, "start", started):
        yield
