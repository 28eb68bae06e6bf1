"""Finds when a run took place and its training steps, and cuts a record between two times.

    step 1              step 2              step 3
    forward  backward ▪ forward  backward ▪ forward  backward ▪      ▪ the optimizer's step

The first of these that a record has marks the steps:

    spans "step"        what the program itself calls a step
    spans "optimizer"   of parallel101's trainers: a step ends with it
    optimizer steps     `parallel101 run` marks those of torch's optimizers

A record without any of them has no steps. Numbers count from 1. (steps.py is about the steps of a
collective's algorithm.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.record.events import Event
from parallel101.laboratory.record.totals import is_call, sums_of
from parallel101.laboratory.record.trace import Trace
from parallel101.spans import OPTIMIZER_STEP

LEAST = 3  # steps of a loop
# the spans that mark steps, the best first, and what a reader is told about them
SPANS = {
    "step": 'spans "step"',
    "optimizer": 'steps end with "optimizer"',
    OPTIMIZER_STEP: "each ends with the optimizer's step",
}


def script_marks(trace: Trace) -> list[Event]:
    """Return the spans without length that mark the start and the end of the script on each rank.

    `parallel101 run` makes them.
    """
    return [e for e in [*trace.earlier, *trace.spans()] if "script" in (e.args or {})]


def run_times(trace: Trace, rank: int | None = None) -> tuple[float, float]:
    """Return the start and the end of a run, or of one rank's part of it.

    Calls that never ended count. A script on real ranks starts with the first call (see
    first_call). (0, 0) if nothing is recorded.
    """
    every = [*trace.events, *trace.unfinished, *trace.earlier]
    events = [event for event in every if rank in (None, event.rank)]
    start = min((event.start for event in events), default=0.0)
    end = max((event.end for event in events), default=0.0)
    return min(max(start, first_call(trace)), end), end


def first_call(trace: Trace) -> float:
    """Return the time of a real script's first send, receive or collective, in seconds.

    Before it, the ranks import torch and build their models, which isn't computing. 0 on the
    virtual clock, where imports take no time, and for a record that is not of a script.
    """
    if trace.backend == "sim" or not script_marks(trace):
        return 0.0
    events = [*trace.events, *trace.unfinished, *trace.earlier]
    return min((event.posted for event in events if is_call(event)), default=0.0)


def recorded_from(trace: Trace) -> float:
    """Return the time from which the record has all events: 0 unless it has only the last ones."""
    return max((event.end for event in trace.earlier), default=0.0)


def window(trace: Trace, begin: float, end: float) -> Trace:
    """Return the part of a record between two times, with events cut at its ends."""
    inside = [
        e._replace(start=max(e.start, begin), end=min(e.end, end))
        for e in trace.events
        if e.end > begin and e.start < end
    ]
    return Trace(inside, trace.world_size, trace.backend)


class TrainingSteps(NamedTuple):
    """The steps of a run, or of its part that a record has."""

    what: str  # how they were found, for a reader
    first: int  # the number of the first one; 1 unless the record has the last events only
    # of each: when the first rank began it, and when the last rank ended it
    times: list[tuple[float, float]]


def training_steps(trace: Trace) -> TrainingSteps | None:
    """Return the steps of the training loop, or None if none are found."""
    for name, what in SPANS.items():
        spans = [span for span in trace.spans(name) if not span.waiting]
        if len(spans) >= LEAST:
            return _numbered(trace, spans, what, whole=name == "step")
    return None


def _numbered(trace: Trace, spans: Sequence[Event], what: str, whole: bool) -> TrainingSteps | None:
    """Return the steps from the spans of each rank, in order.

    `whole`: a span is a step. Else it is the end of one, which began with the end of the last.
    """
    name = spans[0].name
    times: dict[int, list[tuple[float, float]]] = defaultdict(list)
    number: dict[int, int] = {}
    begin: dict[int, float] = {}
    recorded, partly = ({e.rank for e in events} for events in (trace.events, trace.earlier))
    for rank in range(trace.world_size):
        # what it began before is not in the record
        earlier = [e for e in trace.earlier if (e.rank, e.kind, e.name) == (rank, "span", name)]
        number[rank] = sum(sums_of(e).events for e in earlier)
        if rank in recorded - partly:
            begin[rank] = run_times(trace, rank)[0]
    for span in sorted(spans, key=lambda span: span.end):
        rank = span.rank
        number[rank] += 1
        if whole:
            times[number[rank]].append((span.start, span.end))
        elif rank in begin:
            times[number[rank]].append((begin[rank], span.end))
        begin[rank] = span.end
    if not times:
        return None
    over_ranks = [[*zip(*times[number])] for number in sorted(times)]
    return TrainingSteps(
        what, min(times), [(min(starts), max(ends)) for starts, ends in over_ranks]
    )
