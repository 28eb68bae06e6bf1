"""Measures how long each rank computed and waited, for which rank, and in which lines.

    rank 0  ▇▇▇▇▇░░░░░░░▇▇▇     waits in all_reduce ─┬─ for rank 1, until rank 1 calls it
    rank 1  ▇▇▇▇▇▇▇▇▇▇▇░▇▇▇     calls it last        └─ then for the data

It needs a record in which each wait is a span, as `parallel101 run` makes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.analysis.overlap import seconds, union
from parallel101.laboratory.analysis.run_window import first_call, run_times, script_marks
from parallel101.laboratory.analysis.traffic import counted_calls, is_collective, is_sent
from parallel101.laboratory.record.events import P2P, Event, span_event
from parallel101.laboratory.record.totals import NOTHING, WAIT, Sums, added, sums_of
from parallel101.laboratory.record.trace import Trace, call_key
from parallel101.spans import OPTIMIZER_STEP

FROM_ROOT = ("broadcast", "scatter")  # collectives in which a rank needs the root only


class Wait(NamedTuple):
    """A time in which a rank was blocked in a call."""

    rank: int
    kind: str  # "recv", "all_reduce", …
    where: str  # "file:line"
    start: float
    end: float
    nbytes: int
    last: int | None  # the last other rank that made its part of the call; None if it is not known
    late: float  # seconds until that rank made it; the rest of the time was spent on the data


class RankTimes(NamedTuple):
    """One rank's share of a run. Times are in seconds.

    If the record has only the last events of the run, `waited_for` counts only these.
    """

    rank: int
    recorded: bool  # False if the rank's record is lost, as of one that was killed
    messages: int  # sent
    nbytes: int
    collectives: int
    collective_bytes: int
    # all the time in which it was not blocked: computing, reading data, posting calls
    computing: float
    waiting: float
    # of the waiting: until the rank that came last made its part of the call
    waited_for: dict[int, float]


class CallTimes(NamedTuple):
    """All waits at one line, in calls of one kind."""

    where: str
    kind: str
    waits: int
    seconds: float  # summed over the ranks
    longest: float
    longest_on: int  # the rank of the longest wait
    last: dict[int, int]  # how often each rank was the last one, for which the others waited


def waits(trace: Trace) -> list[Wait]:
    """Return the waits of a run, in order of their start.

    The newest call of a rank that never ended counts as a wait until the end of the run.
    """
    ended, parts = _by_call(trace)
    rows = [
        _wait(span, span.name or "", _event_of(span, ended), parts, bool(trace.earlier))
        for span in _waits_in_calls(trace)
    ]
    rows += [_wait(event, event.kind, event, parts) for event in _never_ended(trace)]
    return sorted(rows, key=lambda wait: (wait.start, wait.rank))


def _waits_in_calls(trace: Trace) -> list[Event]:
    """Return the spans in which a rank was blocked in a call, as `parallel101 run` records them."""
    return [span for span in trace.spans() if span.waiting and "group" in (span.args or {})]


def _never_ended(trace: Trace) -> list[Event]:
    """Return the newest call that did not end, for each rank of a failed run.

    A call whose wait is recorded is left out: it ended with an error.
    """
    newest = {event.rank: event for event in trace.unfinished}  # they are in order of time
    for span in trace.spans():
        if span.waiting and span.rank in newest and span.end > newest[span.rank].start:
            del newest[span.rank]
    return list(newest.values())


def rank_times(trace: Trace, waited: Sequence[Wait]) -> list[RankTimes]:
    """Return how each rank spent the run, and what it sent."""
    recorded = {event.rank for event in [*trace.events, *trace.unfinished, *trace.earlier]}
    earlier = added((e.rank, sums_of(e)) for e in trace.earlier if e.kind == WAIT)
    sums = added(
        ((e.rank, is_collective(e)), sums_of(e))
        for e in counted_calls(trace, unfinished=True)
        if is_sent(e)
    )
    own_waits: dict[int, list[Wait]] = defaultdict(list)
    for wait in waited:
        own_waits[wait.rank].append(wait)
    rows = []
    for rank in range(trace.world_size):
        sends, collectives = (sums.get((rank, kind), NOTHING) for kind in (False, True))
        waiting = seconds(union((wait.start, wait.end) for wait in own_waits[rank]))
        waiting += earlier.get(rank, NOTHING).seconds
        waited_for: dict[int, float] = defaultdict(float)
        for wait in own_waits[rank]:
            if wait.last is not None and wait.late > 0:
                waited_for[wait.last] += wait.late
        begin, end = run_times(trace, rank)
        sent = sends.events, sends.nbytes, collectives.events, collectives.nbytes
        computing = end - begin - waiting
        known = rank in recorded
        rows.append(RankTimes(rank, known, *sent, computing, waiting, dict(waited_for)))
    return rows


def late_for(rows: Sequence[RankTimes]) -> list[list[float]]:
    """Return the seconds that each rank (a row) waited for each other one (a column) to call."""
    return [[row.waited_for.get(rank, 0.0) for rank in range(len(rows))] for row in rows]


def with_compute(trace: Trace) -> Trace:
    """Return the record for pictures, with a span "compute" where a rank was not blocked.

    These spans replace the script's two marks. A call that never ended becomes a wait. If the
    program has spans of its own, as parallel101's trainers have, they say more.
    """
    marks, blocked = script_marks(trace), _waits_in_calls(trace)
    left_out = {id(span) for span in [*marks, *trace.spans(OPTIMIZER_STEP)]}
    if sum(span.waiting for span in trace.spans()) > len(blocked):
        left_out |= {id(span) for span in blocked}
    events = [event for event in trace.events if id(event) not in left_out]
    for e in _never_ended(trace):
        name = f"{e.kind}, never ended"
        events.append(span_event(e.rank, name, e.start, e.end, where=e.where, waiting=True))
    if not any(event.kind == "span" and not event.waiting for event in events):
        of_rank: dict[int, list[Event]] = defaultdict(list)
        for event in [*events, *marks]:
            of_rank[event.rank].append(event)
        begin = first_call(trace)
        for own in of_rank.values():
            events += _compute_spans(own, begin)
    return Trace(events, trace.world_size, trace.backend, trace.unfinished, trace.earlier)


def _compute_spans(events: Sequence[Event], begin: float) -> list[Event]:
    """Return the times of one rank between its waits, from its first event after `begin` on.

    They end with its last event.
    """
    waits = union((event.start, event.end) for event in events if event.waiting)
    starts = [max(begin, min(event.start for event in events)), *(end for _, end in waits)]
    ends = [*(start for start, _ in waits), max(event.end for event in events)]
    return [
        span_event(events[0].rank, "compute", start, end)
        for start, end in zip(starts, ends)
        if end > start
    ]


def slowest_calls(waited: Sequence[Wait], earlier: Sequence[Event] = ()) -> list[CallTimes]:
    """Return the lines at which ranks waited, the one that took most time first.

    `earlier`: the trace's. Which rank called last is known only for the waits in `waited`.
    """
    entries = [((e.where, e.name or "?", e.rank), sums_of(e)) for e in earlier if e.kind == WAIT]
    last: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for wait in waited:
        took = wait.end - wait.start
        entries.append(((wait.where, wait.kind, wait.rank), Sums(1, 0, took, took)))
        if wait.last is not None and wait.late > 0:
            last[wait.where, wait.kind][wait.last] += 1
    by_line: dict[tuple[str, str], list[tuple[Sums, int]]] = defaultdict(list)
    for (where, kind, rank), sums in added(entries).items():
        by_line[where, kind].append((sums, rank))
    rows = [
        CallTimes(
            *line,
            sum(sums.events for sums, _ in each),
            sum(sums.seconds for sums, _ in each),
            *max((sums.longest, rank) for sums, rank in each),
            dict(last[line]),
        )
        for line, each in by_line.items()
    ]
    return sorted(rows, key=lambda call: (-call.seconds, call.where, call.kind))


# ── Which call a wait was for, and when the other ranks made their part of it

# (rank, kind, group) → its events, in the order of their ends
Ended = dict[tuple[int, str, str], list[Event]]
# a call, as all its ranks name it → when each rank posted its part
Parts = dict[tuple, dict[int, float]]


def _by_call(trace: Trace) -> tuple[Ended, Parts]:
    ended: Ended = defaultdict(list)
    parts: Parts = defaultdict(dict)
    for event in sorted([*trace.events, *trace.unfinished], key=lambda event: event.end):
        if event.kind != "span":
            ended[event.rank, event.kind, event.group.name].append(event)
            parts[call_key(event)][event.rank] = event.posted
    return ended, parts


def _event_of(span: Event, ended: Ended) -> Event | None:
    """Return the event of the call in which a rank waited.

    It is the first one of this kind and peer that ended when the wait did, or just after.
    """
    assert span.args is not None
    events = ended.get((span.rank, span.name or "", span.args["group"]), [])
    first, peer = bisect_left(events, span.end, key=lambda event: event.end), span.args["peer"]
    rest = (events[k] for k in range(first, len(events)))
    return next((event for event in rest if peer in (None, event.peer)), None)


def _wait(
    span: Event, kind: str, event: Event | None, parts: Parts, may_lack_parts: bool = False
) -> Wait:
    """Return a Wait for a time in which a rank was blocked.

    `may_lack_parts`: of a call that has ended, a part may be among the earlier events.
    """
    unknown = Wait(span.rank, kind, span.where, span.start, span.end, 0, None, 0.0)
    if event is None:
        return unknown
    needed = [event.peer] if kind in P2P or kind in FROM_ROOT else event.group.ranks
    posted = parts[call_key(event)]
    if may_lack_parts and not all(rank in posted for rank in needed if rank is not None):
        return unknown._replace(nbytes=event.nbytes)
    others = [rank for rank in needed if rank is not None and rank != span.rank]
    when, last = max(((posted.get(r, span.end), r) for r in others), default=(0.0, None))
    late = min(max(when - span.start, 0.0), span.end - span.start)
    return unknown._replace(nbytes=event.nbytes, last=last, late=late)
