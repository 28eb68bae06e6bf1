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
from ctypes import Array, c_char
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from types import FunctionType
from typing import Any

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
from parallel101.laboratory.record.events import EventGroup, EventRow
from parallel101.laboratory.record.program_lines import where as where_from
from parallel101.laboratory.record.signatures import own_limit, unfit
from parallel101.laboratory.sim.async_work import SimFuture, SimWork
from parallel101.laboratory.sim.clock import VirtualRank, World
from parallel101.spans import Collective, current_collective

# a sent tensor of up to this many bytes is copied and compared as a whole; of a larger one only
WHOLE = 1 << 20
SAMPLES, SAMPLE = 64, 64  # this many samples, of this many bytes each
NO_MESSAGE_YET = object()

# a run records millions of events: equal shapes share one plain tuple, equal dtypes one string
_shapes: dict[Any, tuple[int, ...]] = {}
_dtypes: dict[torch.dtype, str] = {}


@lru_cache(maxsize=1024)
def memory(nbytes: int) -> type[Array[c_char]]:
    """Return the type whose `from_address(pointer).raw` reads and writes `nbytes` of memory.

    It is twice as fast as string_at and memmove.
    """
    return c_char * nbytes


def snapshot(pointer: int, nbytes: int) -> bytes:
    """Copy the bytes at a place in memory, so that a later change can be noticed.

    If there are more than WHOLE bytes, only samples are copied.
    """
    if nbytes <= WHOLE:
        return memory(nbytes).from_address(pointer).raw
    step = (nbytes - SAMPLE) // (SAMPLES - 1)
    return b"".join(memory(SAMPLE).from_address(pointer + i * step).raw for i in range(SAMPLES))


# ── The two sides of a message

attributes_in_slots = dataclass(init=False, repr=False, eq=False, slots=True)


@attributes_in_slots
class MessageWork(SimWork):
    """One side of a message. `peer` is a rank of the world; None: any rank of the group."""

    kind = ""
    world: World
    rank: VirtualRank
    done: bool
    future: SimFuture | None
    group: PointToPointGroup
    tensor: torch.Tensor | None  # None once only the caller may still use it
    peer: int | None
    tag: int
    where: str
    posted: float
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    pointer: int
    number: int  # counts all sends and receives of the run, in the order in which they were posted
    # the collective of parallel101 that the message belongs to: operation and ranks
    within: tuple[str, tuple[int, ...]] | None
    event_group: EventGroup
    waited: bool  # on gloo, a program may wait for a message only once

    def __init__(
        self,
        group: PointToPointGroup,
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
            check_sendable(tensor, self.kind, rank, where)
            self.pointer = 0  # on the meta device
        else:
            self.pointer = tensor.data_ptr()
        collective = current_collective()
        if collective is not group.collective:
            group.set_collective(collective)
        self.future = None
        self.done = self.waited = False
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
            error = waited_twice(self.rank.number, self.kind)
            self.world.fail(error, self.rank)
            raise error
        self.waited = True
        if not self.done:
            self.world.wait(self.rank, self, own_limit(timeout))
        if self.tensor is not None:
            self.settle()
        return True

    def result(self) -> list[torch.Tensor]:
        return [] if self.tensor is None else [self.tensor]

    def call(self) -> Call:
        group, me = self.group, self.rank.number
        peers = tuple(r for r in group.ranks if r != me) if self.peer is None else (self.peer,)
        return Call(
            rank=me,
            kind=self.kind,
            peers=peers,
            tag=self.tag,
            group=group.label,
            seq=0,
            nbytes=self.nbytes,
            shape=self.shape,
            dtype=self.dtype,
            where=self.where,
            within=self.within,
        )

    def missing(self) -> set[int]:
        return set(self.call().peers)

    def row(self, seq: int) -> EventRow:
        """Return the event of a message that a failed run has not ended, as if it ended now."""
        posted, now = self.posted, self.world.now
        return tuple(
            self.call().event(
                self.event_group, peer=self.peer, posted=posted, start=posted, end=now, seq=seq
            )
        )


def with_own_code(kind: type) -> type:
    """Give a class its own copies of the methods that every message passes through.

    CPython makes an attribute access fast for one class in each piece of code. Sends and receives
    alternate, so code that both shared would be slow.
    """
    for name in ("__init__", "wait"):
        method = getattr(MessageWork, name)
        code = method.__code__.replace()
        setattr(kind, name, FunctionType(code, method.__globals__, name, method.__defaults__))
    return kind


@with_own_code
@attributes_in_slots
class RecvWork(MessageWork):
    """A receive. `source` is the sender's position in the group."""

    kind = "recv"
    source: int
    # what has arrived and is not in the tensor yet, because the rank has not waited for it
    data: bytes | None

    def settle(self) -> None:
        """Copy what has arrived into the tensor."""
        if self.tensor is None:
            return
        data, self.data = self.data, None
        if data is not None:
            memory(self.nbytes).from_address(self.pointer).raw = data
        self.rank.unwaited.discard(self)
        if self.future is None:
            self.tensor = None

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


@with_own_code
@attributes_in_slots
class SendWork(MessageWork):
    """A send, and the message itself while it is in flight."""

    kind = "send"
    receive: RecvWork | None
    hops: tuple[tuple[int, ...], ...]
    duration: float  # with its latency
    latency: float
    order: int  # its number among the messages that its sender has in flight
    seq: int  # its number among the messages on its channel: see UnmatchedMessages
    started: float
    # the tensor's bytes when it was sent, all or samples; None: the sender may change it now
    snapshot: bytes | None
    data: bytes | None  # the bytes in flight
    payload: list | None

    def settle(self) -> None:
        """Let the sender change its tensor from now on.

        Raises MisuseError if it has changed it before.
        """
        if self.tensor is None:
            return
        self.rank.unwaited.discard(self)
        before, self.snapshot = self.snapshot, None
        if before is not None and snapshot(self.pointer, self.nbytes) != before:
            raise self.changed()
        if self.future is None:
            self.tensor = None

    def changed(self) -> MisuseError:
        error = tensor_changed(self.call())
        self.world.fail(error, self.rank)
        return error

    def start(self, now: float) -> None:
        """Start the message, now that it has its first links."""
        self.started = now
        self.data = (
            self.snapshot
            if self.nbytes <= WHOLE or not self.pointer
            else memory(self.nbytes).from_address(self.pointer).raw
        )

    def fire(self) -> None:
        """End the message: free its links, and give the bytes to a receive that is posted."""
        links, rank = self.world.links, self.rank
        if self.hops and not links.latency_overlaps:
            links.free(self.hops[-1])
        rank.in_flight -= 1
        if self.receive is not None:
            self.deliver(self.receive)
        self.done = True
        if self.future is not None:
            self.finish()
        elif rank.waiting is self:
            self.world.wake(rank)
        else:
            rank.unwaited.add(self)

    def deliver(self, receive: RecvWork) -> None:
        """Give the bytes to the receive and record the message, both sides in one row.

        See record/events.py for the row. They are in the receiver's tensor once it waits for them,
        as on gloo: a program that forgets the wait() must not get them.
        """
        receive.data, self.data = self.data, None
        world = self.world
        row = (  # the fields of a MessageRow
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
        receive.done = True
        if receive.future is not None:
            receive.settle()
            receive.finish()
        elif receive.rank.waiting is receive:
            world.wake(receive.rank)
        else:
            receive.rank.unwaited.add(receive)


# ── Matching sends with receives: by channel, in the order in which they were posted
#    A channel is a group, a sender, a receiver and a tag.


class UnmatchedMessages:
    """The sends and receives of a run that have not been matched yet.

    They are in the order in which they were posted.
    """

    def __init__(self) -> None:
        self.number = 0  # of the send or receive that was posted last
        # by group, then by (tag * size + src) * size + dst: the number of matched messages, then
        # the unmatched sends or receives
        self.channels: dict[str, dict[int, list]] = {}
        self.from_anyone: dict[tuple, list[RecvWork]] = {}  # by (group, dst, tag)

    def numbered(self) -> list[tuple[int, MessageWork]]:
        """Return these sends and receives, each with its number on its channel."""
        channels = [channel for group in self.channels.values() for channel in group.values()]
        channels += [[0, *works] for works in self.from_anyone.values()]
        return [pair for count, *works in channels for pair in enumerate(works, start=count + 1)]

    def unwaited(self) -> list[MessageWork]:
        """Return the sends and receives for which nobody has waited."""
        return [w for _, w in self.numbered() if w.tensor is not None and w.future is None]

    def match(self, send: SendWork, channel: list, receive: RecvWork) -> None:
        """Match a send with its receive. Raises MisuseError if they do not agree."""
        fit = send.nbytes == receive.nbytes and send.dtype == receive.dtype
        if fit and not (send.pointer and receive.pointer) and send.pointer != receive.pointer:
            error = one_on_meta(send, receive)
            send.world.fail(error, receive.rank)
            raise error
        fit = fit and (
            send.shape == receive.shape or long_dims(send.shape) == long_dims(receive.shape)
        )
        if not fit or (send.within != receive.within and send.within and receive.within):
            # if the ranks' calls of a collective differ, that is the cause
            error = send.world.call_checker.error() or MisuseError(
                f"{disagreement(send.call(), receive.call())}", receive.rank.number
            )
            send.world.fail(error, receive.rank)
            raise error
        send.seq = channel[0] = channel[0] + 1
        send.receive = receive
        receive.source = send.group.position


class PointToPointGroup(torch_private.PythonGroup):
    """The half of a process group that sends and receives.

    `member` is the rank whose view of the group it is.
    """

    takes_meta = True
    make_send: type[SendWork] = SendWork

    def __init__(
        self,
        world: World,
        unmatched: UnmatchedMessages,
        member: VirtualRank,
        label: str,
        ranks: list[int],
        payload_bytes: int,
    ):
        super().__init__(ranks.index(member.number), len(ranks))  # type: ignore[call-arg]
        self.world = world
        self.unmatched = unmatched
        self.channels = unmatched.channels.setdefault(label, {})
        self.member = member
        self.label = label
        self.ranks = ranks
        self.position = ranks.index(member.number)
        self.count = len(ranks)
        self.payload_bytes = payload_bytes
        self.eager = world.network.eager or -1
        # The collective of the last message and what follows from it, as most collectives post many
        # messages. Not computed before the first message, because torch may set the group's
        # description later.
        self.collective: object = NO_MESSAGE_YET
        self.within: tuple[str, tuple[int, ...]] | None
        self.event_group: EventGroup

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> SendWork:
        """Post a send to position `dst` of the group."""
        if not 0 <= dst < self.count:
            rank_at(self.member.number, "send", dst, self.ranks)
        world, rank, tensor, unmatched = self.world, self.member, tensors[0], self.unmatched
        peer = self.ranks[dst]
        work = self.make_send(self, tensor, peer, tag, where_from(sys._getframe(1)))
        now, nbytes, pointer = work.posted, work.nbytes, work.pointer
        work.snapshot = snapshot(pointer, nbytes) if pointer else None
        work.payload = (
            tensor.detach().reshape(-1).tolist()
            if nbytes <= self.payload_bytes and not tensor.is_meta
            else None
        )
        work.receive = None
        work.latency, bandwidth, work.hops = world.route(rank.number, peer)
        work.duration = work.latency + nbytes / bandwidth
        work.order = rank.send_order = rank.send_order + 1 if rank.in_flight else 0
        rank.in_flight += 1
        key = (tag * world.size + rank.number) * world.size + peer
        channel = self.channels.get(key)
        if channel is None:
            channel = self.channels[key] = [0]
        receive = channel[1] if len(channel) > 1 and channel[1].kind == "recv" else None
        anyone = (
            unmatched.from_anyone.get((self.label, peer, tag)) if unmatched.from_anyone else None
        )
        # of two receives, the one that was posted first
        if anyone and (receive is None or anyone[0].number < receive.number):
            unmatched.match(work, channel, anyone.pop(0))
        elif receive is not None:
            unmatched.match(work, channel, channel.pop(1))
        else:
            channel.append(work)
            if nbytes > self.eager:
                return work
        world.links.request(now, work.order, rank.number, work.number, work)
        return work

    def set_collective(self, collective: Collective | None) -> None:
        self.collective = collective
        self.within = operation_on_ranks(collective)
        self.event_group = self.world.event_groups.of(
            self.label, self.ranks, torch_private.mesh_axis(self), collective
        )

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> RecvWork:
        """Post a receive from position `src` of the group."""
        if not 0 <= src < self.count:
            rank_at(self.member.number, "recv", src, self.ranks)
        return self._receive(tensors[0], self.ranks[src], tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> RecvWork:
        """Post a receive from any rank: it gets the message that was sent first."""
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> RecvWork:
        world, rank, unmatched = self.world, self.member, self.unmatched
        work = RecvWork(self, tensor, peer, tag, where_from(sys._getframe(2)))
        work.data = None
        if peer is None:
            channel = self._channel_of_oldest_send(tag)
            if channel is None:
                unmatched.from_anyone.setdefault((self.label, rank.number, tag), []).append(work)
                return work
        else:
            key = (tag * world.size + peer) * world.size + rank.number
            channel = self.channels.get(key)
            if channel is None:
                channel = self.channels[key] = [0]
            if len(channel) == 1 or channel[1].kind == "recv":
                channel.append(work)
                return work
        send = channel.pop(1)
        unmatched.match(send, channel, work)
        if send.done:  # an eager message that has arrived already
            send.deliver(work)
        elif send.nbytes > self.eager:
            world.links.request(work.posted, send.order, send.rank.number, send.number, send)
        return work

    def _channel_of_oldest_send(self, tag: int) -> list | None:
        """Return the channel with the unmatched send to this rank that was posted first.

        The send may be from any rank.
        """
        size = self.world.size
        channels = (
            self.channels.get((tag * size + src) * size + self.member.number) for src in self.ranks
        )
        waiting = [
            channel
            for channel in channels
            if channel is not None and len(channel) > 1 and channel[1].kind == "send"
        ]
        return min(waiting, key=lambda channel: channel[1].number, default=None)


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


def one_on_meta(send: SendWork, receive: RecvWork) -> MisuseError:
    """Return the error for a message with numbers on one side and the meta device on the other."""
    meta, other = (receive, send) if send.pointer else (send, receive)
    return MisuseError(
        f"{meta.call().brief} has a tensor on the meta device, which has no numbers, and "
        f"{other.call().brief} has one with numbers. {ON_META}",
        receive.rank.number,
    )


def refuse(problem: str, rank: VirtualRank, where: str) -> None:
    """Raise the MisuseError for a tensor that a rank cannot send or receive."""
    error = MisuseError(f"rank {rank.number} passes {problem}. At {where}", rank.number)
    rank.world.fail(error, rank)
    raise error
