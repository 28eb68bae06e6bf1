"""The entries of a record: an `Event` for each thing that a rank did.

That is its side of a message, its part in a collective, or a named span.

    rank 0  ──send──▶ ........ ──span "forward"──
    rank 1  ........ ◀──recv── ..................

Ranks send their record to the launching process as rows: plain tuples, which are pickled ten times
as fast as NamedTuples. A row has the fields of an `Event`; or it is both sides of a message, which
the simulator writes in one step because a run has millions of them (see events_of).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from parallel101.spans import Collective

P2P = frozenset({"send", "recv"})
EventRow = tuple


class EventGroup(NamedTuple):
    """The ranks among which a message was sent, or a collective ran.

    A message of one of parallel101's collectives has the ranks and axis of that collective; any
    other event, those of its process group. For an axis that is the whole world, DeviceMesh uses
    the default group: torch's own collectives over it have axis None.
    """

    # of the process group, in the record: the k-th send from one rank to another in it pairs with
    # the k-th receive
    name: str
    ranks: tuple[int, ...]  # in order
    axis: str | None  # the mesh axis along which they are, several joined by "_", or None


NO_GROUP = EventGroup("", (), None)  # a span's


# equal groups are one object, so that a record of a million events stores and sends each only once
_known: dict[EventGroup, EventGroup] = {}


def event_group(
    name: str, ranks: Sequence[int], axis: str | None, collective: Collective | None = None
) -> EventGroup:
    """Return the group of a call in a process group.

    Args:
        name, ranks, axis: of the process group.
        collective: the collective of parallel101 to which a message belongs; None for every other
            call.
    """
    if collective is not None:
        ranks, axis = collective.ranks, collective.axis
    group = EventGroup(name, tuple(ranks), axis)
    return _known.setdefault(group, group)


class Event(NamedTuple):
    """One thing that one rank did.

    Times are in seconds on the run's clock (wall time on gloo and NCCL, virtual time on sim).
    """

    rank: int
    kind: str  # "send", "recv", a collective's name ("all_reduce", …), or "span"
    # the other rank of a message, or the root of a rooted collective; numbered in the world, not in
    # the group
    peer: int | None = None
    tag: int = 0
    # of the message; of a collective: its payload on this rank (the larger of its input and its
    # output)
    nbytes: int = 0
    # when it began: on sim when its links were free, on gloo when it was called, on NCCL when the
    # GPU reached it
    start: float = 0.0
    end: float = 0.0  # when it was complete, as far as this rank could see
    where: str = ""  # "file:line" of the first caller outside torch and parallel101
    posted: float = 0.0  # when the program called it (equal to start on gloo and NCCL)
    group: EventGroup = NO_GROUP
    # sequence number, which pairs the k-th send with the k-th receive of the same ranks, tag and
    # group name
    seq: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    # the values, flattened, if the run was asked to keep them and they are few
    payload: list | None = None
    name: str | None = None  # of a span: its name; of a reducing collective: its operation
    args: dict[str, Any] | None = None  # of a span: its labels, such as microbatch=3
    waiting: bool = False  # of a span: the rank waits in it and computes nothing


class Message(NamedTuple):
    """One message with both its sides: what left `src` and what arrived at `dst`."""

    src: int
    dst: int
    nbytes: int
    start: float  # when both sides were ready for it
    end: float  # when the receiver had it
    payload: list | None
    send: Event
    recv: Event


def span_event(
    rank: int,
    name: str,
    start: Any,
    end: Any,
    labels: dict[str, Any] | None = None,
    *,
    where: str = "",
    seq: int = 0,
    waiting: bool = False,
) -> Event:
    """Return the event of a named span. On NCCL its times are moments of the GPU's clock."""
    about: dict[str, Any] = {"where": where, "seq": seq, "args": labels or {}, "waiting": waiting}
    return Event(rank, "span", start=start, end=end, posted=start, name=name, **about)


def events_of(rows: Iterable[EventRow]) -> list[Event]:
    """Return the events that rows hold, unsorted."""
    events: list[Event] = []
    # new: what Event._make does, less its check
    add, new, one_side = events.append, tuple.__new__, len(Event._fields)
    for row in rows:
        if len(row) == one_side:
            add(new(Event, row))
            continue
        # both sides of a message; `rest` is its group, seq, shape, dtype and payload
        src, dst, tag, nbytes, start, end, *rest, where, posted, recv_where, recv_posted = row
        about = (*rest, None, None, False)
        sent = (src, "send", dst, tag, nbytes, start, end, where, posted, *about)
        received = (dst, "recv", src, tag, nbytes, start, end, recv_where, recv_posted, *about)
        add(new(Event, sent))
        add(new(Event, received))
    return events
