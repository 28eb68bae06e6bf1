"""Measures how much of each rank's communication overlaps with compute.

    compute        ▇▇▇▇▇▇▇▇▇▇        ▇▇▇▇▇    spans in which the rank doesn't wait (wait_span)
    communication        ▬▬▬▬▬▬▬▬▬▬▬▬         messages and collectives in flight
    overlap              ====                 both at once: this communication costs no time

These are unions and intersections of intervals in the record. `laboratory.viz.timeline` draws them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from parallel101.laboratory.record.events import P2P, Event
from parallel101.laboratory.record.trace import Trace

Interval = tuple[float, float]
# waits in which ranks tell each other numbers of samples or lengths, a few bytes each
BOOKKEEPING = ("agree", "lengths")


class TimeWindow(NamedTuple):
    """A part of the record, from `begin` to `end`."""

    name: str
    begin: float
    end: float
    events: list[Event]  # the spans, messages and collectives inside it, clipped to it
    spans: Mapping[int, Event] | None = None  # by rank, if the window is that of a span

    def has_post(self, event: Event) -> bool:
        """Return whether a rank posts an event in its span of the window.

        What it posts at the span's end isn't in it: on the virtual clock, the next call is posted
        at that time.
        """
        if self.spans is None or (span := self.spans.get(event.rank)) is None:
            return self.spans is None
        return span.start == event.posted <= span.end or span.start < event.posted < span.end


class TimeBreakdown(NamedTuple):
    """One rank's use of a window, in seconds."""

    compute: float
    communication: float  # something was in flight, bookkeeping aside
    overlap: float  # both at once
    idle: float  # no compute


def time_windows(trace: Trace, names: Sequence[str] = ()) -> list[TimeWindow]:
    """Return, for each name, the window of the last span of that name on each rank.

    Without names, there is one window of the whole record.

    Raises ValueError for a name that no span has.
    """
    if not names:
        moments = [t for e in trace.events for t in (e.start, e.end)] or [0.0]
        return [TimeWindow("", min(moments), max(moments), trace.events)]
    windows = []
    for name in names:
        last = {e.rank: e for e in trace.spans(name)}
        if not last:
            known = ", ".join(sorted({e.name or "" for e in trace.spans()})) or "no spans"
            raise ValueError(f"no span is called {name!r}: the record has {known}")
        begin, end = min(e.start for e in last.values()), max(e.end for e in last.values())
        inside = [
            e._replace(start=max(e.start, last[e.rank].start), end=min(e.end, last[e.rank].end))
            for e in trace.events
            if e.name not in names
            and e.rank in last
            and e.end > last[e.rank].start
            and e.start < last[e.rank].end
        ]
        windows.append(TimeWindow(name, begin, end, inside, last))
    return windows


def time_breakdown(window: TimeWindow, rank: int) -> TimeBreakdown:
    """Measure how a rank spent a window.

    Each moment counts once, however many spans or messages cover it. Bookkeeping isn't counted as
    communication: its few bytes take as long as their latency, which says nothing of the data.
    """
    events = [e for e in window.events if e.rank == rank]
    computing = union((e.start, e.end) for e in events if e.kind == "span" and not e.waiting)
    waiting = union((e.start, e.end) for e in events if e.waiting)
    few_bytes = {id(e) for e in bookkeeping(events)}
    sent = (e for e in events if e.kind != "span" and id(e) not in few_bytes)
    in_flight = union((e.start, e.end) for e in sent)
    compute = seconds(computing) - seconds(intersection(computing, waiting))
    overlap = intersection(in_flight, computing)
    return TimeBreakdown(
        compute,
        seconds(in_flight),
        seconds(overlap) - seconds(intersection(overlap, waiting)),
        window.end - window.begin - compute,
    )


def bookkeeping(events: Sequence[Event]) -> list[Event]:
    """Return the messages of a rank while it waits to agree with others on numbers or lengths."""
    during: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.waiting and event.name in BOOKKEEPING:
            during[event.rank].append(event)
    return [
        e
        for e in events
        if e.kind in P2P and any(of.start <= e.start < of.end for of in during[e.rank])
    ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones with the same moments, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the moments that are in an interval of each."""
    b = list(b)
    return union((max(s, t), min(e, f)) for s, e in a for t, f in b if max(s, t) < min(e, f))


def seconds(intervals: Iterable[Interval]) -> float:
    return math.fsum(end - start for start, end in intervals)
