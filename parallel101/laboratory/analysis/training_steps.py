"""Finds the steps of a training loop in a record, so that a picture can show some of them.

    step 1              step 2              step 3
    forward  backward ▪ forward  backward ▪ forward  backward ▪      ▪ the optimizer's step

The first of these that a record has is used:

    spans "step"        what the program itself calls a step
    spans "optimizer"   of parallel101's trainers: a step ends with it
    optimizer steps     `parallel101 run` marks those of torch's optimizers
    repeating calls     those that a loop without an optimizer makes in each round

Numbers count from 1. (steps.py is about the steps of a collective's algorithm.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.analysis.run_window import run_times
from parallel101.laboratory.record.events import Event
from parallel101.laboratory.record.program_lines import named
from parallel101.laboratory.record.trace import Trace
from parallel101.spans import OPTIMIZER_STEP

LEAST = 3  # rounds of a loop


class TrainingSteps(NamedTuple):
    """The steps of a run, or of its part that a record has."""

    what: str  # how they were found, for a reader
    first: int  # the number of the first one; 1 unless the record has the last events only
    # of each: when the first rank began it, and when the last rank ended it
    times: list[tuple[float, float]]


def training_steps(trace: Trace) -> TrainingSteps | None:
    """Return the steps of the training loop, or None if none are found."""
    for name, what in (("step", 'spans "step"'), ("optimizer", 'steps end with "optimizer"')):
        spans = [span for span in trace.spans(name) if not span.waiting]
        if len(spans) >= LEAST:
            return _numbered(trace, spans, what, whole=name == "step")
    marks = trace.spans(OPTIMIZER_STEP)
    if len(marks) >= LEAST:
        return _numbered(trace, marks, "each ends with the optimizer's step", whole=False)
    return _repeats(trace)


def _numbered(trace: Trace, spans: Sequence[Event], what: str, whole: bool) -> TrainingSteps | None:
    """Return the steps from the spans of each rank, in order.

    `whole`: a span is a step. Else it is the end of one, which began with the end of the last.
    """
    name = spans[0].name
    times: dict[int, list[tuple[float, float]]] = defaultdict(list)
    number: dict[int, int] = {}
    begin: dict[int, float] = {}
    recorded = {event.rank for event in trace.events}
    for rank in range(trace.world_size):
        number[rank] = 0
        if rank in trace.earlier:  # what it began before is not in the record
            sums = trace.earlier[rank].sums.items()
            number[rank] = sum(
                s.events for key, s in sums if (key.kind, key.name) == ("span", name)
            )
        elif rank in recorded:
            begin[rank] = run_times(trace, rank)[0]
    for span in sorted(spans, key=lambda span: span.end):
        rank = span.rank
        number[rank] += 1
        if whole:
            times[number[rank]].append((span.start, span.end))
        elif rank in begin:
            times[number[rank]].append((begin[rank], span.end))
        begin[rank] = span.end
    return _joined(times, what)


def _repeats(trace: Trace) -> TrainingSteps | None:
    """Return the rounds of a loop, from the calls that a rank repeats.

    Two calls count as the same if they have the same line, kind, peer and bytes. Numbers count from
    the first round that the record has.
    """
    calls: dict[int, dict[tuple, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for e in trace.events:
        if e.kind != "span":
            calls[e.rank][e.kind, e.where, e.peer, e.nbytes, e.group].append(e)
    if not calls:
        return None
    alike = max(calls.values(), key=lambda of: sum(map(len, of.values())))
    counts = [len(of) for of in alike.values()]
    # most calls are made once in a round, or several times: the loop has as many rounds as that
    fitting = [
        count
        for count in set(counts)
        if count >= LEAST and sum(c for c in counts if _multiple(c, count)) >= 0.9 * sum(counts)
    ]
    if not fitting:
        return None
    usual = max(fitting)
    first = min(
        (events for events in alike.values() if len(events) == usual),
        key=lambda events: events[0].start,
    )
    end = max(e.end for e in trace.events)
    starts = [e.posted for e in first] + [end]
    what = f"repeats of {first[0].kind} at {named(first[0].where)}"
    return TrainingSteps(what, 1, list(zip(starts, starts[1:])))


def _multiple(count: int, rounds: int) -> bool:
    """Return whether `count` is a multiple of `rounds`, except for a round that was cut off."""
    times = round(count / rounds)
    return times >= 1 and abs(count - times * rounds) <= times + 0.02 * count


def _joined(times: dict[int, list[tuple[float, float]]], what: str) -> TrainingSteps | None:
    """Return the steps one after the other, each over all ranks."""
    if not times:
        return None
    first, last = min(times), max(times)
    times_of_steps = [times[number] for number in range(first, last + 1) if number in times]
    spans = [(min(begin for begin, _ in at), max(end for _, end in at)) for at in times_of_steps]
    return TrainingSteps(what, first, spans)
