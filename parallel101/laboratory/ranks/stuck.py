"""Reports ranks that keep the others waiting where no deadlock can be proven, and what they do.

    rank 0  ── all_reduce ── waits ────────────────────▶  after `stuck_after` seconds: a report with
    rank 1  ── q.get() ── never comes, or computes long    the stack of rank 1. The run goes on.

A rank may be in an endless loop, or blocked by a lock, a queue whose worker died or a full disk. It
may also compute for long. Nobody can know whether it will come, so a report never ends a run.

    rank_stack.py    in each rank: what its program does, and for how long it has called nothing
    StuckDetector    where the status of all ranks is known: when to report, and about whom
    report_lines     the report: who waits for whom, and the stacks of the others
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from parallel101.laboratory.ranks.rank_stack import RankStack
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.record.wait_for import WaitForGraph

SHORTEST_PAUSE = 0.5  # seconds between two looks at ranks that still make progress
REPORTS = "reports.txt"
IDLE_SHARE = 0.1  # of one core: a rank that uses less is blocked


class StuckDetector:
    """Says when ranks have waited for so long that there should be a report.

    A rank that has returned waits for all that have not. Reports about the same waits come after
    `after` seconds, then after twice that time, and so on.

    Args:
        after: seconds; infinity: no report.
    """

    def __init__(self, after: float):
        self.after = self.pause = after
        # by rank: in what (True: it has returned), and since when
        self.waits: dict[int, tuple[Call | bool, float]] = {}
        self.told: dict[int, Call | bool] = {}  # the waits of the last report
        self.not_before = 0.0

    def due(self, now: float, graph: WaitForGraph) -> float:
        """Return when to read the stacks of all ranks; infinity while no rank waits."""
        for rank, status in enumerate(graph.ranks):
            if not (wait := status.blocked or status.returned):
                self.waits.pop(rank, None)
            elif rank not in self.waits or self.waits[rank][0] != wait:
                self.waits[rank] = wait, now
        same = (rank in self.waits and self.waits[rank][0] == w for rank, w in self.told.items())
        if self.told and not any(same):
            self.told, self.pause, self.not_before = {}, self.after, 0.0
        if not self.waits or all(status.returned for status in graph.ranks):
            return math.inf
        return max(min(since for _, since in self.waits.values()) + self.after, self.not_before)

    def stuck(self, now: float, graph: WaitForGraph, quiet: Mapping[int, float]) -> set[int]:
        """Return the ranks that have waited for too long, and those that keep them waiting.

        Empty if all of them wait for ranks that still make progress. Then `due` is later.

        Args:
            quiet: by rank, the seconds in which it has called nothing; a rank that did not answer
                is left out.
        """
        self.due(now, graph)
        stuck: set[int] = set()
        retry = math.inf
        for rank, (_, since) in self.waits.items():
            if now - since < self.after:
                continue
            chain = self._chain(rank, graph)
            still = {r: now - self.waits[r][1] if r in self.waits else quiet.get(r) for r in chain}
            moving = [t for t in still.values() if t is not None and t < self.after]
            if moving:
                retry = min(retry, self.after - min(moving))
            else:
                stuck |= chain
        stuck |= {rank for rank in self.waits if stuck & self._chain(rank, graph)}
        if stuck:
            self.told = {rank: self.waits[rank][0] for rank in stuck if rank in self.waits}
            self.pause *= 2
            self.not_before = now + self.pause
        elif retry < math.inf:
            self.not_before = now + max(retry, SHORTEST_PAUSE)
        return stuck

    def waited(self, now: float) -> float:
        """Return the seconds for which the first rank has waited."""
        return now - min((since for _, since in self.waits.values()), default=now)

    def _chain(self, rank: int, graph: WaitForGraph) -> set[int]:
        """Return a waiting rank, the ranks it waits for, the ranks these wait for, and so on."""
        chain: set[int] = set()
        todo = [rank]
        while todo:
            if (rank := todo.pop()) in chain:
                continue
            chain.add(rank)
            wait, _ = self.waits.get(rank, (None, 0.0))
            peers = range(len(graph.ranks)) if wait is True else graph.missing(wait) if wait else ()
            todo += [peer for peer in peers if not graph.ranks[peer].returned]
        return chain


def append_report(folder: Path, text: str) -> None:
    """Append a report to reports.txt in the folder of a record."""
    # the disk may be what is full
    with contextlib.suppress(OSError), (folder / REPORTS).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n\n")


def report_lines(
    graph: WaitForGraph, stacks: Mapping[int, RankStack], ranks: Collection[int] | None = None
) -> list[str]:
    """Return a line for each rank that waits or has returned; for the others, also their stack.

    Args:
        stacks: of the ranks that have answered. On sim, a stack also says what its rank waits for.
        ranks: which ones; None: all.
    """
    lines = []
    for rank in sorted({*range(len(graph.ranks)), *stacks} if ranks is None else ranks):
        # on sim the graph has one rank, the process
        status = graph.ranks[rank] if rank < len(graph.ranks) else None
        stack = stacks.get(rank)
        if status is not None and status.blocked is not None:
            missing = graph.missing(status.blocked)
            whom = f"for {ranks_text(missing)}" if missing else "though all its peers have called"
            call = status.blocked
            lines.append(f"rank {rank} waits in {call.kind} {whom}, at {shown(call.where)}")
        elif status is not None and status.returned:
            lines.append(f"rank {rank} has returned")
        elif stack is None:
            lines.append(
                f"rank {rank} does not answer: its process is stopped, or C code in it holds "
                "Python's lock"
            )
        elif stack.waits:
            lines.append(f"rank {rank} waits {stack.waits}, at {shown(stack.place)}")
        else:
            lines += [f"rank {rank} is at {shown(stack.place)}", *_details(stack)]
    return lines


def _details(stack: RankStack) -> list[str]:
    lines = []
    if stack.quiet is not None and stack.lately is not None and stack.cpu is not None:
        idle = stack.cpu < IDLE_SHARE * stack.lately and (stack.native or sys.platform != "linux")
        does = "it is blocked" if idle else "it computes or loops"
        lines.append(
            f"  In {stack.quiet:.0f} s it has called nothing of torch.distributed. In the last "
            f"{stack.lately:.1f} s it has used {stack.cpu:.1f} s of CPU time: {does}."
        )
    if stack.native:
        lines.append(f"  In C: {stack.native}")
    if stack.lines:
        lines += ["  Its Python stack, the innermost call last:", *(f"  {x}" for x in stack.lines)]
    return lines


def stuck_text(lines: list[str], seconds: float, pause: float) -> str:
    """Return the whole report.

    Args:
        lines: what `report_lines` returns.
        seconds: without progress.
        pause: seconds until the next report.
    """
    head = f"parallel101: no progress for {int(seconds)} s, and no deadlock that can be proven."
    end = f"The run goes on. If nothing changes, the next report comes in {pause:.0f} s."
    return "\n  ".join([head, *lines, end])
