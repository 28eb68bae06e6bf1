"""Finds the step of an algorithm to which each message belongs, from the record alone.

    a message waits for everything that its sender and its receiver had finished before they posted
    it

Only times of one rank's own clock are compared, so wall clocks with jitter and a virtual clock give
the same steps. A rank sends one message at a time and receives one at a time (on a ring: one on
each of its links), as in the usual cost model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from parallel101.laboratory.record.events import Event, Message


def steps_of(messages: Sequence[Message], port_per_link: bool = False) -> list[int]:
    """Return the step of each message, from 0, in the order of `messages`.

    Args:
        messages: as `Trace.messages` returns them.
        port_per_link: a rank can send to all its neighbours at once, and receive from all at once.
    """
    # for each rank, its sends and receives in the order in which they ended
    ended: dict[int, list[tuple]] = defaultdict(list)
    for i, m in enumerate(messages):
        for side in (m.send, m.recv):
            ended[side.rank].append((*_end(side), i))
    for events in ended.values():
        events.sort()

    def needed(side: Event) -> int:
        """Return how many of its rank's events had ended when this one was posted.

        If nothing costs time, the sequence numbers decide.
        """
        return bisect_left(ended[side.rank], (side.posted, True, side.seq))

    wants = [(needed(m.send), needed(m.recv)) for m in messages]
    nth_send, nth_recv = _order([m.send for m in messages]), _order([m.recv for m in messages])
    left = sorted(range(len(messages)), key=lambda i: (nth_send[i], nth_recv[i], messages[i].end))
    steps = [-1] * len(messages)
    # how many of each rank's events, in the order of their ends, are in earlier steps
    past = dict.fromkeys(ended, 0)
    step = 0
    while left:
        for rank, events in ended.items():
            while past[rank] < len(events) and steps[events[past[rank]][-1]] >= 0:
                past[rank] += 1
        ready = [
            i
            for i in left
            if past[messages[i].src] >= wants[i][0] and past[messages[i].dst] >= wants[i][1]
        ]
        busy: set[tuple] = set()
        # none is ready if a send ended before its message arrived
        for i in ready or [min(left, key=lambda i: messages[i].end)]:
            m = messages[i]
            ports = {("link", m.src, m.dst)} if port_per_link else {("out", m.src), ("in", m.dst)}
            if not ports & busy:
                busy |= ports
                steps[i] = step
        left = [i for i in left if steps[i] < 0]
        step += 1
    return steps


def _end(side: Event) -> tuple[float, bool, int]:
    return side.end, side.end == side.posted, side.seq


def _order(sides: Sequence[Event]) -> list[int]:
    """Return, for each event, how many events of its rank were posted before it."""
    count: dict[int, int] = defaultdict(int)
    order = [0] * len(sides)
    for i in sorted(range(len(sides)), key=lambda i: (sides[i].posted, sides[i].seq)):
        order[i] = count[sides[i].rank]
        count[sides[i].rank] += 1
    return order
