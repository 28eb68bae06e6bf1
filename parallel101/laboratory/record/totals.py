"""Sums of events that a record no longer keeps, for each rank.

    all events of a rank:  ▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▫▪▪▪▪▪▪▪▪▪▪
                           └── EarlierEvents ──────┘└ kept ──┘

Sums are by line, kind, peer and group, so that counts, bytes and seconds of the whole run stay
known. What needs both sides of a call, such as how late another rank was, is known for the kept
events only.
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


class EarlierEvents:
    """Sums over the events of one rank that its record no longer keeps.

    Attributes:
        count: how many events.
        begin: the earliest start of one of them, in seconds.
        until: the latest end of one of them. From then on the record lacks nothing.
        waited: seconds in which the program was blocked in a call. Overlapping times count once.
        sums: by line, kind, peer and group.
        marks: of those that are among them, the start and the end of the script and the first call.
    """

    def __init__(
        self,
        count: int = 0,
        begin: float = 0.0,
        until: float = 0.0,
        waited: float = 0.0,
        sums: dict[SumKey, Sums] | None = None,
        marks: Iterable[Event] = (),
    ):
        self.count, self.begin, self.until, self.waited = count, begin, until, waited
        self.sums = {} if sums is None else sums
        self.marks = list(marks)
        self.blocked_until = 0.0  # times of waiting until then are in `waited`

    def __repr__(self) -> str:
        return f"<{self.count} earlier events in {self.until - self.begin:.3g} s>"

    def copy(self) -> EarlierEvents:
        same = EarlierEvents(
            self.count,
            self.begin,
            self.until,
            self.waited,
            dict(self.sums),
            self.marks,
        )
        same.blocked_until = self.blocked_until
        return same

    def add(self, events: Sequence[Event]) -> None:
        """Add events of this rank, whose times are in seconds."""
        if not events:
            return
        begin, until = min(e.start for e in events), max(e.end for e in events)
        self.begin = min(self.begin, begin) if self.count else begin
        self.until = max(self.until, until) if self.count else until
        self.count += len(events)
        # equal groups are one object in a run, and to compare their ranks would take longer
        alike: dict[tuple, list[Event]] = defaultdict(list)
        for e in events:
            alike[WAIT if is_wait(e) else e.kind, e.name, e.where, e.peer, id(e.group)].append(e)
        for (kind, name, where, peer, _), same in alike.items():
            self._add_to(SumKey(kind, name, where, peer, same[0].group), same)
        for e in sorted((e for e in events if is_wait(e)), key=lambda e: e.start):
            start = max(e.start, self.blocked_until)
            if e.end > start:
                self.waited += e.end - start
                self.blocked_until = e.end
        self.marks += [e for e in events if e.args and "script" in e.args]
        calls = [e for e in events if is_call(e)]
        if calls and not any(map(is_call, self.marks)):
            self.marks.append(min(calls, key=lambda e: e.posted))

    def _add_to(self, key: SumKey, events: Sequence[Event]) -> None:
        if key not in self.sums and len(self.sums) >= MOST_KEYS:
            key = SumKey(key.kind, None, OTHER, key.peer, NO_GROUP)
        seconds = [e.end - e.start for e in events]
        sums = Sums(len(events), sum(e.nbytes for e in events), sum(seconds), max(seconds))
        self.sums[key] = self.sums.get(key, NOTHING).plus(sums)

    def shifted(self, seconds: float) -> EarlierEvents:
        """Return a copy with all times earlier by this many seconds."""
        marks = [
            e._replace(start=e.start - seconds, end=e.end - seconds, posted=e.posted - seconds)
            for e in self.marks
        ]
        begin, until = self.begin - seconds, self.until - seconds
        return EarlierEvents(self.count, begin, until, self.waited, self.sums, marks)

    def sum_of(self, *kinds: str) -> Sums:
        """Return the sums over all events of some kinds."""
        total = NOTHING
        for key, sums in self.sums.items():
            if key.kind in kinds:
                total = total.plus(sums)
        return total


def is_call(event: Event) -> bool:
    """Return whether an event is a call of another rank: any event but the program's own spans."""
    return event.kind != "span" or is_wait(event)


def is_wait(event: Event) -> bool:
    """Return whether the event is a time in which the program was blocked in a call."""
    return event.waiting and event.args is not None and "group" in event.args
