"""Finds the critical path of a run: the chain of messages and compute that ends last.

Everything outside this chain could be slower without making the run longer.

    rank 0  ▇▇▇ ╲          ╱ ▇▇      walk back from the last end: a rank waited for what
    rank 1        ╲ ▇▇▇▇ ╱           it had finished last, a message for the side that
                                     was posted last, or for a link

On sim the path is exact. On gloo and NCCL it comes from measured times. Compute is the time inside
spans; time between two calls that is in no span is named "between calls". A span in which a rank
posts messages and waits for them counts only between those.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from parallel101.laboratory.analysis.overlap import union
from parallel101.laboratory.analysis.waiting import FROM_ROOT
from parallel101.laboratory.record.events import P2P, Event, Message
from parallel101.laboratory.record.trace import Trace, call_key
from parallel101.laboratory.record.units import human_bytes, human_seconds

# on a measured clock: if a rank was blocked for less than this share of a call's time in flight,
# the call had ended before
AT_ONCE = 0.1


class Segment(NamedTuple):
    """A part of the critical path. The next segment starts when this one ends."""

    rank: int  # of a message: its sender
    # "message", a collective of torch's own, "compute" in a span, "between calls" in none, or "wait
    # for a link"
    kind: str
    start: float
    end: float
    label: str  # in words
    peer: int | None = None  # of a message: its receiver
    nbytes: int = 0


class CriticalPath(NamedTuple):
    """The segments of a critical path in order of time.

    They cover the run from its first start to its last end, without a gap.
    """

    segments: tuple[Segment, ...]

    @property
    def messages(self) -> int:
        return sum(s.kind == "message" for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the messages on the path."""
        return sum(s.nbytes for s in self.segments if s.kind == "message")

    def seconds(self, kind: str | None = None) -> float:
        """Return the seconds on the path: all of them, or those of the segments of one kind."""
        return sum((s.end - s.start for s in self.segments if kind in (None, s.kind)), 0.0)

    def __str__(self) -> str:
        """Describe what is on the path: "6 messages with 96 B take 6 s, compute 2 s"."""
        kinds = dict.fromkeys(s.kind for s in self.segments if s.end > s.start)
        parts = [
            f"{kind} {human_seconds(self.seconds(kind))}" for kind in kinds if kind != "message"
        ]
        if count := self.messages:
            one, several = ("s", "") if count == 1 else ("", "s")
            messages = f"{count} message{several} with {human_bytes(self.nbytes)}"
            parts.insert(0, f"{messages} take{one} {human_seconds(self.seconds('message'))}")
        return ", ".join(parts) or "nothing"


class Activity(NamedTuple):
    """An activity for which a rank may have waited.

    That is a message that it sent or received, a collective, or a piece of compute.
    """

    end: float  # when this rank saw its end
    # of those that end together, the largest: it took time, it is a call, it is a receive
    better: tuple[bool, bool, bool]
    start: float  # when nothing more was missing
    posted: tuple[float, int]  # when the last part that it needed was posted, and by which rank
    key: Hashable  # the same on all ranks
    segment: Segment
    message: Message | None = None


def critical_path(trace: Trace) -> CriticalPath:
    """Return the chain of messages and compute that ends last in a run.

    If two chains end at the same time, it is the lower rank's. Raises ValueError if the trace lacks
    the earlier events of its run.
    """
    trace.need_all_events("The critical path")
    if not trace.events:
        return CriticalPath(())
    path = [s for s in _backwards(_Record(trace)) if s.end > s.start or s.kind == "message"]
    return CriticalPath(tuple(reversed(path)))


def _backwards(record: _Record) -> Iterator[Segment]:
    """Yield the path from its last segment to its first."""
    t, rank = record.last_end, record.last_rank
    while t > record.first or not record.used:
        activity = record.before(rank, t)
        if activity is None:  # the rank computed since the run began
            yield _between_calls(rank, record.first, t)
            return
        yield _between_calls(rank, activity.end, t)
        t = activity.end
        while activity is not None:
            record.used.add(activity.key)
            yield activity.segment._replace(start=min(activity.start, t), end=t)
            t = min(activity.start, t)
            when, rank = activity.posted
            activity = (
                record.before_it_on_a_link(activity.message, t)
                if when < t and activity.message is not None
                else None
            )
        if when < t:
            yield Segment(
                rank, "wait for a link", when, t, "the message waits for a link that others use"
            )
            t = when


class _Record:
    """The activities of each rank, in order of their end, for the walk back."""

    def __init__(self, trace: Trace):
        self.exact = trace.backend == "sim"
        self.used: set[Hashable] = set()
        self.first = min(event.start for event in trace.events)
        self.calls: dict[int, list[Activity]] = defaultdict(list)
        by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in trace.events:
            by_rank[event.rank].append(event)
        self.pieces = {rank: _pieces_of_compute(events) for rank, events in by_rank.items()}
        self.at_end: dict[float, list[Message]] = defaultdict(list)
        for message in trace.messages():
            self.at_end[message.end].append(message)
            for side in (message.send, message.recv):
                # it had arrived before the receive was posted
                if not message.start < message.end <= side.posted:
                    self.calls[side.rank].append(_of_message(message, side))
        for rank, activity in _collectives(trace.events):
            self.calls[rank].append(activity)
        for of in self.calls.values():
            of.sort(key=lambda activity: activity[:2])
        self.last_end, rank = max((event.end, -event.rank) for event in trace.events)
        self.last_rank = -rank

    def before(self, rank: int, t: float) -> Activity | None:
        """Return the activity that ended last on a rank, at t or before.

        A piece of compute that goes on counts up to t.
        """
        calls, pieces = self.calls[rank], self.pieces.get(rank, [])
        ended_before = bisect_right(calls, t, key=lambda activity: activity.end)
        ended = [
            a for a in calls[max(0, ended_before - 64) : ended_before] if a.key not in self.used
        ]
        if not self.exact:
            ended = _without_those_that_had_ended(ended)
        # the first piece that starts at t or later
        k = bisect_left(pieces, t, key=lambda piece: piece.start)
        candidates = ended[-1:]
        if k:
            piece = pieces[k - 1]
            end = min(piece.end, t)
            candidates.append(
                Activity(end, (True, False, False), piece.start, (piece.start, rank), piece, piece)
            )
        return max(candidates, key=lambda activity: activity[:2], default=None)

    def before_it_on_a_link(self, message: Message, t: float) -> Activity | None:
        """Return the message whose end at t let this one start.

        It used the link of the same sender or receiver, or one between them.
        """
        on_link = [m for m in self.at_end.get(t, []) if m.start < t and self.exact]
        nearest = lambda m: (m.src == message.src, m.dst == message.dst)  # noqa: E731
        return _of_message(max(on_link, key=nearest), None) if on_link else None


def _between_calls(rank: int, start: float, end: float) -> Segment:
    return Segment(rank, "between calls", start, end, f"rank {rank} is between two calls")


def _of_message(m: Message, side: Event | None) -> Activity:
    """Return a message as one of its ranks saw it."""
    parts = [
        (event.posted, event is m.send, event.rank)
        for event in (m.send, m.recv)
        if event.posted <= m.start
    ] or [(m.start, True, m.src)]
    when, _, rank = max(parts)
    label = f"rank {m.src} sends {human_bytes(m.nbytes)} to rank {m.dst}"
    segment = Segment(m.src, "message", m.start, m.end, label, m.dst, m.nbytes)
    end = m.end if side is None else max(side.end, m.start)
    better = m.end > m.start, True, side is m.recv
    return Activity(end, better, m.start, (when, rank), id(m), segment, m)


def _collectives(events: Iterable[Event]) -> Iterator[tuple[int, Activity]]:
    """Yield each rank's part of each collective of torch's own."""
    parts: dict[tuple, list[Event]] = defaultdict(list)
    for e in events:
        if e.kind not in P2P and e.kind != "span":
            parts[call_key(e)].append(e)
    for key, of in parts.items():
        for e in of:
            needed = [o for o in of if e.kind not in FROM_ROOT or o.rank in (e.rank, e.peer)]
            last = max(needed, key=lambda o: o.posted)
            start = max(e.start, last.posted)
            label, better = f"{e.kind} of {human_bytes(e.nbytes)}", (e.end > start, True, True)
            segment = Segment(e.rank, e.kind, start, e.end, label, None, e.nbytes)
            posted = last.posted, last.rank
            yield e.rank, Activity(e.end, better, start, posted, key, segment)


def _pieces_of_compute(events: Sequence[Event]) -> list[Segment]:
    """Return one rank's pieces of compute in order: its innermost spans, less the times it waits.

    A span that contains both the post and the end of a call is taken to wait for it.
    """
    spans = sorted(
        (e for e in events if e.kind == "span" and e.end > e.start), key=lambda e: (e.start, -e.end)
    )
    calls = sorted(
        (e for e in events if e.kind != "span" and e.end > e.posted), key=lambda e: e.posted
    )
    posts = [e.posted for e in calls]
    pieces: list[tuple[Event, float, float]] = []
    open_: list[Event] = []
    bounds = sorted({t for e in spans for t in (e.start, e.end)})
    following = iter([*spans, None])
    span = next(following)
    for start, end in zip(bounds, bounds[1:]):
        while span is not None and span.start <= start:
            open_.append(span)
            span = next(following)
        open_ = [e for e in open_ if e.end > start]
        if not open_ or open_[-1].waiting:
            continue
        inner = open_[-1]
        inside = calls[bisect_left(posts, start) : bisect_left(posts, end)]
        waits = union((e.posted, e.end) for e in inside if e.end <= end)
        edges = [start, *(t for wait in waits for t in wait), end]
        pieces += [(inner, a, b) for a, b in zip(edges[::2], edges[1::2]) if b > a]
    return [Segment(e.rank, "compute", a, b, f"rank {e.rank}: {e.name}") for e, a, b in pieces]


def _without_those_that_had_ended(calls: list[Activity]) -> list[Activity]:
    """Return the calls of a rank in order of end, up to the last one for which it was blocked.

    A program waits for several calls one after the other, and the record has the time at which each
    wait returned.
    """
    for i in range(len(calls) - 1, 0, -1):
        call, before = calls[i], calls[i - 1]
        if call.start >= before.end or call.end - before.end >= AT_ONCE * (call.end - call.start):
            return calls[: i + 1]
    return calls[:1]
