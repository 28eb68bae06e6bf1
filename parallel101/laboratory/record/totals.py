"""Sums of events that a record no longer keeps, for each rank.

    all events of a rank:  ▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▪▪▪▪▪▪▪▪▪▪
                           └── summed ─────────────┘└ kept ──┘

Sums are by line, kind, peer and group, so that counts, bytes and seconds of the whole run stay
known. What needs both sides of a call, such as how late another rank was, is known for the kept
events only.

A sum is an Event too, which stands for many: its `nbytes` are theirs, its start and end are those
of all that were summed, and its labels have their number, seconds and longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parallel101.laboratory.record.events import NO_GROUP, Event, EventGroup

# of one rank; a program with more of them, as by a new tag or name in each step, has the rest of
# its sums under OTHER
MOST_KEYS = 4096
OTHER = "(other lines)"
WAIT = "wait"  # the kind under which times in which the program was blocked in a call are summed
COUNT = "events summed"  # the label of a sum with the number of its events


class SumKey(NamedTuple):
    """The properties that events have in common if they are summed together."""

    kind: str  # as in Event, or WAIT
    name: str | None  # of a span, or of the call in which the program was blocked
    where: str
    peer: int | None
    group: EventGroup


class Sums(NamedTuple):
    """Sums over events."""

    events: int
    nbytes: int
    seconds: float
    longest: float  # the most seconds of one of them

    def plus(self, other: Sums) -> Sums:
        return Sums(
            self.events + other.events,
            self.nbytes + other.nbytes,
            self.seconds + other.seconds,
            max(self.longest, other.longest),
        )


NOTHING = Sums(0, 0, 0.0, 0.0)


def summed(events: Sequence[Event]) -> list[Event]:
    """Return the marks among one rank's events, and an event for each sum over the others.

    Some may be sums already. Marks are the start and the end of the script, and the first call.
    Times are in seconds.
    """
    marks = [e for e in events if e.args and "script" in e.args]
    if calls := [e for e in events if is_call(e) and not is_wait(e)]:
        marks.append(min(calls, key=lambda e: e.posted))
    left_out = set(map(id, marks))
    begin = min((e.start for e in events), default=0.0)
    end = max((e.end for e in events), default=0.0)
    return marks + [
        Event(
            events[0].rank,
            nbytes=sums.nbytes,
            start=begin,
            end=end,
            posted=begin,
            args={COUNT: sums.events, "seconds": sums.seconds, "longest": sums.longest},
            **key._asdict(),
        )
        for key, sums in sums_by_key(e for e in events if id(e) not in left_out).items()
    ]


def sums_by_key(events: Iterable[Event]) -> dict[SumKey, Sums]:
    """Return the sums over one rank's events, of which some may be sums."""
    # equal groups are one object in a run, and to compare their ranks would take longer
    alike: dict[tuple, list[Event]] = defaultdict(list)
    for e in events:
        alike[WAIT if is_wait(e) else e.kind, e.name, e.where, e.peer, id(e.group)].append(e)
    sums: dict[SumKey, Sums] = {}
    for (kind, name, where, peer, _), same in alike.items():
        key = SumKey(kind, name, where, peer, same[0].group)
        if key not in sums and len(sums) >= MOST_KEYS:
            key = SumKey(kind, None, OTHER, peer, NO_GROUP)
        for e in same:
            sums[key] = sums.get(key, NOTHING).plus(sums_of(e))
    return sums


def sums_of(event: Event) -> Sums:
    """Return what an event, or a sum, adds to sums."""
    if is_sum(event):
        said = event.args or {}
        return Sums(said[COUNT], event.nbytes, said["seconds"], said["longest"])
    seconds = event.end - event.start
    return Sums(1, event.nbytes, seconds, seconds)


def is_sum(event: Event) -> bool:
    return event.args is not None and COUNT in event.args


def is_call(event: Event) -> bool:
    """Return whether an event is a call of another rank: any event but the program's own spans."""
    return (event.kind != "span" or is_wait(event)) and not is_sum(event)


def is_wait(event: Event) -> bool:
    """Return whether the event is a time in which the program was blocked in a call."""
    return event.waiting and event.args is not None and "group" in event.args
