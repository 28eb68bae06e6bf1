"""Watches the ranks of a run, local ones and those of a job alike.

It reads what they report, shows what local ranks print, and finds out what went wrong.

rank r ──▶ printed lines (local) ──────▶ this process's output
       ──▶ calls, blocked, unblocked ──▶ call checker, wait-for graph ──▶ MisuseError, DeadlockError
       ──▶ result | failure | death ───▶ results, RankFailed

It runs in the launching process. In a job, it is a thread of rank 0 (see torchrun.py).
"""

from __future__ import annotations

import contextlib
import math
import re
import select
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel101.laboratory.ranks.diagnosis import (
    RUN_CHECKED,
    SILENT,
    TOO_LONG,
    how_it_ended,
    how_it_was_lost,
    rank_died,
    rank_lines,
    rank_raised,
    timed_out,
)
from parallel101.laboratory.ranks.output import RankOutput, Screen, read_available
from parallel101.laboratory.ranks.pickling import unpack
from parallel101.laboratory.ranks.processes import RankProcess, kill
from parallel101.laboratory.ranks.run_watcher import WAIT_FOR_CAUSE, RunWatcher
from parallel101.laboratory.ranks.wire import (
    ABORTS,
    ASK_RECORD,
    ASK_STACKS,
    CALLS,
    EXIT,
    FAILURE,
    LEAVES,
    RECORD,
    RESULT,
    STACKS,
    STATUS,
    WANTS_REPORT,
    Failure,
    RankRecord,
    RankStack,
    VirtualExit,
    Wire,
)
from parallel101.laboratory.record.errors import (
    DeadlockError,
    LaunchTimeout,
    MisuseError,
    RankFailed,
)

# seconds after an error that only says that another rank has failed, as WAIT_FOR_CAUSE
WAIT_FOR_OTHERS = 1.0
TO_FAIL = 0.3  # seconds for the other ranks to lose their connection to one that has died
TO_ANSWER = 1.5  # seconds for the ranks to send their stacks
# frames that set an attribute of a MonitoredRank
ANSWERS = {STACKS: "stacks", ABORTS: "aborts", LEAVES: "leaves"}
LONGEST_LOOK = 0.5  # seconds between two looks at whether a signal has come


@dataclass
class MonitoredRank:
    """The monitor's view of one process: a rank, or on sim all of them."""

    rank: int
    wire: Wire | None = None  # None until a rank of a job has come
    pid: int | None = None  # None on another host
    process: RankProcess | None = None  # of a local rank, with what it prints
    outputs: tuple[RankOutput, ...] = ()
    host: str = ""  # of a rank of a job
    result: tuple[bytes, list] | None = None
    failure: Failure | None = None
    record: RankRecord | None = None
    # what it did when it was asked (each virtual rank, on sim)
    stacks: list[RankStack] | None = None
    exit_report: bytes = b""  # faulthandler's dump, if it crashed, and its exit code
    exitcode: int | None = None
    aborts: str = ""  # "file:line" of a rank that C++ aborts
    leaves: bool = False  # a signal has asked it to end
    ended: bool = False

    @property
    def broken(self) -> bool:
        """Return whether it has ended, and nothing has said why."""
        return self.ended and self.result is None and self.failure is None and not self.leaves


class Monitor:
    """Watches the ranks of a launch.

    Add each rank. Then `watch` returns when all have returned, and raises what went wrong.
    """

    def __init__(
        self,
        size: int,
        timeout: float,
        *,
        checked: bool = False,
        stuck_after: float = math.inf,
        write: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ):
        self.screen = Screen()
        write = write or (lambda text: self.screen.lines("stderr", text.splitlines()))
        self.watcher = RunWatcher(size, stuck_after, self.ask_stacks, write, folder)
        self.ranks = [MonitoredRank(rank) for rank in range(size)]
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self.checked = checked
        self.fail_at = math.inf  # the moment when the cause of a failure is chosen
        self.selector = selectors.DefaultSelector()

    def add(self, rank: MonitoredRank, wire: Wire) -> None:
        """Listen to a rank."""
        rank.wire = wire
        self.listen_to(wire, self._on_frame, rank)

    def add_process(self, rank: MonitoredRank, process: RankProcess, prefix: str) -> None:
        """Listen to a local rank, and show what it prints behind a prefix."""
        rank.process, rank.pid = process, process.pid
        rank.outputs = tuple(RankOutput(prefix, s, self.screen) for s in ("stdout", "stderr"))
        self.add(rank, Wire(process.control))
        self.listen_to(process.out, self._on_output, rank.outputs[0])
        self.listen_to(process.err, self._on_output, rank.outputs[1])
        self.listen_to(process.status, self._on_status, rank)

    def listen_to(self, channel: Any, handle: Callable[[Any, Any], None], about: Any) -> None:
        """Call `handle(channel, about)` whenever there is something to read."""
        self.selector.register(channel, selectors.EVENT_READ, (handle, about))

    # ---- the loop ----

    def watch(self) -> None:
        """Wait until all have returned. Report on SIGUSR1, unless the program has a handler."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        with contextlib.ExitStack() as after:
            if in_main_thread and hasattr(signal, "SIGUSR1"):
                before = signal.getsignal(signal.SIGUSR1)
                if before in (signal.SIG_DFL, no_ranks_run):
                    signal.signal(signal.SIGUSR1, self._on_signal)
                    after.callback(signal.signal, signal.SIGUSR1, before)
            while not all(rank.result is not None for rank in self.ranks):
                self._look()
        if (misuse := self.watcher.calls.error()) is not None:
            raise misuse

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self.fail_at:
            raise self._root_cause()
        here = {r.rank: r.pid for r in self.ranks if r.pid is not None and not r.ended}
        if (fault := self.watcher.look(now, here)) is not None:
            raise self._root_cause() if isinstance(fault, MisuseError) else fault
        if now >= self.deadline:
            raise self.watcher.calls.error() or self._timed_out()
        self._listen(min(self.deadline, self.fail_at, self.watcher.next_look(now)) - now)

    def _listen(self, seconds: float) -> None:
        for key, _ in self.selector.select(min(max(0.0, seconds), LONGEST_LOOK)):
            # an earlier event of this round may have removed it
            if key.fileobj in self.selector.get_map():
                handle, about = key.data
                handle(key.fileobj, about)

    def _listen_until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and self.selector.get_map():
            left = deadline - time.monotonic()
            self._listen(left)
            if left <= 0:
                return

    def _on_output(self, channel: Any, output: RankOutput) -> None:
        data = read_available(channel)
        if data:
            output.feed(data)
        else:
            self.selector.unregister(channel)

    def _on_status(self, channel: Any, rank: MonitoredRank) -> None:
        data = read_available(channel)
        rank.exit_report += data
        code = re.search(rb"(?:\A|\n)(-?\d+)\n\Z", rank.exit_report)
        if data and code is None:
            return
        self.selector.unregister(channel)
        rank.exitcode = None if code is None else int(code[1])
        assert rank.process is not None and rank.wire is not None
        kill(rank.process)  # the processes that it started may hold its ends of our pipes
        rank.wire.sock.settimeout(WAIT_FOR_CAUSE)
        while rank.wire in self.selector.get_map() and select.select([rank.wire], [], [], 0)[0]:
            self._on_frame(rank.wire, rank)  # it was sent before the rank died
        if rank.wire in self.selector.get_map():
            self.selector.unregister(rank.wire)
        self._has_ended(rank)

    def _has_ended(self, rank: MonitoredRank) -> None:
        rank.ended = True
        if rank.broken:
            self._fail_within(WAIT_FOR_CAUSE)

    def _on_frame(self, wire: Wire, rank: MonitoredRank) -> None:
        try:
            kind, body, buffers = wire.receive_packed()
        except (EOFError, OSError):
            self.selector.unregister(wire)
            if rank.process is None:
                self._has_ended(rank)
            return
        ranks = self.watcher.graph.ranks
        status = ranks[rank.rank]
        if kind == RESULT:
            rank.result = body, buffers
            ranks[rank.rank] = replace(status, returned=True, blocked=None, limit=None)
            return
        value = unpack(body, buffers, wire.plain)
        if kind == CALLS:
            for call in value:
                self.watcher.check(call)
        elif kind == STATUS:
            if rank.result is None and rank.failure is None:
                ranks[rank.rank] = value
        elif kind == RECORD:
            rank.record, posted = value
            ranks[rank.rank] = replace(
                posted, blocked=status.blocked, limit=status.limit, returned=status.returned
            )
        elif kind in ANSWERS:
            setattr(rank, ANSWERS[kind], value)
        elif kind == FAILURE:
            rank.failure = value
            ranks[rank.rank] = replace(status, blocked=None, limit=None)
            others_may_fail = value.consequence and len(self.ranks) > 1
            self._fail_within(WAIT_FOR_OTHERS if others_may_fail else WAIT_FOR_CAUSE)
        elif kind == WANTS_REPORT:
            self.watcher.report_wanted = True

    def _fail_within(self, seconds: float) -> None:
        self.fail_at = min(self.fail_at, time.monotonic() + seconds)

    # ---- what went wrong ----

    def _root_cause(self) -> BaseException:
        """Return the error to raise for all the failures that are known.

        It is the first of: a misuse, a rank's own exception, a death, an error that only says that
        another rank has failed. `announced_by` is then the rank that has raised it.
        """
        if self.checked:
            self.ask_records()  # and with them, the newest calls
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        for failure in failures:  # a rank may have found the misuse before anything broke
            if isinstance(failure.error, MisuseError):
                return self._raised_by(failure, failure.error)
        if (misuse := self.watcher.calls.error()) is not None:
            return misuse
        failures.sort(key=lambda failure: (failure.consequence, failure.rank))
        if not failures or failures[0].consequence:
            broken = [rank for rank in self.ranks if rank.broken]
            if not broken and any(rank.host for rank in self.ranks):
                # a connection has broken, and so may be the network to a whole host
                answers = self.ask_stacks()
                broken = [r for r in self.ranks if not (r.failure or r.ended or r.rank in answers)]
            if broken:
                return self._died(broken[0])
        failure = failures[0]
        if isinstance(failure.error, DeadlockError):
            return self._raised_by(failure, failure.error)
        if isinstance(failure.error, VirtualExit):
            code = failure.error.code
            return rank_died(failure.rank, how_it_ended(code), code)
        unwaited = [call for record in self.records() for call in record.unwaited]
        return self._raised_by(failure, rank_raised(failure, unwaited))

    def _raised_by(self, failure: Failure, error: BaseException) -> BaseException:
        error.announced_by = failure.rank  # type: ignore[attr-defined]
        return error

    def _died(self, rank: MonitoredRank) -> RankFailed:
        """Return the error for a rank whose process has ended, with what the other ranks did."""
        stderr = rank.outputs[1].tail if rank.outputs else ""
        graph = self.watcher.graph
        self._listen_until(
            lambda: all(r.ended or r.failure or graph.ranks[r.rank].stuck for r in self.ranks),
            TO_FAIL,
        )
        failed = [other.failure for other in self.ranks if other.failure is not None]
        graph.ranks[rank.rank] = replace(graph.ranks[rank.rank], blocked=None)
        others = rank_lines(graph, {f.rank: RankStack(f.rank, f.place, []) for f in failed})
        if rank.aborts or TOO_LONG.search(stderr):
            self.ask_records()
            others = graph.longer_messages(rank.rank) or others
        if rank.aborts and rank.host and not self.checked:
            others = [*others, RUN_CHECKED]
        return rank_died(
            rank.rank,
            how_it_was_lost(rank.host, rank.aborts) if rank.host else how_it_ended(rank.exitcode),
            rank.exitcode,
            crash_dump=rank.exit_report.decode(errors="replace"),
            stderr=stderr,
            checked=self.checked,
            others=others,
        )

    def _timed_out(self) -> LaunchTimeout:
        absent = [rank.rank for rank in self.ranks if rank.wire is None]
        lines = rank_lines(self.watcher.graph, self.ask_stacks(), SILENT, absent=absent)
        self.ask_records()
        return timed_out(self.timeout, lines, self.watcher.graph.dropped_works())

    def _on_signal(self, *_: object) -> None:
        self.watcher.report_wanted = True

    def ask_stacks(self) -> dict[int, RankStack]:
        """Return the stacks of the ranks, as far as they answer in time."""
        for rank in self.ranks:
            rank.stacks = None
        self._ask(ASK_STACKS, "stacks", TO_ANSWER)
        return {stack.rank: stack for rank in self.ranks for stack in rank.stacks or ()}

    def ask_records(self, seconds: float = 0.5) -> None:
        """Ask the ranks that have not sent their record for what they have recorded so far."""
        self._ask(ASK_RECORD, "record", seconds)

    def _ask(self, kind: bytes, answer: str, seconds: float) -> None:
        """Ask the ranks that run for what they lack, and wait until they have answered."""
        lacking = lambda rank: getattr(rank, answer) is None and not rank.ended  # noqa: E731
        asked = [rank for rank in self.ranks if lacking(rank) and _send(rank, kind)]
        self._listen_until(lambda: not any(map(lacking, asked)), seconds)

    # ---- the end ----

    def records(self) -> list[RankRecord]:
        """Return the records of the ranks, as far as they have sent them."""
        return [rank.record for rank in self.ranks if rank.record is not None]

    def let_exit(self, kind: bytes = EXIT, value: Any = None, seconds: float = 5.0) -> None:
        """Tell all ranks that the run is over, and wait until they have ended.

        A job's rank 0, in this process, is the last one: when it knows, the others do.
        """
        for rank in reversed(self.ranks):
            _send(rank, kind, value)
        self._listen_until(lambda: all(rank.ended or not rank.wire for rank in self.ranks), seconds)

    def close(self, explained: bool = False) -> None:
        """Leave no process, socket or unread line behind.

        `explained`: an error is about to say why the run failed.
        """
        with contextlib.ExitStack() as at_last:
            at_last.callback(self.selector.close)
            processes = [rank.process for rank in self.ranks if rank.process is not None]
            for process in processes:
                at_last.callback(process.close)
            for process in processes:
                kill(process)
            if processes:
                self._listen_until(lambda: all(rank.ended for rank in self.ranks), 5.0)
                self._listen_until(lambda: False, 0.0)
            for rank in self.ranks:
                for output in rank.outputs:
                    output.close(explained)
            self.screen.close()


def no_ranks_run(*_: object) -> None:
    """Do nothing: this handles SIGUSR1 while `parallel101 run` has no ranks."""


def _send(rank: MonitoredRank, kind: bytes, value: Any = None) -> bool:
    if rank.wire is None:
        return False
    try:
        rank.wire.send(kind, value)
    except OSError:
        return False
    return True
