"""Which step of an algorithm a message belongs to, from the record alone.

    step(m) = 1 + the last step that had ended at m's sender, or at its receiver, before they asked for m

Only times of one rank's own clock are compared, so a jittery wall clock and a virtual one give the same steps. A rank
sends one message at a time and receives one at a time (on a ring: one on each of its links), as in the usual cost model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from parallel101.trace.events import Event, Message


def steps_of(messages: Sequence[Message], port_per_link: bool = False) -> list[int]:
    """The step of each message, from 0, in the order of `messages`.

    Args:
        messages: as `Trace.messages` gives them.
        port_per_link: a rank has one way out and one way in for each neighbour, and not one for all.
    """
    steps = [0] * len(messages)
    done: dict[int, list[tuple[Event, int]]] = defaultdict(list)  # for each rank: its side of a message, and that message's step
    taken: set[tuple] = set()
    order = sorted(range(len(messages)), key=lambda i: (messages[i].end, messages[i].start, messages[i].send.seq, messages[i].src))
    for index in order:
        message = messages[index]
        sides = message.send, message.recv
        step = max((s + 1 for side in sides for before, s in done[side.rank] if _precedes(before, side)), default=0)
        way_out, way_in = ("out", message.src), ("in", message.dst)
        ways = [("link", message.src, message.dst)] if port_per_link else [way_out, way_in]
        while any((way, step) in taken for way in ways):
            step += 1
        taken.update((way, step) for way in ways)
        steps[index] = step
        for side in sides:
            done[side.rank].append((side, step))
    return steps


def _precedes(before: Event, after: Event) -> bool:
    """True when a rank was done with one thing before it asked for the other. Where nothing costs time, the count of messages decides."""
    if before.end == before.posted == after.posted:
        return before.seq < after.seq
    return before.end <= after.posted
