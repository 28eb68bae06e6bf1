"""Counts the traffic of each mesh axis, from the groups that events carry.

    dp       rank 0 → rank 4   gradients
    tp       rank 0 → rank 1   partial sums
    pp       rank 0 → rank 2   activations
    no axis                    messages of a group that no named mesh made

Each message is counted once, where it was sent. If the record has the last events of a long run
only, the counts and bytes are still those of the whole run. `laboratory.viz.axis_timeline` draws
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from parallel101.laboratory.analysis.overlap import TimeWindow, time_windows
from parallel101.laboratory.record.events import P2P, Event, Message
from parallel101.laboratory.record.totals import NOTHING, WAIT, Sums
from parallel101.laboratory.record.trace import Trace

# of the usual axes; others follow, and what has no axis is last
ORDER = ("dp", "dp_cp", "dp_ep", "dp_cp_ep", "cp", "ep", "pp", "tp")


class AxisTraffic(NamedTuple):
    """What was sent along one axis."""

    axis: str | None  # several joined by "_"; None: no axis
    messages: list[Message]  # in the order in which they arrived
    collectives: list[Event]  # torch's own: one event on each rank, with its payload
    # by rank, in a record of the last events of a run: sums of the others, and of sends whose
    # receive is not among them
    others: Mapping[int, Sums] = MappingProxyType({})

    def count(self, rank: int) -> int:
        """Messages that the rank sent, and collectives of torch's own that it took part in."""
        return len(self._sizes(rank)) + self.others.get(rank, NOTHING).events

    def sent(self, rank: int) -> int:
        """Bytes that the rank sent in messages, and the payload of those collectives."""
        return sum(self._sizes(rank)) + self.others.get(rank, NOTHING).nbytes

    def _sizes(self, rank: int) -> list[int]:
        return [m.nbytes for m in self.messages if m.src == rank] + [
            e.nbytes for e in self.collectives if e.rank == rank
        ]


def axis_traffic(trace: Trace, within: str | None = None) -> tuple[TimeWindow, list[AxisTraffic]]:
    """The traffic of each axis in a part of the record.

    Args:
        trace: the record of a run.
        within: the last span of this name on each rank; what a rank posts in it belongs to it.
            None: the whole record.

    Raises:
        ValueError: no span has that name.
    """
    (window,) = time_windows(trace, [within] if within else [])
    last = {e.rank: (e.start, e.end) for e in trace.spans(within)} if within else {}

    def inside(event: Event) -> bool:
        begin, end = (
            last.get(event.rank, (window.begin, window.begin))
            if within
            else (window.begin, window.end)
        )
        return begin <= event.posted <= end

    messages: dict[str | None, list[Message]] = defaultdict(list)
    collectives: dict[str | None, list[Event]] = defaultdict(list)
    for m in trace.messages():
        if inside(m.send):
            messages[m.send.group.axis or m.recv.group.axis].append(m)
    for e in trace.events:
        if e.kind != "span" and e.kind not in P2P and inside(e):
            collectives[e.group.axis].append(e)
    others = _others(trace) if within is None else {}
    axes = sorted(
        {*messages, *collectives, *others},
        key=lambda axis: (
            axis is None,
            ORDER.index(axis) if axis in ORDER else len(ORDER),
            axis or "",
        ),
    )
    return window, [
        AxisTraffic(axis, messages[axis], collectives[axis], others.get(axis, {})) for axis in axes
    ]


def _others(trace: Trace) -> dict[str | None, dict[int, Sums]]:
    """By axis and rank, the sums of what a record of the last events of a run does not list."""
    found: dict[str | None, dict[int, Sums]] = defaultdict(dict)

    def add(axis: str | None, rank: int, sums: Sums) -> None:
        found[axis][rank] = found[axis].get(rank, NOTHING).plus(sums)

    for rank, earlier in trace.earlier.items():
        for key, sums in earlier.sums.items():
            if key.kind not in ("recv", "span", WAIT):
                add(key.group.axis, rank, sums)
    paired = {id(m.send) for m in trace.messages()} if trace.earlier else set()
    for e in trace.events if trace.earlier else ():
        if e.kind == "send" and id(e) not in paired:
            add(e.group.axis, e.rank, Sums(1, e.nbytes, 0.0, 0.0))
    return found
