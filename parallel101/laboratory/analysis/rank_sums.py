"""Sums what each rank did by line, kind, peer and group (record/totals.py has the sums' form).

    events that the record kept  ─┐
    sums of those before them    ─┴─▶  sums of the whole run

Tables count with these sums, so it makes no difference to them how many events a record kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from parallel101.laboratory.analysis.overlap import time_windows
from parallel101.laboratory.record.events import P2P, Event
from parallel101.laboratory.record.totals import NOTHING, WAIT, SumKey, Sums, add_to, is_call
from parallel101.laboratory.record.trace import Trace

RankSums = dict[int, dict[SumKey, Sums]]  # by rank


def rank_sums(trace: Trace, within: str | None = None, unfinished: bool = False) -> RankSums:
    """Return the sums over the calls of each rank, and over the times in which it was blocked.

    Args:
        trace: the record of a run.
        within: only what a rank posts in its last span of this name. None: everything.
        unfinished: whether calls that never ended count.

    Raises:
        ValueError: no span has that name.
    """
    events = [*trace.events, *trace.unfinished] if unfinished else trace.events
    inside = posted_within(trace, within)
    counted: dict[int, list[Event]] = defaultdict(list)
    for event in trace.earlier if within is None else ():
        counted[event.rank].append(event)
    for event in events:
        if is_call(event) and inside(event):
            counted[event.rank].append(event)
    sums: RankSums = {rank: {} for rank in range(trace.world_size)}
    for rank in sums:
        add_to(sums[rank], counted[rank])
    return sums


def posted_within(trace: Trace, name: str | None) -> Callable[[Event], bool]:
    """Return whether a rank posts an event in its last span of a name. None: always.

    What it posts at the span's end isn't in it: on the virtual clock, the next call is posted at
    that time. Raises ValueError if no span has that name.
    """
    if name is None:
        return lambda event: True
    time_windows(trace, [name])  # raises
    last = {span.rank: (span.start, span.end) for span in trace.spans(name)}

    def inside(event: Event) -> bool:
        begin, end = last.get(event.rank, (0.0, -1.0))
        return begin == event.posted <= end or begin < event.posted < end

    return inside


def is_collective(key: SumKey) -> bool:
    return key.kind not in P2P and key.kind not in ("span", WAIT)


def total(sums: dict[SumKey, Sums], counts: Callable[[SumKey], bool]) -> Sums:
    """Return the sum over all keys that count."""
    result = NOTHING
    for key, of_key in sums.items():
        if counts(key):
            result = result.plus(of_key)
    return result
