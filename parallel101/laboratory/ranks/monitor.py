"""Watches the ranks of a run, local ones and those of a job alike.

It reads what they report, shows what local ranks print, and finds out what went wrong.

rank r ──▶ printed lines (local) ──────▶ this process's output
       ──▶ calls, blocked, unblocked ──▶ call checker, wait-for graph ──▶ MisuseError, DeadlockError
       ──▶ stack, stopped process ─────▶ reports while the run goes on (diagnosis.py)
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
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from parallel101.laboratory.ranks.diagnosis import (
    RUN_CHECKED,
    SILENT,
    TOO_LONG,
    StuckDetector,
    crash_place,
    how_it_ended,
    how_it_was_lost,
    rank_died,
    rank_lines,
    rank_raised,
    stuck_text,
    timed_out,
)
from parallel101.laboratory.ranks.output import RankOutput, Screen, read_available
from parallel101.laboratory.ranks.pickling import unpack
from parallel101.laboratory.ranks.processes import RankProcess, kill
from parallel101.laboratory.ranks.wire import (
    ABORTS,
    CALLS,
    EXIT,
    FAILURE,
    LEAVES,
    PLACE,
    RECORD,
    RESULT,
    STACKS,
    STATUS,
    WANTS_REPORT,
    Job,
    RankRecord,
    RankStack,
    VirtualExit,
    Wire,
)
from parallel101.laboratory.record.calls import CallChecker
from parallel101.laboratory.record.errors import (
    DeadlockError,
    LaunchTimeout,
    MisuseError,
    RankFailed,
)
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.record.wait_for import WaitForGraph

REPORTS = "reports.txt"
# seconds after a failure in which another rank's failure may turn out to be its cause; and after
# one that only says that another rank has failed
WAIT_FOR_CAUSE, WAIT_FOR_OTHERS = 0.05, 1.0
# seconds for other ranks' calls of a collective in which two differ, to tell which is the odd one
WAIT_FOR_CALLS = 0.3
TO_FAIL = 0.3  # seconds for the other ranks to lose their connection to one that has died
TO_ANSWER = 1.5  # seconds for the ranks to send their stacks
LOOK_AT_PROCESSES_EVERY = 0.5  # seconds; a process counts as stopped at the second look
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
    said: dict[bytes, Any] = field(default_factory=dict)  # its newest frame of each kind
    exit_report: bytes = b""  # faulthandler's dump, if it crashed, and its exit code
    exitcode: int | None = None
    ended: bool = False

    @property
    def broken(self) -> bool:
        """Return whether it has ended, and nothing has said why."""
        return self.ended and not {RESULT, FAILURE, LEAVES} & self.said.keys()

    def send(self, kind: bytes, value: Any = None) -> bool:
        """Send it a frame. Return whether that was possible."""
        with contextlib.suppress(OSError):
            if self.wire is not None:
                self.wire.send(kind, value)
                return True
        return False


class Monitor:
    """Watches the ranks of a launch.

    Add each rank. Then `watch` returns when all have returned, and raises what went wrong.

    Args:
        write: writes a report for the user; None: on stderr, between what the ranks print.
        folder: where reports are also written to, in reports.txt; or None.
    """

    def __init__(
        self, job: Job, write: Callable[[str], None] | None = None, folder: Path | None = None
    ):
        self.job, self.folder, self.screen = job, folder, Screen()
        self.write = write or (lambda text: self.screen.lines("stderr", text.splitlines()))
        self.ranks = [MonitoredRank(rank) for rank in range(job.processes)]
        self.deadline = time.monotonic() + job.timeout
        self.fail_at = math.inf  # the moment when the cause of a failure is chosen
        self.selector = selectors.DefaultSelector()
        self.graph, self.calls = WaitForGraph(job.processes), CallChecker()
        mirrors = job.simulated.get("mirrors")
        alone = job.world_size == 1 or (mirrors is not None and len(mirrors.present) == 1)
        virtual = job.backend == "sim"
        self.stuck = StuckDetector(math.inf if alone else job.stuck_after, virtual)
        self.misuse_due = math.inf  # when calls that differ are an error
        self.report_wanted = False  # a user has asked, by SIGUSR1, what the ranks do
        self.stopped: set[int] = set()  # ranks whose process was stopped at the last look
        self.reported_stopped: set[int] = set()
        self.next_look_at_processes = 0.0

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
                    asks = lambda *_: setattr(self, "report_wanted", True)  # noqa: E731
                    signal.signal(signal.SIGUSR1, asks)
                    after.callback(signal.signal, signal.SIGUSR1, before)
            while not all(RESULT in rank.said for rank in self.ranks):
                self._look(time.monotonic())
        if (misuse := self.calls.error()) is not None:
            raise misuse

    def _look(self, now: float) -> None:
        """Raise the error that ends the run, or write the reports that are due, and listen."""
        if now >= min(self.fail_at, self.misuse_due):
            raise self._root_cause()
        if (deadlock := self.graph.confirmed_deadlock(now)) is not None:
            raise self._root_cause() if self.calls.error() else deadlock
        if now >= self.deadline:
            raise self.calls.error() or self._timed_out()
        if (report := self.graph.report_of_limits(now)) is not None:
            self.say(f"parallel101: {report}")
        if self.report_wanted:
            self.report_wanted = False
            self.report("parallel101: what the ranks do now (SIGUSR1)")
        if now >= self.stuck.due(now, self.graph):
            stacks = self.ask_stacks()
            quiet = {rank: stack.quiet for rank, stack in stacks.items() if stack.quiet is not None}
            if self.stuck.stuck(then := time.monotonic(), quiet):
                seconds, pause = then - self.stuck.since, self.stuck.pause
                self.say(stuck_text(self._lines(stacks), seconds, pause))
        if now >= self.next_look_at_processes:
            self.next_look_at_processes = now + LOOK_AT_PROCESSES_EVERY
            self._report_stopped()
        due = self.deadline, self.fail_at, self.misuse_due
        self._listen(min(*due, self.graph.next_look, self.stuck.due(now, self.graph)) - now)

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
        value: Any = (body, buffers) if kind == RESULT else unpack(body, buffers, wire.plain)
        rank.said[kind] = value
        statuses = self.graph.ranks
        status = statuses[rank.rank]
        if kind == CALLS:
            now = time.monotonic()
            for call in value:
                if self.calls.check(call):
                    self.misuse_due = now + WAIT_FOR_CALLS
            if self.calls.all_called:
                self.misuse_due = min(self.misuse_due, now + WAIT_FOR_CAUSE)
        elif kind == STATUS and not {RESULT, FAILURE} & rank.said.keys():
            statuses[rank.rank] = value
        elif kind == RECORD:
            known = {name: getattr(status, name) for name in ("blocked", "limit", "returned")}
            statuses[rank.rank] = replace(value[1], **known)
        elif kind in (RESULT, FAILURE):
            statuses[rank.rank] = replace(status, returned=kind == RESULT, blocked=None, limit=None)
            if kind == FAILURE:
                others_may_fail = value.consequence and len(self.ranks) > 1
                self._fail_within(WAIT_FOR_OTHERS if others_may_fail else WAIT_FOR_CAUSE)
        elif kind == WANTS_REPORT:
            self.report_wanted = True

    def _fail_within(self, seconds: float) -> None:
        self.fail_at = min(self.fail_at, time.monotonic() + seconds)

    # ---- reports while the run goes on ----

    def report(self, head: str) -> None:
        """Report what each rank waits for, or where it is, with its stack."""
        self.say("\n  ".join([head, *self._lines(self.ask_stacks())]))

    def _lines(self, stacks: dict[int, RankStack]) -> list[str]:
        # on sim, a rank without a stack has returned
        silent = "" if self.job.backend == "sim" and stacks else SILENT
        return rank_lines(self.graph, stacks, silent, details=True)

    def _report_stopped(self) -> None:
        """Report ranks of this host that a signal such as SIGSTOP has stopped."""
        pids = {r.rank: r.pid for r in self.ranks if r.pid is not None and not r.ended}
        before, self.stopped = self.stopped, {r for r, pid in pids.items() if is_stopped(pid)}
        self.reported_stopped &= self.stopped
        new = sorted(self.stopped & before - self.reported_stopped)
        if new and any(status.blocked for status in self.graph.ranks):
            self.reported_stopped.update(new)
            command = f"kill -CONT {' '.join(str(pids[rank]) for rank in new)}"
            head = f"parallel101: a signal has stopped {ranks_text(new)}. To continue: {command}"
            self.say("\n  ".join([head, *rank_lines(self.graph, {})]))

    def say(self, text: str) -> None:
        """Write a report, also to the folder."""
        self.write(text)
        if self.folder is not None:
            # the disk may be what is full
            with (
                contextlib.suppress(OSError),
                (self.folder / REPORTS).open("a", encoding="utf-8") as file,
            ):
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n\n")

    # ---- what went wrong ----

    def _root_cause(self) -> BaseException:
        """Return the error to raise for all the failures that are known.

        It is the first of: a misuse, a rank's own exception, a death, an error that only says that
        another rank has failed. `announced_by` is then the rank that has raised it.
        """
        if self.job.recording:
            self.ask(RECORD)  # and with them, the newest calls
        failures = sorted(self.said(FAILURE), key=lambda failed: (failed.consequence, failed.rank))
        # a rank may have found the misuse before anything broke
        misused = [failure for failure in failures if isinstance(failure.error, MisuseError)]
        if not misused:
            if (misuse := self.calls.error()) is not None:
                return misuse
            if not failures or failures[0].consequence:
                broken = [rank for rank in self.ranks if rank.broken]
                if not broken and any(rank.host for rank in self.ranks):
                    # a connection has broken, and so may be the network to a whole host
                    answers = self.ask_stacks()
                    silent = [rank for rank in self.ranks if rank.rank not in answers]
                    broken = [r for r in silent if FAILURE not in r.said and not r.ended]
                if broken:
                    return self._died(broken[0])
        failure = (misused or failures)[0]
        error = failure.error
        if isinstance(error, VirtualExit):
            (code,) = error.args
            return rank_died(failure.rank, how_it_ended(code), code, place=failure.place)
        if not isinstance(error, MisuseError | DeadlockError):
            unwaited = [call for record in self.records() for call in record.unwaited]
            error = rank_raised(failure, unwaited)
        error.announced_by = failure.rank
        return error

    def _died(self, rank: MonitoredRank) -> RankFailed:
        """Return the error for a rank whose process has ended, with what the other ranks did."""
        stderr, graph = rank.outputs[1].tail if rank.outputs else "", self.graph
        self._listen_until(
            lambda: all(
                r.ended or FAILURE in r.said or graph.ranks[r.rank].stuck for r in self.ranks
            ),
            TO_FAIL,
        )
        graph.ranks[rank.rank] = replace(graph.ranks[rank.rank], blocked=None)
        others = rank_lines(
            graph, {f.rank: RankStack(f.rank, f.place, []) for f in self.said(FAILURE)}
        )
        aborts = ABORTS in rank.said
        if aborts or TOO_LONG.search(stderr):
            self.ask(RECORD)
            others = graph.longer_messages(rank.rank) or others
        if aborts and rank.host and not self.job.recording:
            others = [*others, RUN_CHECKED]
        return rank_died(
            rank.rank,
            how_it_was_lost(rank.host, aborts) if rank.host else how_it_ended(rank.exitcode),
            rank.exitcode,
            place=crash_place(rank.exit_report.decode(errors="replace"))
            or rank.said.get(PLACE, ""),
            stderr=stderr,
            checked=self.job.recording,
            others=others,
        )

    def _timed_out(self) -> LaunchTimeout:
        absent = [rank.rank for rank in self.ranks if rank.wire is None]
        lines = rank_lines(self.graph, self.ask_stacks(), SILENT, absent=absent)
        self.ask(RECORD)
        return timed_out(self.job.timeout, lines, self.graph.dropped_works())

    def ask_stacks(self) -> dict[int, RankStack]:
        """Return the stacks of the ranks, as far as they answer in time."""
        for rank in self.ranks:
            rank.said.pop(STACKS, None)
        self.ask(STACKS, TO_ANSWER)
        return {stack.rank: stack for stacks in self.said(STACKS) for stack in stacks}

    def ask(self, kind: bytes, seconds: float = 0.5) -> None:
        """Ask the ranks that run for a frame that they have not sent, and wait for it."""
        lacking = lambda rank: kind not in rank.said and not rank.ended  # noqa: E731
        asked = [rank for rank in self.ranks if lacking(rank) and rank.send(kind)]
        self._listen_until(lambda: not any(map(lacking, asked)), seconds)

    # ---- the end ----

    def records(self) -> list[RankRecord]:
        """Return the records of the ranks, as far as they have sent them."""
        return [record for record, _ in self.said(RECORD)]

    def said(self, kind: bytes) -> list[Any]:
        """Return the newest frame of a kind of each rank that has sent one. Results are packed."""
        return [rank.said[kind] for rank in self.ranks if kind in rank.said]

    def let_exit(self, kind: bytes = EXIT, value: Any = None, seconds: float = 5.0) -> None:
        """Tell all ranks that the run is over, and wait until they have ended.

        A job's rank 0, in this process, is the last one: when it knows, the others do.
        """
        for rank in reversed(self.ranks):
            rank.send(kind, value)
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


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process of this host."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def write_on_stderr(text: str) -> None:
    """Write a report, or a line, on stderr."""
    with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
