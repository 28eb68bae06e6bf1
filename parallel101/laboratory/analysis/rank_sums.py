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
    (window,) = time_windows(trace, [within] if within else [])
    events = [*trace.events, *trace.unfinished] if unfinished else trace.events
    counted: dict[int, list[Event]] = defaultdict(list)
    calls = (event for event in events if is_call(event) and window.has_post(event))
    for event in (*(trace.earlier if within is None else ()), *calls):
        counted[event.rank].append(event)
    sums: RankSums = {rank: {} for rank in range(trace.world_size)}
    for rank in sums:
        add_to(sums[rank], counted[rank])
    return sums


def is_collective(key: SumKey) -> bool:
    return key.kind not in P2P and key.kind not in ("span", WAIT)


def total(sums: dict[SumKey, Sums], counts: Callable[[SumKey], bool]) -> Sums:
    """Return the sum over all keys that count."""
    result = NOTHING
    for key, of_key in sums.items():
        if counts(key):
            result = result.plus(of_key)
    return result
