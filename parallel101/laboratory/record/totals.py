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

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from parallel101.laboratory.record.events import NO_GROUP, Event

# of one rank; a program with more sums, as by a new tag or name in each step, has the rest of them
# under OTHER
MOST_SUMS = 4096
OTHER = "(other lines)"
WAIT = "wait"  # the kind under which times in which the program was blocked in a call are summed
COUNT = "events summed"  # the label of a sum with the number of its events


Key = TypeVar("Key")


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
    sums: dict[Event, Sums] = {}
    for e in events:
        if id(e) not in left_out:
            kind = WAIT if is_wait(e) else e.kind
            key = Event(
                e.rank, kind, e.peer, 0, 0, begin, end, e.where, begin, e.group, name=e.name
            )
            if key not in sums and len(sums) >= MOST_SUMS:
                key = key._replace(where=OTHER, group=NO_GROUP, name=None)
            sums[key] = sums.get(key, NOTHING).plus(sums_of(e))
    for key, (count, nbytes, seconds, longest) in sums.items():
        labels = {COUNT: count, "seconds": seconds, "longest": longest}
        marks.append(key._replace(nbytes=nbytes, args=labels))
    return marks


def added(entries: Iterable[tuple[Key, Sums]]) -> dict[Key, Sums]:
    """Return, for each key, the sums over all its entries."""
    sums: dict[Key, Sums] = {}
    for key, more in entries:
        sums[key] = sums.get(key, NOTHING).plus(more)
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
