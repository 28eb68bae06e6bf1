"""The record of a run: `Trace` holds its events.

It counts messages and bytes, pairs sends with receives, and can be saved and loaded.

    run.trace.bytes_sent, .makespan        counts
    run.trace.messages()                   each send with its receive
    run.trace.save(path), Trace.load(path) JSON; to_chrome(path) for ui.perfetto.dev

events.py says what an event is. What the events mean, such as whose data is in a message, is
computed in parallel101/laboratory/analysis.
"""

from __future__ import annotations

import functools
import gc
import gzip
import json
import operator
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallel101.laboratory.record.chrome import chrome_events
from parallel101.laboratory.record.events import (
    P2P,
    Event,
    EventGroup,
    EventRow,
    Message,
    events_of,
)
from parallel101.laboratory.record.totals import summed, sums_of

LISTS = "events", "unfinished", "earlier"
FORMATS = "parallel101 trace 4", "parallel101 trace 2"  # what is written; also read: no `earlier`
COMPRESSION = 3  # of gzip: 9 takes ten times as long, and saves a sixth

BY_TIME = operator.attrgetter("start", "rank", "seq")
BY_ARRIVAL = operator.attrgetter("end", "start", "src", "dst")


class Trace:
    """All events of a run, in order of time.

    Args:
        events: what was recorded, in any order.
        world_size: how many ranks the run had.
        backend: "gloo", "nccl" or "sim".
        unfinished: calls that were posted and not seen to end, because the run failed or nobody
            waited for them. Their `end` is the end of the run. They are not in `events`, the counts
            and the pictures.
        earlier: sums over the events that the record of a long run no longer keeps, and marks of
            the script (see totals.py).

    Attributes:
        earlier: as given. If it is empty, `events` are all events of the run. Else they are the
            last ones. `bytes_sent`, `bytes_received`, `messages_sent` and `makespan` are always
            those of the whole run.

    Example:
        >>> def program():
        ...     p101.all_gather(torch.ones(2), algorithm="ring")
        >>> trace = p101.launch(program, world_size=3, backend="sim").trace
        >>> trace.messages_sent, trace.bytes_sent
        ([2, 2, 2], [16, 16, 16])
        >>> [(m.src, m.dst) for m in trace.messages()]
        [(0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0)]
    """

    def __init__(
        self,
        events: Iterable[Event],
        world_size: int,
        backend: str,
        unfinished: Iterable[Event] = (),
        earlier: Iterable[Event] = (),
    ):
        self.unfinished: list[Event] = sorted(unfinished, key=BY_TIME)
        self.earlier = list(earlier)
        self._rows: list[EventRow] = list(events)
        self.world_size = world_size
        self.backend = backend

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[EventRow],
        world_size: int,
        backend: str,
        unfinished: Iterable[EventRow] = (),
        earlier: Iterable[EventRow] = (),
    ) -> Trace:
        """Make a trace from the rows that ranks send (see events.py).

        On real ranks, time 0 is the start of the first event.
        """
        trace = cls((), world_size, backend, events_of(unfinished), events_of(earlier))
        trace._rows = list(rows)
        if trace.earlier:
            trace._keep_what_all_ranks_kept()
        if backend == "sim":
            return trace
        trace._number_receives_from_anyone()
        if trace.unfinished:
            trace._end_sends_with_their_receives()
        if first := [*trace.events[:1], *trace.unfinished[:1]]:
            zero = min(event.start for event in [*first, *trace.earlier])
            trace.events, trace.unfinished, trace.earlier = (
                shifted(events, zero) for events in (trace.events, trace.unfinished, trace.earlier)
            )
        return trace

    def _keep_what_all_ranks_kept(self) -> None:
        """Sum the events that ended before the time from which on the record of each rank is whole.

        Otherwise one rank's part of a call would be there, and another's not.
        """
        whole_from = max(e.end for e in self.earlier)
        old = [e for e in self.events if e.end <= whole_from]
        self.events = [e for e in self.events if e.end > whole_from]
        by_rank: dict[int, list[Event]] = defaultdict(list)
        for e in [*self.earlier, *old]:
            by_rank[e.rank].append(e)
        self.earlier = [e for of_rank in by_rank.values() for e in summed(of_rank)]

    def _number_receives_from_anyone(self) -> None:
        """Number receives from any rank (seq < 0) together with the other receives.

        The others are those from the rank whose message was received.
        """
        receives = [(index, e) for index, e in enumerate(self.events) if e.kind == "recv"]
        mixed = {channel(e) for _, e in receives if e.seq < 0}
        counts = dict.fromkeys(mixed, 0)
        receives.sort(key=lambda entry: (entry[1].posted, abs(entry[1].seq)))
        for index, e in receives if mixed else ():
            if (key := channel(e)) in mixed:
                counts[key] += 1
                self.events[index] = e._replace(seq=counts[key])

    def _end_sends_with_their_receives(self) -> None:
        """Move each send that has ended from `unfinished` to `events`.

        A send for which nobody waited has ended if its receive has.
        """
        ends = {call_key(e): e.end for e in self.events if e.kind == "recv"}
        unfinished, self.unfinished = self.unfinished, []
        for e in unfinished:
            if e.kind == "send" and (end := ends.get(call_key(e))) is not None:
                self.events.append(e._replace(end=max(e.start, end)))
            else:
                self.unfinished.append(e)
        self.events.sort(key=BY_TIME)

    @functools.cached_property
    def events(self) -> list[Event]:
        """Return all events, in order of start, rank and seq.

        They are made from rows at the first access, since a run may have millions.
        """
        with collector_paused():
            events = events_of(self._rows)
            events.sort(key=BY_TIME)
        self._rows = []
        return events

    def __repr__(self) -> str:
        size = f"{self.world_size} ranks on {self.backend}"
        unfinished = f", {len(self.unfinished)} calls unfinished" if self.unfinished else ""
        events = self.kept_text or f"{len(self.events)} events"
        return (
            f"<Trace of {size}: {events}, {sum(self.messages_sent)} "
            f"messages{unfinished}, {self.makespan:.3g} s>"
        )

    @property
    def kept_text(self) -> str:
        """Return "the last 100,000 events of 3,400,000", or "" if the trace has all events."""
        if not self.earlier:
            return ""
        kept = len(self.events)
        earlier = sum(sums_of(e).events for e in self.earlier)
        return f"the last {kept:,} events of {kept + earlier:,}"

    def need_all_events(self, what: str) -> None:
        """Raise ValueError if the record has the last events of its run only.

        `what`: what would be wrong then, such as "explain".
        """
        if self.earlier:
            raise ValueError(
                f"{what} needs all events of a run, and this record has {self.kept_text}. Record "
                "fewer steps, or more events: parallel101 run --last-events N"
            )

    @property
    def bytes_sent(self) -> list[int]:
        """Return the bytes that each rank sent point to point, by rank.

        torch's own collectives, which are one event a rank, are not counted.
        """
        return self._total("send", lambda e: e.nbytes)

    @property
    def bytes_received(self) -> list[int]:
        """Return the bytes that each rank received point to point, by rank."""
        return self._total("recv", lambda e: e.nbytes)

    @property
    def messages_sent(self) -> list[int]:
        """Count the point-to-point messages that each rank sent, by rank."""
        return self._total("send", lambda e: sums_of(e).events)

    @property
    def makespan(self) -> float:
        """Return the seconds from the first start to the last end; 0.0 for an empty trace.

        On sim the seconds are virtual.
        """
        every = [*self.earlier, *self.events]
        return max(e.end for e in every) - min(e.start for e in every) if every else 0.0

    def messages(self) -> list[Message]:
        """Return the point-to-point messages, each with both sides, in order of arrival.

        If earlier events are missing, a receive from any rank has no number that its send has, and
        is left out.
        """
        sends = {call_key(e): e for e in self.events if e.kind == "send"}
        messages = []
        for recv in self.events:
            if recv.kind == "recv" and (send := sends.pop(call_key(recv), None)) is not None:
                start = max(send.start, recv.start)
                payload = send.payload if recv.payload is None else recv.payload
                sides = (start, max(start, recv.end), payload, send, recv)
                messages.append(Message(send.rank, recv.rank, send.nbytes, *sides))
        return sorted(messages, key=BY_ARRIVAL)

    def spans(self, name: str | None = None) -> list[Event]:
        """Return the named spans: all of them, or those called `name`."""
        return [e for e in self.events if e.kind == "span" and name in (None, e.name)]

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace as JSON, gzipped if the name ends in .gz. `Trace.load` reads it."""
        groups: dict[EventGroup, int] = {}

        def fields(event: Event) -> tuple:
            number = groups.setdefault(event.group, len(groups))
            return *event[:GROUP], number, *event[GROUP + 1 :]

        lists = {name: list(map(fields, getattr(self, name))) for name in LISTS}
        facts = {name: getattr(self, name) for name in ("world_size", "backend")}
        content = {"format": FORMATS[0], **facts, "fields": Event._fields, "groups": list(groups)}
        data = json.dumps(content | lists).encode()
        Path(path).write_bytes(
            gzip.compress(data, COMPRESSION) if str(path).endswith(".gz") else data
        )

    @classmethod
    def load(cls, path: str | os.PathLike) -> Trace:
        """Read a trace that `save` wrote.

        Raises ValueError for any other file, and for one that was cut short or changed.
        """
        data = Path(path).read_bytes()
        try:
            return trace_in(json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data))
        except (ValueError, TypeError, EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is not a trace that Trace.save wrote: {error}") from error

    def to_chrome(self, path: str | os.PathLike) -> None:
        """Write a Chrome trace, to open at ui.perfetto.dev or chrome://tracing.

        It has a process for each rank, and an arrow for each message.
        """
        slices = chrome_events(self.world_size, self.events, self.unfinished, self.messages())
        Path(path).write_text(json.dumps({"traceEvents": slices, "displayTimeUnit": "ns"}))

    def _total(self, kind: str, amount: Callable[[Event], int]) -> list[int]:
        totals = [0] * self.world_size
        for event in [*self.earlier, *self.events]:
            if event.kind == kind:
                totals[event.rank] += amount(event)
        return totals


def channel(e: Event) -> tuple:
    """Return what a send and its receive have in common, but for their sequence number."""
    src, dst = (e.rank, e.peer) if e.kind == "send" else (e.peer, e.rank)
    return src, dst, e.tag, e.group.name


def call_key(e: Event) -> tuple:
    """Return a key for a call that is the same on all ranks that take part."""
    if e.kind in P2P:
        return *channel(e), e.seq
    return e.group.name, e.group.ranks, e.kind, e.seq


def shifted(events: Iterable[Event], seconds: float) -> list[Event]:
    """Return events with all times earlier by this many seconds."""
    return [
        e._replace(start=e.start - seconds, end=e.end - seconds, posted=e.posted - seconds)
        for e in events
    ]


# ── Reading a file: everything in it is checked here, so the rest of the code only sees traces that
# Trace.save could have written.

NONE = type(None)
# the JSON type of each field of an Event; a group is an index into the file's list of groups
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("rank", "tag", "nbytes", "group", "seq"), int),
    **dict.fromkeys(("kind", "where", "dtype"), str),
    **dict.fromkeys(("start", "end", "posted"), (int, float)),
    "peer": (int, NONE),
    "name": (str, NONE),
    "shape": list,
    "payload": (list, NONE),
    "args": (dict, NONE),
    "waiting": bool,
}
TYPES = tuple(FIELDS[name] for name in Event._fields)
RANK, PEER, GROUP, SHAPE = (Event._fields.index(x) for x in ("rank", "peer", "group", "shape"))


def trace_in(content: dict[str, Any]) -> Trace:
    """Return the trace in a file's JSON.

    Raises ValueError for an entry that is missing, has another type, or names a rank outside the
    world.
    """
    content = {"earlier": [], **content}
    if content.get("format") not in FORMATS:
        raise ValueError(f"its format is {content.get('format')!r}, not {FORMATS[0]!r}")
    kinds = {"world_size": int, "backend": str, **dict.fromkeys(("groups", *LISTS), list)}
    for name, kind in kinds.items():
        if not isinstance(given := content.get(name), kind):
            raise ValueError(f"its {name!r} is {given!r:.80}, where a {kind.__name__} was expected")
    size = content["world_size"]
    groups = [_group(entry, size) for entry in content["groups"]]
    with collector_paused():
        events, unfinished, earlier = (
            [_event(row, groups, size) for row in content[name]] for name in LISTS
        )
    return Trace(events, size, content["backend"], unfinished, earlier)


def _group(entry: Any, world_size: int) -> EventGroup:
    match entry:
        case [str(name), list(ranks), str() | None as axis] if all(
            isinstance(rank, int) and 0 <= rank < world_size for rank in ranks
        ):
            return EventGroup(name, tuple(ranks), axis)
    raise ValueError(
        f"a group is a name, ranks of a world of {world_size}, and an axis or null; one of its "
        f"groups is {entry!r:.80}"
    )


def _event(row: Any, groups: list[EventGroup], world_size: int) -> Event:
    if (
        isinstance(row, list)
        and len(row) == len(TYPES)
        and all(map(isinstance, row, TYPES))
        and 0 <= row[GROUP] < len(groups)
        and all(rank is None or 0 <= rank < world_size for rank in (row[RANK], row[PEER]))
    ):
        row[GROUP], row[SHAPE] = groups[row[GROUP]], tuple(row[SHAPE])
        return Event._make(row)
    raise ValueError(
        f"an event is a list of {len(TYPES)} fields ({', '.join(Event._fields)}), with one of "
        f"{len(groups)} groups and ranks of a world of {world_size}; one is {row!r:.200}"
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switch Python's garbage collector off while many objects are made and none is garbage.

    Otherwise it would look through all of them again and again, which takes several times as long
    as making them.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
