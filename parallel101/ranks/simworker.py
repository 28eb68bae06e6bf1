"""The process in which virtual ranks live: one for all of them, thrown away after the run.

    control ◀── job, function        ──▶ simulate(): a thread a rank ──▶ events, results or error

Each virtual rank unpickles its own copy of the program, as a process would have; only modules are shared between them.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from typing import Any, NoReturn

from parallel101.ranks.diagnosis import Ended
from parallel101.ranks.watcher import Obedient
from parallel101.ranks.wire import BOOKS, IMPORTED, RESULT, Wire
from parallel101.ranks.worker import Job, own_setup_accepted, pack_result, report_failure, unpack_program, worth_preloading
from parallel101.record.recorder import Report
from parallel101.record.where import where
from parallel101.sim.group import SharedState
from parallel101.sim.simulate import simulate

NOT_POSTED: Report = ({}, {}, {}, {}, {})  #  who waits for whom is known here, and nothing to be found out by counting


def run_virtual(job: Job, wire: Wire, loaded: set[str]) -> None:
    """All the ranks of a job on the virtual clock."""
    _, body, buffers = wire.receive_packed()
    threads: dict[int, int] = {}
    watcher = _SimWatcher(threads, wire)
    watcher.start()
    sys.stdout, sys.stderr = _ByRank(sys.stdout), _ByRank(sys.stderr)
    _contain_deaths()

    def rank_main(rank: int) -> Any:
        threads[rank] = threading.get_ident()
        _speaking.rank = rank
        function, args, kwargs = unpack_program(body, [bytearray(buffer) for buffer in buffers])
        try:
            return function(*args, **kwargs)
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.end_line()  # type: ignore[union-attr]

    with own_setup_accepted():
        result = simulate(rank_main, job.world_size, job.network, payload_bytes=job.payload_bytes, on_start=watcher.watch)
    _speaking.rank = None
    wire.send(IMPORTED, worth_preloading(loaded))
    wire.send(BOOKS, (result.events, result.unfinished, NOT_POSTED))
    if result.error is not None:
        report_failure(wire, result.failed_rank or 0, result.error)
    else:
        try:
            for rank, value in enumerate(result.results):
                pack_result(value, rank)
            packed = pack_result(result.results, 0)
        except TypeError as error:
            report_failure(wire, rank, error)
        else:
            wire.send_packed(RESULT, *packed, give_back=True)
    watcher.finish.wait()


class _SimWatcher(Obedient):
    """Says where every virtual rank is, and what was recorded so far, when asked."""

    def __init__(self, threads: dict[int, int], wire: Wire):
        super().__init__(wire)
        self.threads = threads
        self.shared: SharedState | None = None

    def watch(self, shared: SharedState) -> None:
        self.shared = shared

    def tell(self) -> None:
        if (shared := self.shared) is not None:
            unfinished: list[tuple] = []
            with contextlib.suppress(RuntimeError):  #  the ranks go on meanwhile, and may change what is being read
                unfinished = shared.unfinished()
            self.wire.send(BOOKS, (list(shared.world.events), unfinished, NOT_POSTED))

    def places(self) -> list[tuple[int, str]]:
        frames = sys._current_frames()
        return [(rank, where(frames.get(thread))) for rank, thread in sorted(self.threads.items()) if thread in frames]


_speaking = threading.local()


class _ByRank(io.TextIOBase):
    """A stream that puts the speaking rank before each line."""

    def __init__(self, out: Any):
        self.out = out
        self.rest: dict[int | None, str] = {}

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        rank = getattr(_speaking, "rank", None)
        *lines, self.rest[rank] = (self.rest.get(rank, "") + text).split("\n")
        for line in lines:
            self.out.write(f"[rank {rank}] {line}\n" if rank is not None else f"{line}\n")
        return len(text)

    def end_line(self) -> None:
        """What the speaking rank printed without a line's end goes out as a line."""
        if self.rest.get(getattr(_speaking, "rank", None)):
            self.write("\n")

    def flush(self) -> None:
        self.out.flush()  #  whole lines; an unfinished one waits for its end


def _contain_deaths() -> None:
    """os._exit and a signal to oneself end the virtual rank that asked for it, not the world."""
    kill = os.kill

    def leave(code: int = 0) -> NoReturn:
        raise Ended(code)

    def signal_one(pid: int, signal: int) -> None:
        if pid == os.getpid():
            raise Ended(-int(signal))
        kill(pid, signal)

    os._exit, os.kill, os.abort = leave, signal_one, lambda: leave(-6)  # type: ignore[assignment]
