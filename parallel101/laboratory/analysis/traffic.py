"""Counts what ranks sent: by line, by axis of a mesh, from rank to rank, and by collective.

    dp       rank 0 → rank 4   gradients
    tp       rank 0 → rank 1   partial sums
    pp       rank 0 → rank 2   activations
    no axis                    messages of a group that no named mesh made

Each message is counted once, where it was sent. All counts are sums over the events that the record
kept and the sums of those before them (record/totals.py), so they are those of the whole run.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from typing import NamedTuple

from parallel101.laboratory.analysis.overlap import TimeWindow, time_windows
from parallel101.laboratory.record.events import P2P, Event, Message
from parallel101.laboratory.record.totals import NOTHING, WAIT, Sums, added, is_call, sums_of
from parallel101.laboratory.record.trace import Trace


def counted_calls(trace: Trace, within: str | None = None, unfinished: bool = False) -> list[Event]:
    """Return the calls of all ranks, and the sums over those that the record no longer has.

    Times in which a rank was blocked are among them.

    Args:
        trace: the record of a run.
        within: only what a rank posts in its last span of this name. None: everything.
        unfinished: whether calls that never ended count.

    Raises:
        ValueError: no span has that name.
    """
    (window,) = time_windows(trace, [within] if within else [])
    events = [*trace.events, *trace.unfinished] if unfinished else trace.events
    calls = (event for event in events if is_call(event) and window.has_post(event))
    return [*(trace.earlier if within is None else ()), *calls]


def is_collective(event: Event) -> bool:
    """Return whether an event, or a sum, is of torch's own collectives."""
    return event.kind not in P2P and event.kind not in ("span", WAIT)


def is_sent(event: Event) -> bool:
    return event.kind == "send" or is_collective(event)


# ── By axis

# of the usual axes; others follow, and what has no axis is last
ORDER = ("dp", "dp_cp", "dp_ep", "dp_cp_ep", "cp", "ep", "pp", "tp")


class AxisTraffic(NamedTuple):
    """The traffic along one axis."""

    axis: str | None  # several joined by "_"; None: no axis
    messages: list[Message]  # in the order in which they arrived
    collectives: list[Event]  # torch's own: one event on each rank, with its payload
    sums: list[Sums]  # by rank, over its sends and those collectives

    def count(self, rank: int) -> int:
        """Count the rank's sent messages, and the collectives of torch's own that it joined."""
        return self.sums[rank].events

    def sent(self, rank: int) -> int:
        """Return the bytes that the rank sent in messages, and the payload of those collectives."""
        return self.sums[rank].nbytes


def axis_traffic(trace: Trace, within: str | None = None) -> tuple[TimeWindow, list[AxisTraffic]]:
    """Return the traffic of each axis in a part of the record.

    Args:
        trace: the record of a run.
        within: the last span of this name on each rank; what a rank posts in it belongs to it.
            None: the whole record.

    Raises:
        ValueError: no span has that name.
    """
    (window,) = time_windows(trace, [within] if within else [])
    messages: dict[str | None, list[Message]] = defaultdict(list)
    collectives: dict[str | None, list[Event]] = defaultdict(list)
    for m in trace.messages():
        if window.has_post(m.send):
            messages[m.send.group.axis or m.recv.group.axis].append(m)
    for e in trace.events:
        if e.kind != "span" and e.kind not in P2P and window.has_post(e):
            collectives[e.group.axis].append(e)
    sums = added(
        ((e.group.axis, e.rank), sums_of(e)) for e in counted_calls(trace, within) if is_sent(e)
    )
    place = {axis: number for number, axis in enumerate(ORDER)}
    axes = sorted(
        {*messages, *collectives, *(axis for axis, _ in sums)},
        key=lambda axis: (axis is None, place.get(axis or "", len(ORDER)), axis or ""),
    )
    rows = []
    for axis in axes:
        of_ranks = [sums.get((axis, rank), NOTHING) for rank in range(trace.world_size)]
        rows.append(AxisTraffic(axis, messages[axis], collectives[axis], of_ranks))
    return window, rows


# ── From rank to rank


class Traffic(NamedTuple):
    """The point-to-point messages from each rank (a row) to each other rank (a column)."""

    nbytes: list[list[int]]
    messages: list[list[int]]


def traffic(trace: Trace, within: str | None = None) -> Traffic:
    """Count the messages of a run and their bytes.

    Args:
        trace: its record.
        within: only what a rank posts in its last span of this name. None: everything.

    Raises ValueError if no span has that name.
    """
    n = trace.world_size
    sent = Traffic([[0] * n for _ in range(n)], [[0] * n for _ in range(n)])
    for e in counted_calls(trace, within):
        if e.kind == "send" and e.peer is not None:
            sent.nbytes[e.rank][e.peer] += e.nbytes
            sent.messages[e.rank][e.peer] += sums_of(e).events
    return sent


class LinkTimes(NamedTuple):
    """The messages from one rank to another.

    If the record has only the last events of the run, seconds count only these.
    """

    src: int
    dst: int
    messages: int
    nbytes: int
    seconds: float  # from when both sides were ready until the receiver had the data, summed
    slowest: float  # the longest of these
    timed_bytes: int  # of the messages whose seconds are known


def slowest_links(trace: Trace) -> list[LinkTimes]:
    """Return the links between ranks that sent messages, the one that took most time first."""
    took = ((m, m.end - m.start) for m in trace.messages())
    timed = added(((m.src, m.dst), Sums(1, m.nbytes, time, time)) for m, time in took)
    sent, rows = traffic(trace), list[LinkTimes]()
    for src, dst in permutations(range(trace.world_size), 2):
        if count := sent.messages[src][dst]:
            _, nbytes, seconds, longest = timed.get((src, dst), NOTHING)
            of_all = src, dst, count, sent.nbytes[src][dst]
            rows.append(LinkTimes(*of_all, seconds, longest, nbytes))
    return sorted(rows, key=lambda link: (-link.seconds, link.src, link.dst))


# ── By collective


class CollectiveTotals(NamedTuple):
    """All calls of one of torch's collectives among the same ranks."""

    kind: str
    ranks: tuple[int, ...]
    axis: str | None
    calls: int  # on each rank
    nbytes: int  # of each rank's payload, summed over its calls


def collective_totals(trace: Trace) -> list[CollectiveTotals]:
    """Return torch's own collectives by operation and ranks, the one with most bytes first.

    Calls and bytes are those of the rank that has most.
    """
    sums = added(
        ((e.kind, e.group.ranks, e.group.axis, e.rank), sums_of(e))
        for e in counted_calls(trace)
        if is_collective(e)
    )
    by_ranks: dict[tuple, list[Sums]] = defaultdict(list)
    for (kind, ranks, axis, _), of_rank in sums.items():
        by_ranks[kind, ranks, axis].append(of_rank)
    rows = [
        CollectiveTotals._make((*key, max(s.events for s in of), max(s.nbytes for s in of)))
        for key, of in by_ranks.items()
    ]
    return sorted(rows, key=lambda row: (-row.nbytes, row.kind, row.ranks))
