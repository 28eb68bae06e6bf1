"""The launching process while its ranks run.

It reads what they report, shows what they print, and finds out what went wrong.

rank r ──▶ printed lines ──────────────▶ this process's output
       ──▶ calls, blocked, unblocked ──▶ call checker, wait-for graph ──▶ MisuseError, DeadlockError
       ──▶ result | failure | death ───▶ results, RankFailed
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel101.laboratory.ranks.diagnosis import (
    TOO_LONG,
    rank_died,
    rank_raised,
    timed_out,
)
from parallel101.laboratory.ranks.output import RankOutput, Screen, read_available
from parallel101.laboratory.ranks.processes import RankProcess, kill
from parallel101.laboratory.ranks.run_watcher import WAIT_FOR_CAUSE, RunWatcher
from parallel101.laboratory.ranks.stuck import SILENT, rank_lines
from parallel101.laboratory.ranks.wire import (
    ASK_RECORD,
    ASK_STACKS,
    CALLS,
    EXIT,
    FAILURE,
    RECORD,
    RESULT,
    STACKS,
    STATUS,
    Failure,
    RankRecord,
    RankStack,
    VirtualExit,
    Wire,
    unpack,
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
LONGEST_LOOK = 0.5  # seconds between two looks at whether a signal has come


@dataclass
class MonitoredRank:
    """The launching process's view of one process: a rank, or on sim all of them."""

    rank: int
    process: RankProcess
    wire: Wire
    outputs: tuple[RankOutput, RankOutput]
    result: tuple[bytes, list] | None = None
    failure: Failure | None = None
    record: RankRecord | None = None
    # what it did when it was asked (each virtual rank, on sim)
    stacks: list[RankStack] | None = None
    exit_report: bytes = b""  # faulthandler's dump, if it crashed, and its exit code
    exitcode: int | None = None
    ended: bool = False


class Monitor:
    """Watches the ranks of a launch.

    `watch` returns when every rank has returned, and raises what went wrong.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        timeout: float,
        prefixes: Sequence[str],
        *,
        checked: bool = False,
        stuck_after: float = math.inf,
    ):
        self.screen = Screen()
        self.watcher = RunWatcher(
            len(processes),
            stuck_after,
            self.ask_stacks,
            lambda text: self.screen.lines("stderr", text.splitlines()),
        )
        self.ranks: list[MonitoredRank] = []
        self.timeout = timeout
        self.checked = checked
        self.fail_at = math.inf  # the moment when the cause of a failure is chosen
        self.selector = selectors.DefaultSelector()
        for number, process in enumerate(processes):
            out, err = (
                RankOutput(prefixes[number], stream, self.screen) for stream in ("stdout", "stderr")
            )
            rank = MonitoredRank(number, process, Wire(process.control), (out, err))
            self.ranks.append(rank)
            for channel, handle, about in (
                (rank.wire, self._on_frame, rank),
                (process.out, self._on_output, out),
                (process.err, self._on_output, err),
                (process.status, self._on_status, rank),
            ):
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
            self._watch()

    def _watch(self) -> None:
        deadline = time.monotonic() + self.timeout
        while not all(rank.result is not None for rank in self.ranks):
            now = time.monotonic()
            if now >= self.fail_at:
                raise self._root_cause()
            if (fault := self.watcher.look(now)) is not None:
                raise self._root_cause() if isinstance(fault, MisuseError) else fault
            self.watcher.report_stopped({r.rank: r.process.pid for r in self.ranks if not r.ended})
            if now >= deadline:
                raise self.watcher.calls.error() or self._timed_out()
            self._listen(min(deadline, self.fail_at, self.watcher.next_look(now)) - now)
        if (misuse := self.watcher.calls.error()) is not None:
            raise misuse

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
        kill(rank.process)  # the processes that it started may hold its ends of our pipes
        rank.wire.sock.settimeout(WAIT_FOR_CAUSE)
        while rank.wire in self.selector.get_map() and select.select([rank.wire], [], [], 0)[0]:
            self._on_frame(rank.wire, rank)  # it was sent before the rank died
        if rank.wire in self.selector.get_map():
            self.selector.unregister(rank.wire)
        rank.ended = True
        if rank.result is None and rank.failure is None:
            self._fail_within(WAIT_FOR_CAUSE)

    def _on_frame(self, wire: Wire, rank: MonitoredRank) -> None:
        try:
            kind, body, buffers = wire.receive_packed()
        except (EOFError, OSError):
            self.selector.unregister(wire)
            return
        ranks = self.watcher.graph.ranks
        status = ranks[rank.rank]
        if kind == RESULT:
            rank.result = body, buffers
            ranks[rank.rank] = replace(status, returned=True, blocked=None, limit=None)
            return
        value = unpack(body, buffers)
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
        elif kind == STACKS:
            rank.stacks = value
        elif kind == FAILURE:
            rank.failure = value
            ranks[rank.rank] = replace(status, blocked=None, limit=None)
            others_may_fail = value.consequence and len(self.ranks) > 1
            self._fail_within(WAIT_FOR_OTHERS if others_may_fail else WAIT_FOR_CAUSE)

    def _fail_within(self, seconds: float) -> None:
        self.fail_at = min(self.fail_at, time.monotonic() + seconds)

    # ---- what went wrong ----

    def _root_cause(self) -> BaseException:
        """Return the error to raise for all the failures that are known.

        It is the first of: a misuse, a rank's own exception, a death, an error that only says that
        another rank has failed.
        """
        if self.checked:
            self.ask_records()  # and with them, the newest calls
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        for failure in failures:  # a rank may have found the misuse before anything broke
            if isinstance(failure.error, MisuseError):
                return failure.error
        if (misuse := self.watcher.calls.error()) is not None:
            return misuse
        failures.sort(key=lambda failure: (failure.consequence, failure.rank))
        if not failures or failures[0].consequence:
            for rank in self.ranks:
                if rank.ended and rank.result is None and rank.failure is None:
                    return self._died(rank)
        failure = failures[0]
        if isinstance(failure.error, DeadlockError):
            return failure.error
        if isinstance(failure.error, VirtualExit):
            return rank_died(failure.rank, failure.error.code)
        return rank_raised(failure, [call for record in self.records() for call in record.unwaited])

    def _died(self, rank: MonitoredRank) -> RankFailed:
        """Return the error for a rank whose process has ended, with what the other ranks did."""
        crash_dump, stderr = rank.exit_report.decode(errors="replace"), rank.outputs[1].tail
        statuses = self.watcher.graph.ranks
        self._listen_until(
            lambda: all(r.ended or r.failure or statuses[r.rank].stuck for r in self.ranks), TO_FAIL
        )
        failed = [other.failure for other in self.ranks if other.failure is not None]
        others = rank_lines(
            self.watcher.graph, {f.rank: RankStack(f.rank, f.place, []) for f in failed}
        )
        if TOO_LONG.search(stderr):
            self.ask_records()
            others = self.watcher.graph.longer_messages(rank.rank) or others
        return rank_died(rank.rank, rank.exitcode, crash_dump, stderr, self.checked, others)

    def _timed_out(self) -> LaunchTimeout:
        lines = rank_lines(self.watcher.graph, self.ask_stacks(), SILENT)
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

    def let_exit(self) -> None:
        """Let the ranks exit, now that all have returned, and wait until they have."""
        for rank in self.ranks:
            _send(rank, EXIT)
        self._listen_until(lambda: all(rank.ended for rank in self.ranks), 5.0)

    def close(self, explained: bool = False) -> None:
        """Leave no process, socket or unread line behind.

        `explained`: an error is about to say why the run failed.
        """
        with contextlib.ExitStack() as at_last:
            for close in (self.selector.close, *(rank.process.close for rank in self.ranks)):
                at_last.callback(close)
            for rank in self.ranks:
                kill(rank.process)
            self._listen_until(lambda: all(rank.ended for rank in self.ranks), 5.0)
            self._listen_until(lambda: False, 0.0)
            for rank in self.ranks:
                for output in rank.outputs:
                    output.close(explained)
            self.screen.close()


def no_ranks_run(*_: object) -> None:
    """Do nothing: this handles SIGUSR1 while `parallel101 run` has no ranks."""


def _send(rank: MonitoredRank, kind: bytes) -> bool:
    try:
        rank.wire.send(kind)
    except OSError:
        return False
    return True
