"""Sends and receives on the sim: matches each send with its receive, and moves the bytes.

    send posted ─┐
                 ├─▶ matched ─▶ asks for its links ─▶ starts ─▶ ends: the bytes are in the
    recv posted ─┘              receiver's tensor, both works are done, the event is recorded

The bytes are copied from the sender's tensor when the send is posted or starts, and into the
receiver's tensor when the message has ended and the receiver waits for it, not before. A sender
that changes its tensor before its wait() gets a MisuseError. So does a rank that never waits for a
receive.

A run has millions of messages. The code that each message passes through is therefore written out,
with as few calls as possible. How long a message takes, and which one gets a link first, is in
network.py.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import (
    Call,
    disagreement,
    long_dims,
    operation_on_ranks,
    rank_at,
    tensor_changed,
    waited_twice,
)
from parallel101.laboratory.record.errors import MisuseError
from parallel101.laboratory.record.events import EventGroup, EventRow, event_group
from parallel101.laboratory.record.program_lines import where as where_from
from parallel101.laboratory.record.signatures import (
    WHOLE,
    memory,
    own_limit,
    snapshot,
    unfit,
    values,
)
from parallel101.laboratory.sim.async_work import SimFuture, SimWork
from parallel101.laboratory.sim.clock import VirtualRank, World
from parallel101.spans import Collective, current_collective

NO_MESSAGE_YET = object()

# a run records millions of events: equal shapes share one plain tuple, equal dtypes one string
_shapes: dict[Any, tuple[int, ...]] = {}
_dtypes: dict[torch.dtype, str] = {}


# ── The two sides of a message


@dataclass(init=False, repr=False, eq=False, slots=True)
class MessageWork(SimWork):
    """One side of a message: a send, which is also the message in flight, or a receive.

    Both are of one class. CPython makes an attribute access fast for one class in each piece of
    code, and sends and receives alternate.
    """

    kind: str  # "send" or "recv"
    world: World
    rank: VirtualRank
    done: bool
    future: SimFuture | None
    group: PointToPointGroup
    tensor: torch.Tensor | None  # None once only the caller may still use it
    peer: int | None  # a rank of the world; None: any rank of the group
    tag: int
    where: str
    posted: float
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    pointer: int  # 0 on the meta device
    number: int  # counts all sends and receives of the run, in the order in which they were posted
    # the collective of parallel101 that the message belongs to: operation and ranks
    within: tuple[str, tuple[int, ...]] | None
    event_group: EventGroup
    waited: bool  # on gloo, a program may wait for a message only once
    met: bool  # whether it needs nothing more of the other side
    on_end: Callable[[], None] | None  # under NCCL's rules: tells its queue
    # the bytes in flight; of a receive, those that have arrived and are not in the tensor yet,
    # because the rank has not waited for them
    data: bytes | None

    # ---- of a receive ----
    source: int  # the sender's position in the group
    channels: list[list]  # of one from any rank: those on which it waits

    # ---- of a send ----
    receive: MessageWork | None
    hops: tuple[tuple[int, ...], ...]
    duration: float  # with its latency
    latency: float
    order: int  # its number among the messages that its sender has in flight
    seq: int  # its number among the messages on its channel: see UnmatchedMessages
    started: float
    # the tensor's bytes when it was sent, all or samples; None: the sender may change it now
    snapshot: bytes | None
    payload: list | None

    def __init__(
        self,
        group: PointToPointGroup,
        kind: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        where: str,
    ):
        """Set what both sides have, once the world's time has reached the rank's."""
        self.world, self.rank = world, rank = group.world, group.member
        if rank.clock > world.now or world.failure is not None:
            world.enter(rank)
        # torch passes complex tensors as pairs of real numbers
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
            check_sendable(tensor, kind, rank, where)
            self.pointer = 0
        else:
            self.pointer = tensor.data_ptr()
        collective = current_collective()
        if collective is not group.collective:
            group.set_collective(collective)
        self.kind = kind
        self.future = self.on_end = self.data = self.snapshot = self.receive = None
        self.done = self.waited = self.met = False
        self.group = group
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.where = where
        self.within = group.within
        self.event_group = group.event_group
        self.posted = world.now
        self.nbytes = tensor.nbytes
        shape, dtype = tensor.shape, tensor.dtype
        self.shape = _shapes.get(shape) or _shapes.setdefault(shape, tuple(shape))
        self.dtype = _dtypes.get(dtype) or _dtypes.setdefault(dtype, str(dtype)[6:])
        unmatched = group.unmatched
        self.number = unmatched.number = unmatched.number + 1

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.waited and self.done and self.future is None:
            self.world.raise_in(self.rank, waited_twice(self.rank.number, self.kind))
        self.waited = True
        if not self.done:
            seconds = None if timeout is None else own_limit(timeout)
            self.world.wait(self.rank, self, seconds)
        if self.tensor is not None:
            self.settle()
        return True

    def settle(self) -> None:
        """Give the tensor back to the program, with what has arrived in it.

        Raises MisuseError if the program has changed it since it was sent.
        """
        if self.tensor is None:
            return
        self.rank.unwaited.discard(self)
        before, self.snapshot = self.snapshot, None
        if before is not None and snapshot(self.pointer, self.nbytes) != before:
            self.world.raise_in(self.rank, tensor_changed(self.call()))
        if self.data is not None and self.kind == "recv":
            memory(self.nbytes).from_address(self.pointer).raw = self.data
            self.data = None
        if self.future is None:
            self.tensor = None

    def result(self) -> list[torch.Tensor]:
        return [] if self.tensor is None else [self.tensor]

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank

    def start(self, now: float) -> None:
        """Start the message, now that it has its first links."""
        self.started = now
        self.data = (
            self.snapshot
            if self.nbytes <= WHOLE or not self.pointer
            else memory(self.nbytes).from_address(self.pointer).raw
        )

    def arrive(self) -> None:
        """End the message: free its links, and give the bytes to a receive that is posted."""
        links = self.world.links
        if self.hops and not links.latency_overlaps:
            links.free(self.hops[-1])
        self.rank.in_flight -= 1
        if self.receive is not None:
            self.deliver(self.receive)
        self.end()

    def deliver(self, receive: MessageWork) -> None:
        """Give the bytes to the receive and record the message, both sides in one row.

        They are in the receiver's tensor once it waits for them,
        as on gloo: a program that forgets the wait() must not get them.
        """
        receive.data, self.data = self.data, None
        world = self.world
        row = (  # in this order: see events_of
            self.rank.number,
            self.peer,
            self.tag,
            self.nbytes,
            self.started,
            world.now,
            self.event_group,
            self.seq,
            self.shape,
            self.dtype,
            self.payload,
            self.where,
            self.posted,
            receive.where,
            receive.posted,
        )
        world.events.append(row)
        if receive.future is not None:
            receive.settle()
        receive.end()

    def end(self) -> None:
        """Note that this side is done."""
        self.done = True
        if self.future is not None:
            self.finish()
        elif self.rank.waiting is self:
            self.world.wake(self.rank)
        else:
            self.rank.unwaited.add(self)
        if self.on_end is not None:
            # it refers to the operation in the queue, whose tensors would else live on in a circle
            on_end, self.on_end = self.on_end, None
            on_end()

    # ---- what is said of it ----

    def call(self) -> Call:
        group, me = self.group, self.rank.number
        peers = tuple(r for r in group.ranks if r != me) if self.peer is None else (self.peer,)
        call = Call(me, self.kind, peers, group.label, 0, self.where, self.tag, self.nbytes)
        return call._replace(shape=self.shape, dtype=self.dtype, within=self.within)

    own_call = property(call)  # as a collective's work has it

    def missing(self) -> set[int]:
        return set(self.call().peers)

    def row(self, seq: int) -> EventRow:
        """Return the event of a message that a failed run has not ended, as if it ended now."""
        posted, call = self.posted, self.call()._replace(seq=seq)
        return tuple(call.event(self.event_group, posted, posted, self.world.now))


# ── Matching sends with receives: by channel, in the order in which they were posted
#    A channel is a group, a sender, a receiver and a tag. Under NCCL's rules it is a communicator,
#    a sender and a receiver.

# by (tag * size + src) * size + dst: the number of matched messages, then the unmatched sends or
# receives. (mirrored_group.py has longer keys.)
Channels = dict[Any, list]


class UnmatchedMessages:
    """The sends and receives of a run that have not been matched yet.

    They are in the order in which they were posted.
    """

    def __init__(self, eager: float) -> None:
        self.eager = eager or -1  # a send of up to so many bytes doesn't wait for its receive
        self.number = 0  # of the send or receive that was posted last
        self.channels: dict[str, Channels] = defaultdict(lambda: defaultdict(lambda: [0]))

    def numbered(self) -> dict[MessageWork, int]:
        """Return these sends and receives, each with its number on its channel."""
        channels = (channel for group in self.channels.values() for channel in group.values())
        return {
            work: number
            for count, *works in channels
            for number, work in enumerate(works, start=count + 1)
        }

    def unwaited(self) -> list[MessageWork]:
        """Return the sends and receives for which nobody has waited."""
        return [w for w in self.numbered() if w.tensor is not None and w.future is None]

    def meet(self, work: MessageWork, channel: list) -> None:
        """Match a send or a receive with its other side, if that is on the channel.

        If it isn't, put it there. A message that can start asks for its links.
        """
        is_send = work.kind == "send"
        if len(channel) == 1 or channel[1].kind == work.kind:
            channel.append(work)
            if not is_send or work.nbytes > self.eager:
                return
            send, work.met = work, True
        else:
            other = channel.pop(1)
            send, receive = (work, other) if is_send else (other, work)
            if receive is other and other.peer is None:
                for one in other.channels:
                    if one is not channel:
                        one.remove(other)
            self.match(send, channel, receive)
            send.met = receive.met = True
            if send.done:  # an eager message that has arrived already
                send.deliver(receive)
                return
            if not is_send and send.nbytes <= self.eager:
                return  # it has started already
        world = send.world
        request = (world.now, send.order, send.rank.number, send.number, send, 0, -1)
        world.links.requests.append(request)

    def match(self, send: MessageWork, channel: list, receive: MessageWork) -> None:
        """Note that a send and a receive are one message. Raises MisuseError if they differ."""
        fit = send.nbytes == receive.nbytes and send.dtype == receive.dtype
        if fit and not (send.pointer and receive.pointer) and send.pointer != receive.pointer:
            meta, other = (receive, send) if send.pointer else (send, receive)
            problem = (
                f"{meta.call().brief} has a tensor on the meta device, which has no numbers, and "
                f"{other.call().brief} has one with numbers. {ON_META}"
            )
            send.world.raise_in(receive.rank, MisuseError(problem, receive.rank.number))
        fit = fit and (
            send.shape == receive.shape or long_dims(send.shape) == long_dims(receive.shape)
        )
        if not fit or (send.within != receive.within and send.within and receive.within):
            # if the ranks' calls of a collective differ, that is the cause
            error = send.world.call_checker.error() or MisuseError(
                f"{disagreement(send.call(), receive.call())}", receive.rank.number
            )
            send.world.raise_in(receive.rank, error)
        self.matched(send, channel, receive)

    def matched(self, send: MessageWork, channel: list, receive: MessageWork) -> None:
        send.seq = channel[0] = channel[0] + 1
        send.receive = receive
        receive.source = send.group.position


class PointToPointGroup(torch_private.PythonGroup):
    """The half of a process group that sends and receives.

    `member` is the rank whose view of the group it is.
    """

    takes_meta = True

    # `shared` is a SharedState; group.py imports this file
    def __init__(self, shared: Any, member: VirtualRank, label: str, ranks: list[int]):
        super().__init__(ranks.index(member.number), len(ranks))  # type: ignore[call-arg]
        self.world: World = shared.world
        self.unmatched: UnmatchedMessages = shared.unmatched
        self.channels: Channels = self.unmatched.channels[label]
        self.member = member
        self.label = label
        self.ranks = ranks
        self.position = ranks.index(member.number)
        self.count = len(ranks)
        self.payload_bytes: int = shared.payload_bytes
        # The collective of the last message and what follows from it, as most collectives post many
        # messages. Not computed before the first message, because torch may set the group's
        # description later.
        self.collective: object = NO_MESSAGE_YET
        self.within: tuple[str, tuple[int, ...]] | None
        self.event_group: EventGroup

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> SimWork:
        """Post a send to position `dst` of the group."""
        if not 0 <= dst < self.count:
            rank_at(self.member.number, "send", dst, self.ranks)
        world, rank, tensor, peer = self.world, self.member, tensors[0], self.ranks[dst]
        work = MessageWork(self, "send", tensor, peer, tag, where_from(sys._getframe(1)))
        nbytes, pointer = work.nbytes, work.pointer
        if pointer:
            work.snapshot = snapshot(pointer, nbytes)
        keeps_values = nbytes <= self.payload_bytes and not tensor.is_meta
        work.payload = values([tensor]) if keeps_values else None
        work.latency, bandwidth, work.hops = world.route(rank.number, peer)
        work.duration = work.latency + nbytes / bandwidth
        work.order = rank.send_order = rank.send_order + 1 if rank.in_flight else 0
        rank.in_flight += 1
        return self.post(work, rank.number, peer)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> SimWork:
        """Post a receive from position `src` of the group."""
        if not 0 <= src < self.count:
            rank_at(self.member.number, "recv", src, self.ranks)
        peer = self.ranks[src]
        work = MessageWork(self, "recv", tensors[0], peer, tag, where_from(sys._getframe(1)))
        return self.post(work, peer, self.member.number)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> SimWork:
        """Post a receive from any rank: it gets the message that was sent first."""
        work = MessageWork(self, "recv", tensors[0], None, tag, where_from(sys._getframe(1)))
        size, me = self.world.size, self.member.number
        work.channels = [self.channels[(tag * size + src) * size + me] for src in self.ranks]
        sent = [c for c in work.channels if len(c) > 1 and c[1].kind == "send"]
        if sent:
            self.unmatched.meet(work, min(sent, key=lambda channel: channel[1].number))
        else:
            for channel in work.channels:
                channel.append(work)
        return work

    def post(self, work: MessageWork, src: int, dst: int) -> SimWork:
        """Let a send or a receive meet its other side."""
        size = self.world.size
        self.unmatched.meet(work, self.channels[(work.tag * size + src) * size + dst])
        return work

    def set_collective(self, collective: Collective | None) -> None:
        self.collective = collective
        self.within = operation_on_ranks(collective)
        self.event_group = event_group(
            self.label, self.ranks, torch_private.mesh_axis(self), collective
        )


def check_sendable(tensor: torch.Tensor, kind: str, rank: VirtualRank, where: str) -> None:
    """Raise MisuseError for a tensor that virtual ranks can't send or receive."""
    if tensor.is_meta and tensor.is_contiguous():  # most of those that come here
        return
    if problem := on_a_device(tensor, kind) or unfit(tensor, kind):
        refuse(problem, rank, where)


def on_a_device(tensor: torch.Tensor, kind: str) -> str | None:
    if tensor.is_cpu or tensor.is_meta:
        return None
    return (
        f"a tensor on {tensor.device} to {kind}, but virtual ranks have only the CPU: leave out "
        "the device, or use backend='nccl'"
    )


ON_META = (
    "Ranks that were launched with a device make tensors on meta. For numbers that the program "
    'reads, make them on all of these ranks with device="cpu"'
)


def refuse(problem: str, rank: VirtualRank, where: str) -> NoReturn:
    """Raise the MisuseError for a tensor that a rank cannot send or receive."""
    error = MisuseError(f"rank {rank.number} passes {problem}. At {where}", rank.number)
    rank.world.raise_in(rank, error)
