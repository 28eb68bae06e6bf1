"""The record of a run: what every rank sent, received and computed, and when.

    rank 0  ──send──▶ ........ ──span "forward"──
    rank 1  ........ ◀──recv── ..................

An `Event` is one side of a message, one rank's part in a collective, or a named span of compute. A `Trace` is all of
them, with the counts a lecture asks for. Pictures, grades and predictions read nothing else.
"""

from __future__ import annotations

import functools
import gc
import gzip
import json
import operator
import os
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

P2P = frozenset({"send", "recv"})
FORMAT = "parallel101 trace 1"


class Event(NamedTuple):
    """One thing one rank did. Times are seconds on the run's clock (wall on gloo and NCCL, virtual on sim)."""

    rank: int
    kind: str  #  "send", "recv", a collective's name ("all_reduce", …), or "span"
    peer: int | None  #  the other rank of a message, or the root of a rooted collective; a rank of the world, not the group
    tag: int
    nbytes: int  #  of the message; of a collective: its payload on this rank (the larger of what goes in and comes out)
    start: float  #  when it began to move: on sim exactly, on gloo when the call was made, on NCCL when the GPU came to it
    end: float  #  when it was complete, as far as this rank could see
    where: str  #  "file:line" of the first caller outside torch and parallel101
    posted: float  #  when the program asked for it (equal to start on gloo and NCCL)
    group: str  #  which group it belongs to: a key of Trace.groups
    seq: int  #  the how-manieth of its kind: pairs the k-th send with the k-th receive of the same ranks, tag and group
    shape: tuple[int, ...]
    dtype: str
    payload: list | None = None  #  the values, flattened, where the run was asked to keep them and they are few
    name: str | None = None  #  of a span: what it was called; of a reducing collective: its operation
    args: dict[str, Any] | None = None  #  of a span: its labels, such as microbatch=3


_BY_TIME = operator.attrgetter("start", "rank", "seq")


class Message(NamedTuple):
    """One message, both sides of it: what left `src` and what arrived at `dst`."""

    src: int
    dst: int
    nbytes: int
    start: float  #  when both sides were ready for it
    end: float  #  when the receiver had it
    payload: list | None
    send: Event
    recv: Event


class Trace:
    """Every event of a run, in order of time.

    Args:
        events: what was recorded, in any order.
        world_size: how many ranks the run had.
        backend: "gloo", "nccl" or "sim".
        groups: for each group's name, its ranks in order.
        unfinished: what was posted and not seen to end (`end` is when the run did), in a run that failed or where nobody waited. It is
            no part of the events, of their counts and of the pictures.
    """

    def __init__(
        self,
        events: Iterable[Event],
        world_size: int,
        backend: str,
        groups: dict[str, list[int]] | None = None,
        unfinished: Iterable[Event] = (),
    ):
        self.unfinished: list[Event] = sorted(unfinished, key=_BY_TIME)
        self._rows: list[tuple] = list(events)
        self.world_size = world_size
        self.backend = backend
        self.groups = groups or {"world": list(range(world_size))}

    @classmethod
    def from_rows(
        cls, rows: Iterable[tuple], world_size: int, backend: str, groups: dict[str, list[int]], unfinished: Iterable[tuple] = ()
    ) -> Trace:
        """A trace from what ranks send: an Event's fields a row, or a message of the sim, which is a row: its send's fields, followed by
        `where` and `posted` of its receive. On real ranks the run's clock is made to start with its first event."""
        trace = cls((), world_size, backend, groups, map(Event._make, unfinished))
        trace._rows = list(rows)
        if backend != "sim":
            trace._number_receives()
        if backend != "sim" and trace.unfinished:
            trace._learn_from_receives()
        if backend != "sim" and (first := [*trace.events[:1], *trace.unfinished[:1]]):
            zero = min(event.start for event in first)
            trace.events, trace.unfinished = (
                [e._replace(start=e.start - zero, end=e.end - zero, posted=e.posted - zero) for e in events]
                for events in (trace.events, trace.unfinished)
            )
        return trace

    def _number_receives(self) -> None:
        """A receive from anyone was numbered among its like (and negative); now that its sender is known, it is among all from that one."""
        mixed = {(e.peer, e.rank, e.tag, e.group) for e in self.events if e.kind == "recv" and e.seq < 0}
        if not mixed:
            return
        counts: dict[tuple, int] = defaultdict(int)
        for place, e in sorted(enumerate(self.events), key=lambda entry: (entry[1].posted, abs(entry[1].seq))):
            key = (e.peer, e.rank, e.tag, e.group)
            if e.kind == "recv" and key in mixed:
                counts[key] += 1
                self.events[place] = e._replace(seq=counts[key])

    def _learn_from_receives(self) -> None:
        """A send for which nobody waited has ended where its receive has."""
        ends: dict[tuple, float] = {(e.peer, e.rank, e.tag, e.group, e.seq): e.end for e in self.events if e.kind == "recv"}
        known = [(e, ends.get((e.rank, e.peer, e.tag, e.group, e.seq)) if e.kind == "send" else None) for e in self.unfinished]
        self.unfinished = [e for e, end in known if end is None]
        self.events = sorted([*self.events, *(e._replace(end=max(e.start, end)) for e, end in known if end is not None)], key=_BY_TIME)

    @functools.cached_property
    def events(self) -> list[Event]:
        """Every event, in order of start, rank and seq. (Made when first asked for: a run may have millions.)"""
        events: list[Event] = []
        new, fields = tuple.__new__, len(Event._fields)  #  what Event._make does, less its check
        with collector_paused():
            for row in self._rows:
                events.append(new(Event, row[:fields]))
                if len(row) > fields:
                    events.append(new(Event, (row[2], "recv", row[0], *row[3:7], *row[fields:], *row[9:fields])))
            events.sort(key=_BY_TIME)
        self._rows = []
        return events

    def __repr__(self) -> str:
        size = f"{self.world_size} ranks on {self.backend}"
        open_ = f", {len(self.unfinished)} calls unfinished" if self.unfinished else ""
        return f"<Trace of {size}: {len(self.events)} events, {sum(self.messages_sent)} messages{open_}, {self.makespan:.3g} s>"

    @property
    def bytes_sent(self) -> list[int]:
        """Bytes each rank sent point to point, by rank. A collective of torch's own is one event, and not counted here."""
        return self._total("send", lambda e: e.nbytes)

    @property
    def bytes_received(self) -> list[int]:
        """Bytes each rank received point to point, by rank."""
        return self._total("recv", lambda e: e.nbytes)

    @property
    def messages_sent(self) -> list[int]:
        """Point-to-point messages each rank sent, by rank."""
        return self._total("send", lambda e: 1)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end (virtual seconds on sim); 0.0 for an empty trace."""
        if not self.events:
            return 0.0
        return max(e.end for e in self.events) - min(e.start for e in self.events)

    def messages(self) -> list[Message]:
        """The point-to-point messages with both their sides, in the order in which they arrived."""
        waiting: dict[tuple, deque[Event]] = defaultdict(deque)
        for event in sorted((e for e in self.events if e.kind == "send"), key=lambda e: e.seq):
            waiting[event.rank, event.peer, event.tag, event.group].append(event)
        paired = []
        for recv in sorted((e for e in self.events if e.kind == "recv"), key=lambda e: e.seq):
            queue = waiting[recv.peer, recv.rank, recv.tag, recv.group]
            if queue:
                send = queue.popleft()
                payload = recv.payload if recv.payload is not None else send.payload
                start = max(send.start, recv.start)
                paired.append(Message(send.rank, recv.rank, send.nbytes, start, max(start, recv.end), payload, send, recv))
        return sorted(paired, key=lambda m: (m.end, m.start, m.src, m.dst))

    def spans(self, name: str | None = None) -> list[Event]:
        """The named spans of compute, all of them or those called `name`."""
        return [e for e in self.events if e.kind == "span" and name in (None, e.name)]

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace as JSON (gzipped where the name ends in .gz); `Trace.load` reads it back whole."""
        head = {"format": FORMAT, "world_size": self.world_size, "backend": self.backend, "groups": self.groups, "fields": Event._fields}
        text = json.dumps({**head, "events": self.events, "unfinished": self.unfinished})
        data = text.encode()
        Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Trace:
        """Read what `save` wrote. Raises ValueError for a file that is not such a trace, or not a whole one."""

        data = Path(path).read_bytes()
        try:
            content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
            if content["format"] != FORMAT:
                raise ValueError(content["format"])
        except (ValueError, KeyError, TypeError, EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is not a trace that Trace.save wrote ('{FORMAT}' was expected): {error!r}") from error
        try:
            return trace_in(content)
        except ValueError as error:
            raise ValueError(f"{path} is not as Trace.save wrote it: {error}") from error

    def to_chrome(self, path: str | os.PathLike) -> None:
        """Write a Chrome trace: open it at ui.perfetto.dev or chrome://tracing. One process a rank, arrows along messages."""
        from parallel101.record.chrome import chrome_events

        Path(path).write_text(json.dumps({"traceEvents": chrome_events(self), "displayTimeUnit": "ns"}))

    def _total(self, kind: str, amount) -> list[int]:
        totals = [0] * self.world_size
        for event in self.events:
            if event.kind == kind:
                totals[event.rank] += amount(event)
        return totals


# ── A trace from what a file says: whatever does not fit is named here, and not by whoever first trips over it.


NUMBER, NONE = (int, float), type(None)
FIELDS: dict[str, Any] = {  #  what JSON has for each field of an Event
    "rank": int, "kind": str, "peer": (int, NONE), "tag": int, "nbytes": int, "start": NUMBER, "end": NUMBER, "where": str,
    "posted": NUMBER, "group": str, "seq": int, "shape": list, "dtype": str, "payload": (list, NONE), "name": (str, NONE),
    "args": (dict, NONE),
}  # fmt: skip
TYPES = tuple(FIELDS.values())
SHAPE = Event._fields.index("shape")


def trace_in(content: dict[str, Any]) -> Trace:
    """The trace that a file's JSON holds. Raises ValueError for what is missing, of another type, or speaks of a rank that is not there."""
    content = {"unfinished": [], **content}  #  files from before there were such events
    world_size, backend, groups = _entry(content, "world_size", int), _entry(content, "backend", str), _entry(content, "groups", dict)
    if world_size < 1:
        raise ValueError(f"its world_size is {world_size}, and a world has at least one rank")
    for name, ranks in groups.items():
        if not isinstance(ranks, list) or not all(isinstance(rank, int) and 0 <= rank < world_size for rank in ranks):
            raise ValueError(f"its group {name!r} is {ranks!r:.80}, which are not ranks of a world of {world_size}")
    with collector_paused():
        events, unfinished = ([_event(row, world_size) for row in _entry(content, name, list)] for name in ("events", "unfinished"))
    return Trace(events, world_size, backend, groups, unfinished)


def _entry(content: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(content.get(name), kind):
        what = f"its {name!r} is {content[name]!r:.80}" if name in content else f"it has no {name!r}"
        raise ValueError(f"{what}, where a {kind.__name__} was expected")
    return content[name]


def _event(row: Any, world_size: int) -> Event:
    if not isinstance(row, list) or len(row) != len(FIELDS):
        raise ValueError(f"an event is a list of {len(FIELDS)} fields, and one of its events is {row!r:.80}")
    if not all(map(isinstance, row, TYPES)):
        name, value = next((name, value) for (name, kind), value in zip(FIELDS.items(), row, strict=True) if not isinstance(value, kind))
        raise ValueError(f"one of its events has {value!r:.80} as its {name}")
    row[SHAPE] = tuple(row[SHAPE])
    event = Event._make(row)
    for name, rank in (("rank", event.rank), ("peer", event.peer)):
        if rank is not None and not 0 <= rank < world_size:
            raise ValueError(f"one of its events has {name} {rank}, in a world of {world_size}")
    return event


# ── Python's garbage collector, told to wait where many objects are made of which none is garbage.


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection inside: to look through all that was made so far, again and again, takes several times as long as to make it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
