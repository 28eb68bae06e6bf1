"""Computes bubbles and activations of a pipeline, from a schedule's times or from a run's record.

    rank 0   F0 F1 ////// B0 F2 B1 ...
    rank 1      F0 B0 F1  B1 ...

    actions: forward (F), and backward (B) or its two parts: the gradients of the input (I) and of
             the weights (W)
    bubbles: the time in which a rank waits, between its first start and its last end

    bubble rate = 1 − (mean work of the ranks) / cost
    cost: the most, over ranks, of (last end − the rank's own first start)
    activations held: (stage, microbatch) pairs from the start of F to the end of B or W

Definitions: Qi et al. (arXiv 2401.10241), section 4. `laboratory.viz.pipeline_timeline` draws it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from operator import attrgetter
from typing import Any, NamedTuple

from parallel101.laboratory.analysis.overlap import (
    Interval,
    intersection,
    seconds,
    time_windows,
    union,
)
from parallel101.laboratory.record.events import Event
from parallel101.laboratory.record.trace import Trace

# a span's name → the kind of its slot
KINDS = {"forward": "F", "backward": "B", "input gradient": "I", "weight gradient": "W"}
in_order = attrgetter("rank", "start", "end")  # of a TimedAction
Planned = Any  # the result of `schedule(…).time(…)`, whose module imports the picture


class TimedAction(NamedTuple):
    """One action in time."""

    rank: int
    stage: int
    kind: str  # "F", "B", "I" or "W"
    microbatch: int
    start: float
    end: float
    part: int = 0  # of an overlap: which of the actions that are computed together
    parts: int = 1


class PipelineTimes(NamedTuple):
    """The actions that each rank computed, with their times. Time 0 is the first start."""

    slots: list[TimedAction]  # by rank and time
    # by rank: when it waits inside a slot, as for a tensor-parallel all-reduce
    waits: dict[int, list[Interval]]
    # (source, destination, start, end), between stages
    messages: list[tuple[int, int, float, float]]
    recorded: bool  # in a run; its times are seconds

    @property
    def ranks(self) -> list[int]:
        return sorted({slot.rank for slot in self.slots})

    @property
    def makespan(self) -> float:
        """Return the time from the first start to the last end."""
        return max((slot.end for slot in self.slots), default=0.0)

    @property
    def microbatches(self) -> int:
        return len({slot.microbatch for slot in self.slots})

    @property
    def bubble_rate(self) -> float:
        """Return the bubble rate defined above; 0.0 if nothing was computed."""
        extents = [self.extent(rank) for rank in self.ranks]
        cost = max((end - start for start, end in extents), default=0.0)
        work = math.fsum(map(self.work, self.ranks))
        return 1 - work / len(self.ranks) / cost if cost else 0.0

    def of(self, rank: int) -> list[TimedAction]:
        return [slot for slot in self.slots if slot.rank == rank]

    def stages(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return sorted({slot.stage for slot in self.of(rank)})

    def extent(self, rank: int) -> Interval:
        """Return the rank's first start and last end."""
        return min(slot.start for slot in self.of(rank)), max(slot.end for slot in self.of(rank))

    def busy(self, rank: int) -> list[Interval]:
        """Return the intervals in which the rank is in a slot."""
        return union((slot.start, slot.end) for slot in self.of(rank))

    def bubbles(self, rank: int) -> list[Interval]:
        """Return the intervals in which the rank waits between its first start and its last end."""
        busy = self.busy(rank)
        between = [(before[1], after[0]) for before, after in zip(busy, busy[1:])]
        return sorted([*between, *intersection(self.waits.get(rank, []), busy)])

    def work(self, rank: int) -> float:
        start, end = self.extent(rank)
        return end - start - seconds(self.bubbles(rank))

    def held(self, rank: int) -> list[tuple[float, int]]:
        """Return (time, activations held from then on) of each change."""
        changes = []
        for order, slot in enumerate(self.of(rank)):
            if slot.kind == "F":
                changes.append((slot.start, 2 * order, 1))
            elif slot.kind in "BW":
                changes.append((slot.end, 2 * order + 1, -1))
        count, steps = 0, []
        for time, _, change in sorted(changes):
            count += change
            steps.append((time, count))
        return steps

    def peak(self, rank: int) -> int:
        """Return the most activations that the rank held at once."""
        return max((count for _, count in self.held(rank)), default=0)


def planned_times(time: Planned) -> PipelineTimes:
    """Return the times of a schedule."""
    begin = min((slot.start for slot in time.slots), default=0.0)
    slots = []
    for slot in time.slots:
        parts = slot.action.parts or (slot.action,)
        for i, action in enumerate(parts):
            what = slot.rank, action.stage, action.kind, action.microbatch
            times = slot.start - begin, slot.end - begin
            slots.append(TimedAction(*what, *times, i, len(parts)))
    return PipelineTimes(sorted(slots, key=in_order), {}, [], recorded=False)


def recorded_times(trace: Trace, within: str | None = None) -> PipelineTimes:
    """Return the times of a recorded step.

    Args:
        trace: of a run with spans called "forward", "backward", "input gradient" and "weight
            gradient". Their labels are `microbatch` and `stage`; without `stage`, each rank is the
            stage of its number.
        within: the last span of this name on each rank. None: the whole record.

    Of several steps, the last one with a backward is taken, so that an evaluation after it does not
    count.

    Raises:
        ValueError: there are no such spans, or no span of that name.
    """
    (window,) = time_windows(trace, [within] if within else [])
    steps: dict[int, list[dict[tuple, Event]]] = defaultdict(lambda: [{}])
    for event in window.events:
        if event.kind == "span" and event.name in KINDS and "microbatch" in (event.args or {}):
            assert event.args is not None
            key = KINDS[event.name], event.args.get("stage", event.rank), event.args["microbatch"]
            if key in steps[event.rank][-1]:
                steps[event.rank].append({})  # the next step begins
            steps[event.rank][-1][key] = event
    last = {
        rank: next(
            (step for step in reversed(of) if any(kind != "F" for kind, _, _ in step)), of[-1]
        )
        for rank, of in steps.items()
    }
    events = [event for step in last.values() for event in step.values()]
    if not events:
        names = ", ".join(sorted({e.name or "" for e in trace.spans()})) or "none"
        raise ValueError(
            f"the record has no pipeline: expected spans named {', '.join(KINDS)}, with a label "
            f"microbatch=…; its spans are: {names}. Launch with trace=True and train with a "
            "pipeline, or use run.timeline()"
        )
    begin, end = min(e.start for e in events), max(e.end for e in events)
    slots = [
        TimedAction(rank, key[1], key[0], key[2], e.start - begin, e.end - begin)
        for rank, step in last.items()
        for key, e in step.items()
    ]
    waits: dict[int, list[Interval]] = defaultdict(list)
    for e in window.events:
        if e.waiting and e.end > begin and e.start < end:
            waits[e.rank].append((max(e.start, begin) - begin, min(e.end, end) - begin))
    merged = {rank: union(of) for rank, of in waits.items()}
    times = PipelineTimes(sorted(slots, key=in_order), merged, [], recorded=True)
    stages = {rank: times.stages(rank) for rank in times.ranks}
    last_end = {rank: times.extent(rank)[1] for rank in times.ranks}
    for m in trace.messages():
        if not {m.src, m.dst} <= stages.keys() or m.send.group.axis not in (None, "pp"):
            continue
        start, end = m.start - begin, m.end - begin
        inside = 0 <= start <= last_end[m.src] and end <= last_end[m.dst]
        if inside and stages[m.src] != stages[m.dst]:
            times.messages.append((m.src, m.dst, start, end))
    return times
