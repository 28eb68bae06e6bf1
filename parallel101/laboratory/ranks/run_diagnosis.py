"""Judges a run by what all its ranks report: misuse, deadlocks, ranks that keep others waiting.

    statuses and calls of all ranks ──▶ RunDiagnosis ──▶ the error that ends the run
                                                └──────▶ reports while it goes on

The launching process of local ranks gets them by pipes (monitor.py), rank 0 of a job by the job's
store (torchrun.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from parallel101.laboratory.ranks.rank_stack import RankStack
from parallel101.laboratory.ranks.stuck import (
    SILENT,
    StuckDetector,
    append_report,
    rank_lines,
    stuck_text,
)
from parallel101.laboratory.record.calls import Call, CallChecker
from parallel101.laboratory.record.errors import DeadlockError, MisuseError
from parallel101.laboratory.record.wait_for import WaitForGraph

# seconds after a failure in which another rank's failure may turn out to be its cause
WAIT_FOR_CAUSE = 0.05
# seconds for other ranks' calls of a collective in which two differ, to tell which is the odd one
WAIT_FOR_CALLS = 0.3


class RunDiagnosis:
    """Keeps the reports of all ranks of a run, and judges them.

    Args:
        size: ranks.
        stuck_after: seconds without progress until the first report; infinity: none.
        write: writes a report for the user.
        folder: where reports are also written to, in reports.txt; or None.

    Attributes:
        graph: set `graph.ranks[r]` to the newest status of rank r.
        calls: compares the calls of a checked run.
    """

    def __init__(
        self, size: int, stuck_after: float, write: Callable[[str], None], folder: Path | None
    ):
        self.graph, self.calls = WaitForGraph(size), CallChecker()
        self.stuck = StuckDetector(stuck_after)
        self.write, self.folder = write, folder
        self.misuse_due = math.inf  # when calls that differ are an error

    def check(self, call: Call) -> None:
        """Compare a rank's call with those of the other ranks."""
        now = time.monotonic()
        if self.calls.check(call):
            self.misuse_due = now + WAIT_FOR_CALLS
        if self.calls.all_called:
            self.misuse_due = min(self.misuse_due, now + WAIT_FOR_CAUSE)

    def fault(self, now: float) -> MisuseError | DeadlockError | None:
        """Return the error that ends the run, if there is one.

        Ranks that wait for each other until a time limit of their own are reported.
        """
        if now >= self.misuse_due:
            return self.calls.error()
        if (deadlock := self.graph.confirmed_deadlock(now)) is not None:
            return self.calls.error() or deadlock
        if (report := self.graph.report_of_limits(now)) is not None:
            self.say(f"parallel101: {report}")
        return None

    def next_look(self, now: float) -> float:
        """Return when to ask for `fault`, or for stacks to `report`, if nothing changes before."""
        return min(self.misuse_due, self.graph.next_look, self.stuck.due(now, self.graph))

    def report(self, stacks: Mapping[int, RankStack], head: str = "") -> None:
        """Report what each rank waits for, or where it is.

        Without a `head`, report only if the run has made no progress for long.
        """
        now, lines = time.monotonic(), rank_lines(self.graph, stacks, SILENT, details=True)
        quiet = {rank: stack.quiet for rank, stack in stacks.items() if stack.quiet is not None}
        if head:
            self.say("\n  ".join([head, *lines]))
        elif self.stuck.stuck(now, quiet):
            self.say(stuck_text(lines, now - self.stuck.since, self.stuck.pause))

    def say(self, text: str) -> None:
        self.write(text)
        if self.folder is not None:
            append_report(self.folder, text)
