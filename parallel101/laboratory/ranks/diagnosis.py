"""Says what the ranks of a run do, and makes the errors for ranks that raised, died or took long.

    waits, stacks ────────▶ StuckDetector   whether a run makes no progress
    statuses, stacks ─────▶ rank_lines      who waits for whom, and where the others are
    exception ────────────▶ rank_raised     "rank 2 raised ValueError: …", with the traceback
    exit code, stderr ────▶ rank_died       "rank 1 was killed by SIGABRT (exit code -6)", and where
    time limit ───────────▶ timed_out       where each rank was

Deadlocks and misuse are found elsewhere: see record/wait_for.py and record/calls.py.

    rank 0  ── all_reduce ── waits ────────────────────▶  after `stuck_after` seconds: a report with
    rank 1  ── q.get() ── never comes, or computes long    the stack of rank 1. The run goes on.

A rank may be in an endless loop, or blocked by a lock, a queue whose worker died or a full disk. It
may also compute for long. Nobody can know whether it will come, so a report never ends a run.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence

from parallel101.laboratory.ranks.output import GLOO_ABORT
from parallel101.laboratory.ranks.wire import Failure, RankStack
from parallel101.laboratory.record.calls import Call, places_of
from parallel101.laboratory.record.errors import LaunchTimeout, RankFailed, dropped_lines
from parallel101.laboratory.record.program_lines import is_inside, is_library, shown
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.record.wait_for import RankStatus, WaitForGraph

# gloo's words: bytes that arrived, bytes expected
TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
RUN_CHECKED = "Run it again with trace=True: a checked run names the two calls that disagree."
IDLE_SHARE = 0.1  # of one core: a rank that uses less is blocked
SILENT = (
    "does not answer: its process is stopped, C code in it holds Python's lock, or its host can't "
    "be reached"
)
ABSENT = "had not reached this launch: every process of the job must make the same launches"
SHORTEST_PAUSE = 0.5  # seconds between two looks at ranks that still make progress
PLURAL = {"waits": "wait", "has": "have", "is": "are", "does": "do", "had": "had"}


# ---- what the ranks do ----


def rank_lines(
    graph: WaitForGraph,
    stacks: Mapping[int, RankStack],
    unknown: str = "",
    details: bool = False,
    absent: Sequence[int] = (),
) -> list[str]:
    """Return lines that say what each rank waits for, or where it is.

    Ranks of which the same is true share a line.

    Args:
        graph: with the status of the ranks; on sim, that of its one process.
        stacks: of the ranks that have answered. On sim, a stack also says what its rank waits for.
        unknown: what to say about the others. "": nothing.
        details: also what each of the ranks does that don't wait, and its Python stack.
        absent: ranks of a job that have not come.
    """
    ranks_with: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted({*range(len(graph.ranks)), *stacks}):
        status = graph.ranks[rank] if rank < len(graph.ranks) else RankStatus()
        stack = stacks.get(rank)
        lines = [ABSENT if rank in absent else unknown]
        if (call := status.blocked) is not None:
            missing = graph.missing(call)
            whom = f"for {ranks_text(missing)}" if missing else "though all its peers have called"
            silent = " (it does not answer now)" if unknown and stack is None else ""
            lines = [f"waits in {call.kind} {whom}, at {shown(call.where)}{silent}"]
        elif status.returned:
            lines = ["has returned"]
        elif stack is not None and stack.waits:
            lines = [f"waits {stack.waits}, at {shown(stack.place)}"]
        elif stack is not None and stack.place:
            lines = [f"is at {shown(stack.place)}", *(_details(stack) if details else [])]
        if lines != [""]:
            ranks_with.setdefault(tuple(lines), []).append(rank)
    said = []
    for (first, *more), ranks in ranks_with.items():
        verb, _, rest = first.partition(" ")
        said += [f"{ranks_text(ranks)} {verb if len(ranks) == 1 else PLURAL[verb]} {rest}", *more]
    return said


def _details(stack: RankStack) -> list[str]:
    lines = []
    if stack.quiet is not None:
        does = "is blocked" if stack.busy < IDLE_SHARE else "computes or loops"
        lines.append(
            f"  In {stack.quiet:.0f} s it has called nothing of torch.distributed. Now it uses "
            f"{stack.busy:.0%} of a core: it {does}."
        )
    if stack.lines:
        lines += ["  Its Python stack, the innermost call last:", *(f"  {x}" for x in stack.lines)]
    return lines


def stuck_text(lines: list[str], seconds: float, pause: float) -> str:
    """Return the whole report of a run that makes no progress.

    Args:
        lines: what `rank_lines` returns.
        seconds: without progress.
        pause: seconds until the next report.
    """
    head = f"parallel101: no progress for {int(seconds)} s, and no deadlock that can be proven."
    end = f"The run goes on. If nothing changes, the next report comes in {pause:.0f} s."
    return "\n  ".join([head, *lines, end])


# ---- when ----


class StuckDetector:
    """Says when a run has made no progress for so long that there should be a report.

    At least one rank waits then, and the others have called nothing. A rank that has returned
    waits for all that have not. Reports about the same waits come after `after` seconds, then after
    twice that time, and so on.

    Args:
        after: seconds; infinity: no report.
        virtual: the ranks are those of one process on sim. All but one wait for their turn.
    """

    def __init__(self, after: float, virtual: bool = False):
        self.after, self.pause, self.virtual = after, after, virtual
        # by rank: the call that it waits in; True if it has returned; None
        self.waits: Sequence[Call | bool | None] = ()
        self.since = self.next_report = 0.0

    def due(self, now: float, graph: WaitForGraph) -> float:
        """Return when to read the stacks of all ranks; infinity while no rank waits."""
        waits = [status.returned or status.blocked for status in graph.ranks]
        if waits != self.waits:
            self.waits, self.since = waits, now
            self.pause, self.next_report = self.after, now + self.after
        some_wait = any(waits) and not all(wait is True for wait in waits)
        return self.next_report if some_wait or self.virtual else math.inf

    def stuck(self, now: float, quiet: Mapping[int, float]) -> bool:
        """Return whether to report now. If not, `due` is later.

        Args:
            quiet: by rank, the seconds in which it has called nothing; a rank that did not answer
                is left out, and on sim one that waits.
        """
        waits = set() if self.virtual else {r for r, wait in enumerate(self.waits) if wait}
        least = min((quiet[rank] for rank in quiet.keys() - waits), default=math.inf)
        if least < self.after:
            self.pause, self.since = self.after, max(self.since, now - least)
            self.next_report = now + max(self.after - least, SHORTEST_PAUSE)
            return False
        self.pause *= 2
        self.next_report = now + self.pause
        return True


# ---- errors ----


def rank_raised(failure: Failure, unwaited: Sequence[Call] = ()) -> RankFailed:
    """Return the error for a rank whose program raised.

    The exception is its cause. `unwaited`: messages that it posted and did not wait for.
    """
    message = f"rank {failure.rank} raised {failure.headline}\n\n{failure.traceback}".rstrip()
    if receives := [call for call in unwaited if call.kind == "recv" and call.rank == failure.rank]:
        before = "Before that, it received without a wait(), so the data may not have arrived:"
        message = "\n  ".join([f"{message}\n\n{before}", *places_of(receives)])
    error = RankFailed(message, failure.rank)
    error.__cause__ = failure.error
    return error


def rank_died(
    rank: int,
    how: str,
    code: int | None = None,
    *,
    place: str = "",
    stderr: str = "",
    checked: bool = False,
    others: Sequence[str] = (),
) -> RankFailed:
    """Return the error for a rank that ended before its function returned.

    Args:
        how: it ended.
        place: the "file:line" at which its program was last, as far as known.
        stderr: the end of what the rank wrote there.
        checked: whether its calls were compared with those of other ranks.
        others: what the other ranks did.
    """
    message = [f"rank {rank} {how}"]
    if place:
        message.append(f"It was last seen at {shown(place)}")
    last_lines = [line for line in stderr.splitlines() if line.strip()]
    if sizes := TOO_LONG.search(stderr):
        message += [
            f"gloo aborts a rank that receives more than it expects: {sizes[1]} bytes arrived, and "
            f"{sizes[2]} were expected.",
            "Either the receive is smaller than the message sent to it, or the ranks of a "
            "collective disagree on its size.",
            *others,
        ]
        others = () if checked else [RUN_CHECKED]
        last_lines = [line for line in last_lines if not GLOO_ABORT.match(line)]
    return RankFailed("\n  ".join([*message, *others, *last_lines[-3:]]), rank, code)


def how_it_ended(code: int | None) -> str:
    """Describe the early end of a local rank by its exit code, for an error."""
    if code is None:
        return "was lost: its fork server ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    return f"exited with code {code} before its function returned"


def how_it_was_lost(host: str, aborts: bool = False) -> str:
    """Describe the early end of a rank of a job. `aborts`: whether C++ has aborted it."""
    if aborts:
        return (
            f"(on {host}) is aborted by C++: one of its threads has thrown an exception that "
            "nothing catches. Its text is in the rank's output.\n"
            "  gloo does so if more bytes arrive than a rank expects."
        )
    return (
        f"(on {host}) has ended before its program: its process was killed by a signal (perhaps "
        "out of memory), or has called os._exit, or its machine has stopped or lost its network. "
        "The report of its launcher (torchrun, srun, mpirun) has the exit code"
    )


def crash_place(dump: str) -> str:
    """Return the caller's "file:line" in a dump of faulthandler's, or "".

    It prefers the program's own files to a library's.
    """
    frames = re.findall(r'^  File "([^"]+)", line (\d+) in ', dump, re.MULTILINE)
    outside = [(name, line) for name, line in frames if not is_inside(name)]
    own = [(name, line) for name, line in outside if not is_library(name)]
    return ":".join((own or outside)[0]) if outside else ""


def timed_out(seconds: float, ranks: Sequence[str], dropped: Sequence[str] = ()) -> LaunchTimeout:
    """Return the error for a run that took too long.

    `ranks` says where each one was, `dropped` which messages nobody waited for.
    """
    how = "launch(..., timeout=seconds), or parallel101 run --timeout seconds"
    summary = (
        f"the ranks were still running after {seconds:g} s. If they need longer, raise the limit: "
        f"{how}."
    )
    return LaunchTimeout("\n  ".join([summary, *ranks, *dropped_lines(dropped)]))
