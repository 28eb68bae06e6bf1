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
from collections.abc import Callable
from typing import NamedTuple

from parallel101.laboratory.analysis.overlap import TimeWindow, time_windows
from parallel101.laboratory.analysis.rank_sums import (
    is_collective,
    rank_sums,
    total,
)
from parallel101.laboratory.record.events import P2P, Event, Message
from parallel101.laboratory.record.totals import SumKey, Sums
from parallel101.laboratory.record.trace import Trace

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
    sums = rank_sums(trace, within)
    counted = [key for of_rank in sums.values() for key in of_rank if _is_sent(key)]
    axes = sorted(
        {*messages, *collectives, *(key.group.axis for key in counted)},
        key=lambda axis: (
            axis is None,
            ORDER.index(axis) if axis in ORDER else len(ORDER),
            axis or "",
        ),
    )

    def along(axis: str | None) -> Callable[[SumKey], bool]:
        return lambda key: _is_sent(key) and key.group.axis == axis

    return window, [
        AxisTraffic(
            axis,
            messages[axis],
            collectives[axis],
            [total(of_rank, along(axis)) for of_rank in sums.values()],
        )
        for axis in axes
    ]


def _is_sent(key: SumKey) -> bool:
    return key.kind == "send" or is_collective(key)
