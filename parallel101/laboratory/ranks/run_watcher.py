"""Judges a run by what all its ranks report: misuse, deadlocks, ranks that keep others waiting.

    statuses and calls of all ranks ──▶ RunWatcher.look ──▶ the error that ends the run
                                             ├────────────▶ reports while it goes on
                                             └ asks the ranks for their stacks

    rank 0  ── all_reduce ── waits ────────────────────▶  after `stuck_after` seconds: a report with
    rank 1  ── q.get() ── never comes, or computes long    the stack of rank 1. The run goes on.

A rank may be in an endless loop, or blocked by a lock, a queue whose worker died or a full disk. It
may also compute for long. Nobody can know whether it will come, so a report never ends a run.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from parallel101.laboratory.ranks.diagnosis import SILENT, rank_lines, stuck_text
from parallel101.laboratory.ranks.wire import RankStack
from parallel101.laboratory.record.calls import Call, CallChecker
from parallel101.laboratory.record.errors import DeadlockError, MisuseError
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.record.wait_for import WaitForGraph

REPORTS = "reports.txt"
# seconds after a failure in which another rank's failure may turn out to be its cause
WAIT_FOR_CAUSE = 0.05
# seconds for other ranks' calls of a collective in which two differ, to tell which is the odd one
WAIT_FOR_CALLS = 0.3
LOOK_AT_PROCESSES_EVERY = 0.5  # seconds; a process counts as stopped at the second look
SHORTEST_PAUSE = 0.5  # seconds between two looks at ranks that still make progress


class StuckDetector:
    """Says when a run has made no progress for so long that there should be a report.

    At least one rank waits then, and the others have called nothing. A rank that has returned
    waits for all that have not. Reports about the same waits come after `after` seconds, then after
    twice that time, and so on.

    Args:
        after: seconds; infinity: no report.
    """

    def __init__(self, after: float):
        self.after = self.pause = after
        # by rank: the call that it waits in; True if it has returned; None
        self.waits: Sequence[Call | bool | None] = ()
        self.since = self.next_report = 0.0

    def due(self, now: float, graph: WaitForGraph) -> float:
        """Return when to read the stacks of all ranks; infinity while no rank waits."""
        waits = [status.returned or status.blocked for status in graph.ranks]
        if waits != self.waits:
            self.waits, self.since = waits, now
            self.pause, self.next_report = self.after, now + self.after
        return self.next_report if any(waits) and not all(w is True for w in waits) else math.inf

    def stuck(self, now: float, quiet: Mapping[int, float]) -> bool:
        """Return whether to report now. If not, `due` is later.

        Args:
            quiet: by rank, the seconds in which it has called nothing; a rank that did not answer
                is left out.
        """
        running = [
            quiet[rank] for rank, wait in enumerate(self.waits) if not wait and rank in quiet
        ]
        if (least := min(running, default=math.inf)) < self.after:
            self.next_report = now + max(self.after - least, SHORTEST_PAUSE)
            return False
        self.pause *= 2
        self.next_report = now + self.pause
        return True


class RunWatcher:
    """Keeps the reports of all ranks of a run, and judges them.

    Args:
        size: ranks.
        stuck_after: seconds without progress until the first report; infinity: none.
        ask_stacks: returns the stacks of the ranks that answer in time.
        write: writes a report for the user.
        folder: where reports are also written to, in reports.txt; or None.

    Attributes:
        graph: set `graph.ranks[r]` to the newest status of rank r.
        calls: compares the calls of a checked run.
        report_wanted: set it when a user asks, by SIGUSR1, what the ranks do.
    """

    def __init__(
        self,
        size: int,
        stuck_after: float,
        ask_stacks: Callable[[], dict[int, RankStack]],
        write: Callable[[str], None],
        folder: Path | None = None,
    ):
        self.graph, self.calls = WaitForGraph(size), CallChecker()
        self.stuck = StuckDetector(stuck_after)
        self.ask_stacks, self.write, self.folder = ask_stacks, write, folder
        self.misuse_due = math.inf  # when calls that differ are an error
        self.report_wanted = False
        self.stopped: set[int] = set()  # ranks whose process was stopped at the last look
        self.reported_stopped: set[int] = set()
        self.next_look_at_processes = 0.0

    def check(self, call: Call) -> None:
        """Compare a rank's call with those of the other ranks."""
        now = time.monotonic()
        if self.calls.check(call):
            self.misuse_due = now + WAIT_FOR_CALLS
        if self.calls.all_called:
            self.misuse_due = min(self.misuse_due, now + WAIT_FOR_CAUSE)

    def look(self, now: float, pids: Mapping[int, int]) -> MisuseError | DeadlockError | None:
        """Return the error that ends the run, if there is one, and write the reports that are due.

        Ranks that wait for each other until a time limit of their own are reported, and ranks that
        a signal such as SIGSTOP has stopped. `pids`: by rank, the processes of this host.
        """
        if now >= self.misuse_due:
            return self.calls.error()
        if (deadlock := self.graph.confirmed_deadlock(now)) is not None:
            return self.calls.error() or deadlock
        if (report := self.graph.report_of_limits(now)) is not None:
            self.say(f"parallel101: {report}")
        if self.report_wanted:
            self.report_wanted = False
            self.report("parallel101: what the ranks do now (SIGUSR1)")
        if now >= self.stuck.due(now, self.graph):
            stacks = self.ask_stacks()
            quiet = {rank: stack.quiet for rank, stack in stacks.items() if stack.quiet is not None}
            if self.stuck.stuck(now := time.monotonic(), quiet):
                self.say(stuck_text(self._lines(stacks), now - self.stuck.since, self.stuck.pause))
        if now >= self.next_look_at_processes:
            self.next_look_at_processes = now + LOOK_AT_PROCESSES_EVERY
            self._report_stopped(pids)
        return None

    def next_look(self, now: float) -> float:
        """Return when to call `look`, if nothing changes before."""
        return min(self.misuse_due, self.graph.next_look, self.stuck.due(now, self.graph))

    def _report_stopped(self, pids: Mapping[int, int]) -> None:
        before, self.stopped = self.stopped, {r for r, pid in pids.items() if is_stopped(pid)}
        self.reported_stopped &= self.stopped
        new = sorted(self.stopped & before - self.reported_stopped)
        if new and any(status.blocked for status in self.graph.ranks):
            self.reported_stopped.update(new)
            command = f"kill -CONT {' '.join(str(pids[rank]) for rank in new)}"
            head = f"parallel101: a signal has stopped {ranks_text(new)}. To continue: {command}"
            self.say("\n  ".join([head, *rank_lines(self.graph, {})]))

    def report(self, head: str) -> None:
        """Report what each rank waits for, or where it is, with its stack."""
        self.say("\n  ".join([head, *self._lines(self.ask_stacks())]))

    def _lines(self, stacks: dict[int, RankStack]) -> list[str]:
        return rank_lines(self.graph, stacks, SILENT, details=True)

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
