"""Reports ranks that keep the others waiting where no deadlock can be proven, and what they do.

    rank 0  ── all_reduce ── waits ────────────────────▶  after `stuck_after` seconds: a report with
    rank 1  ── q.get() ── never comes, or computes long    the stack of rank 1. The run goes on.

A rank may be in an endless loop, or blocked by a lock, a queue whose worker died or a full disk. It
may also compute for long. Nobody can know whether it will come, so a report never ends a run.

    watcher.py       in each rank: what its program does, and for how long it has called nothing
    StuckDetector    where the status of all ranks is known: when to report
    rank_lines       the report: who waits for whom, and the stacks of the others
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from parallel101.laboratory.ranks.wire import RankStack
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.record.wait_for import RankStatus, WaitForGraph

SHORTEST_PAUSE = 0.5  # seconds between two looks at ranks that still make progress
IDLE_SHARE = 0.1  # of one core: a rank that uses less is blocked


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


SILENT = "does not answer: its process is stopped, or C code in it holds Python's lock"
PLURAL = {"waits": "wait", "has": "have", "is": "are", "does": "do"}


def rank_lines(
    graph: WaitForGraph, stacks: Mapping[int, RankStack], unknown: str = "", details: bool = False
) -> list[str]:
    """Return lines that say what each rank waits for, or where it is.

    Ranks of which the same is true share a line.

    Args:
        graph: with the status of the ranks; on sim, that of its one process.
        stacks: of the ranks that have answered. On sim, a stack also says what its rank waits for.
        unknown: what to say about the others. "": nothing.
        details: also what each of the ranks does that don't wait, and its Python stack.
    """
    ranks_with: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted({*range(len(graph.ranks)), *stacks}):
        status = graph.ranks[rank] if rank < len(graph.ranks) else RankStatus()
        stack = stacks.get(rank)
        lines = [unknown]
        if (call := status.blocked) is not None:
            missing = graph.missing(call)
            whom = f"for {ranks_text(missing)}" if missing else "though all its peers have called"
            lines = [f"waits in {call.kind} {whom}, at {shown(call.where)}"]
        elif status.returned:
            lines = ["has returned"]
        elif stack is not None and stack.waits:
            lines = [f"waits {stack.waits}, at {shown(stack.place)}"]
        elif stack is not None and stack.place:
            lines = [f"is at {shown(stack.place)}", *(_details(stack) if details else [])]
        if lines != [""]:
            ranks_with.setdefault(tuple(lines), []).append(rank)
    return [line for lines, ranks in ranks_with.items() for line in _of_ranks(lines, ranks)]


def _of_ranks(lines: Sequence[str], ranks: Sequence[int]) -> list[str]:
    verb, _, rest = lines[0].partition(" ")
    if len(ranks) > 1:
        verb = PLURAL[verb]
    return [f"{ranks_text(ranks)} {verb} {rest}", *lines[1:]]


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
    """Return the whole report.

    Args:
        lines: what `rank_lines` returns.
        seconds: without progress.
        pause: seconds until the next report.
    """
    head = f"parallel101: no progress for {int(seconds)} s, and no deadlock that can be proven."
    end = f"The run goes on. If nothing changes, the next report comes in {pause:.0f} s."
    return "\n  ".join([head, *lines, end])
