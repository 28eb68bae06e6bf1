"""Messages on the sim: a send and a receive find each other, the links carry the bytes, and both works are done.

    send posted ─┐
                 ├─▶ matched ─▶ asks for its links ─▶ starts ─▶ ends: the receiver has the bytes, both events are written
    recv posted ─┘

The bytes leave the sender's tensor when the send is posted, and enter the receiver's when the message ends, not before. That the
sender's tensor keeps them until its wait is checked. A run has millions of messages: what each of them passes through, here and in
sim_mailbox, is written out without a call more than it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import Array, c_char
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from parallel101.record.calls import Call, disagreement, member_at, terms_within
from parallel101.record.errors import MisuseError
from parallel101.record.events import EventGroup, Row
from parallel101.record.recorder import waited_twice
from parallel101.record.signatures import unfit
from parallel101.record.spans import Collective, current_collective
from parallel101.record.where import where as where_from
from parallel101.sim.clock import Rank, World
from parallel101.sim.work import SimWork

WHOLE = 1 << 20  #  bytes up to which a sent tensor is kept and compared whole; of a larger one
SAMPLES, SAMPLE = 64, 64  #  so many samples of so many bytes
NONE_YET = object()

_shapes: dict[Any, tuple[int, ...]] = {}  #  one plain tuple for all equal shapes, one string a dtype: a run holds millions of events
_dtypes: dict[torch.dtype, str] = {}


def plain_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return _shapes.get(shape) or _shapes.setdefault(shape, tuple(shape))


def dtype_name(dtype: torch.dtype) -> str:
    return _dtypes.get(dtype) or _dtypes.setdefault(dtype, str(dtype).removeprefix("torch."))


@lru_cache(maxsize=1024)
def block(nbytes: int) -> type[Array[c_char]]:
    """So many bytes of memory: `block(n).from_address(pointer).raw` is to be read and written. (Twice as fast as string_at and memmove.)"""
    return c_char * nbytes


def contents(pointer: int, nbytes: int) -> bytes:
    """What the memory holds, whole or in samples: to see later whether it changed."""
    if nbytes <= WHOLE:
        return block(nbytes).from_address(pointer).raw
    step = (nbytes - SAMPLE) // (SAMPLES - 1)
    return b"".join(block(SAMPLE).from_address(pointer + i * step).raw for i in range(SAMPLES))


class MessageWork(SimWork):
    """One side of a message. `peer` is a rank of the world; None: anyone of the group."""

    __slots__ = (
        *("collective", "dtype", "done", "event_group", "future", "group", "nbytes", "number", "peer", "pointer", "posted", "rank"),
        *("shape", "tag", "tensor", "__weakref__", "waited", "where", "world"),
    )
    kind = ""
    group: Messenger
    tensor: torch.Tensor | None  #  None: it is the caller's alone again
    peer: int | None
    tag: int
    where: str
    posted: float
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    pointer: int
    number: int  #  of all that is posted in the run
    collective: Collective | None  # of parallel101's own, which it belongs to
    event_group: EventGroup
    waited: bool  #  gloo lets a program wait for a message once

    def wait(self, timeout: object = None) -> bool:
        if self.waited and self.future is None:
            error = waited_twice(self.rank.number, self.kind)
            self.world.fail(error, self.rank)
            raise error
        self.waited = True
        if not self.done:
            self.world.wait(self.rank, self)
        return True

    def result(self) -> list[torch.Tensor]:
        return [] if self.tensor is None else [self.tensor]

    def call(self) -> Call:
        group, me = self.group, self.rank.number
        peers = tuple(r for r in group.ranks if r != me) if self.peer is None else (self.peer,)
        shape, dtype = plain_shape(self.shape), dtype_name(self.dtype)
        return Call(
            rank=me, kind=self.kind, peers=peers, tag=self.tag, group=group.label, seq=0, nbytes=self.nbytes, shape=shape, dtype=dtype,
            op=None, root=None, where=self.where, within=terms_within(self.collective),
        )  # fmt: skip

    def missing(self) -> set[int]:
        return set(self.call().peers)

    def row(self, seq: int) -> Row:
        """Its event, if it ended now."""
        posted, now = self.posted, self.world.now
        return tuple(self.call().event(self.event_group, peer=self.peer, posted=posted, start=posted, end=now, seq=seq))


class RecvWork(MessageWork):
    """A receive. `source`: who sent it, as a position in the group."""

    __slots__ = ("source",)
    kind = "recv"
    source: int

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


class SendWork(MessageWork):
    """A send, and the message itself on its way through the links."""

    __slots__ = ("data", "duration", "ended", "order", "payload", "receive", "seen", "seq", "stages", "started")
    kind = "send"
    receive: RecvWork | None
    stages: tuple[tuple[int, ...], ...]
    duration: float
    order: int  #  among what its sender has under way
    seq: int  #  among what was sent on this channel
    started: float
    ended: bool
    seen: bytes | None  #  what the tensor held when it was sent, whole or in samples; None: the sender may change it
    data: bytes | None  #  what is on its way
    payload: list | None

    def wait(self, timeout: object = None) -> bool:
        MessageWork.wait(self)
        if self.tensor is not None:
            self.let_go()
        return True

    def is_completed(self) -> bool:
        done = SimWork.is_completed(self)
        if done and self.tensor is not None:
            self.let_go()
        return done

    def let_go(self) -> None:
        """From now on the sender may write to its tensor. Did it so before?"""
        seen, self.seen = self.seen, None
        if seen is not None and contents(self.pointer, self.nbytes) != seen:
            raise self.misused()
        if self.future is None:
            self.tensor = None

    def misused(self) -> MisuseError:
        me = self.rank
        error = MisuseError(
            f"rank {me.number} changed a tensor that was still being sent: {self.call().brief} to rank {self.peer} was changed before "
            "its wait(). Wait for the send first, or send a clone.",
            me.number,
        )
        self.world.fail(error, me)
        return error

    def start(self, now: float) -> None:
        """The links are there: the bytes leave."""
        self.started = now
        self.data = self.seen if self.nbytes <= WHOLE else block(self.nbytes).from_address(self.pointer).raw

    def happen(self) -> None:
        """The message is through: the links are free, and the receiver has it if it has asked for it."""
        if self.stages:
            self.world.links.free(self.stages[-1])
        rank = self.rank
        rank.sending -= 1
        self.ended = True
        if self.receive is not None:
            self.deliver(self.receive)
        self.done = True
        if self.future is not None:
            self.finish()
        elif rank.waiting is self:
            self.world.wake(rank)

    def deliver(self, receive: RecvWork) -> None:
        """The bytes enter the receiver's tensor; the message is written down, both sides in one row (see record/events.py)."""
        block(self.nbytes).from_address(receive.pointer).raw = self.data  # type: ignore[assignment]
        self.data = None
        world = self.world
        shape, dtype = _shapes.get(self.shape) or plain_shape(self.shape), _dtypes.get(self.dtype) or dtype_name(self.dtype)
        world.events.append((  # the fields of a MessageRow
            self.rank.number, self.peer, self.tag, self.nbytes, self.started, world.now, self.event_group, self.seq, shape, dtype,
            self.payload, self.where, self.posted, receive.where, receive.posted,
        ))  # fmt: skip
        receive.done = True
        if receive.future is not None:
            receive.finish()
            return
        receive.tensor = None
        if receive.rank.waiting is receive:
            world.wake(receive.rank)


# ── Where the sim's sends and receives find each other: by group, sender, receiver and tag, in the order in which they were posted.


class Mailbox:
    """Sends and receives that have not found each other yet, in the order in which they were posted."""

    def __init__(self) -> None:
        self.number = 0  #  of what was posted last
        #  by group, then by (tag * size + src) * size + dst of the world: how many matched, then who waits (all send or all receive)
        self.channels: dict[str, dict[int, list]] = {}
        self.from_anyone: dict[tuple, list[RecvWork]] = {}  #  by (group, dst, tag)

    def unfinished(self) -> list[Row]:
        """What has not found its other side, as events that end now."""
        channels = [channel for group in self.channels.values() for channel in group.values()]
        rows = [work.row(channel[0] + i) for channel in channels for i, work in enumerate(channel[1:], start=1)]
        return rows + [work.row(i) for works in self.from_anyone.values() for i, work in enumerate(works, start=1)]

    def matches(self, send: SendWork, channel: list, receive: RecvWork) -> None:
        """A send and a receive belong together: they must agree."""
        fit = send.nbytes == receive.nbytes and send.dtype == receive.dtype and send.shape == receive.shape
        if (
            not fit
            or send.event_group is not receive.event_group
            or (send.collective and receive.collective and send.collective.operation != receive.collective.operation)
        ):
            self.check(send, receive)
        send.seq = channel[0] = channel[0] + 1
        send.receive = receive
        receive.source = send.group.position

    def check(self, send: SendWork, receive: RecvWork) -> None:
        """End the run if a send and a receive do not agree. If their collectives do not either, that is the reason to give."""
        if problem := disagreement(send.call(), receive.call()):
            error = send.world.referee.verdict() or MisuseError(problem, receive.rank.number)
            send.world.fail(error, receive.rank)
            raise error


class Messenger(dist.ProcessGroup):
    """The half of a process group that sends and receives. `member` is the rank whose view of the group it is."""

    def __init__(self, world: World, mailbox: Mailbox, member: Rank, label: str, ranks: list[int], payload_bytes: int):
        super().__init__(ranks.index(member.number), len(ranks))  # type: ignore[call-arg]
        self.world = world
        self.mailbox = mailbox
        self.channels = mailbox.channels.setdefault(label, {})
        self.member = member
        self.label = label
        self.ranks = ranks
        self.position = ranks.index(member.number)
        self.count = len(ranks)
        self.payload_bytes = payload_bytes
        self.eager = world.network.eager or -1
        self.collective: object = NONE_YET  # the one that posted last here, and the group of its events: most post many messages
        self.event_group: EventGroup

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> SendWork:
        """Post a send to the position `dst` of the group."""
        if not 0 <= dst < self.count:
            member_at(self.member.number, "send", dst, self.ranks)
        world, rank, tensor, mailbox = self.world, self.member, tensors[0], self.mailbox
        if rank.clock > world.now or world.failure is not None:
            world.enter(rank)
        work = SendWork()
        work.world = world
        work.rank = rank
        work.future = None
        work.done = work.ended = work.waited = False
        work.where = where_from(sys._getframe(1))
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
            refuse(tensor, "send", rank, work.where)
        work.group = self
        work.tensor = tensor
        work.peer = peer = self.ranks[dst]
        work.tag = tag
        collective = current_collective()
        if collective is not self.collective:
            self.collective = collective
            self.event_group = world.event_groups.of(self.label, self.ranks, self.group_desc, collective)
        work.collective = collective
        work.event_group = self.event_group
        work.posted = now = world.now
        work.nbytes = nbytes = tensor.nbytes
        work.shape = tensor.shape
        work.dtype = tensor.dtype
        work.pointer = pointer = tensor.data_ptr()
        work.seen = block(nbytes).from_address(pointer).raw if nbytes <= WHOLE else contents(pointer, nbytes)
        work.payload = tensor.detach().reshape(-1).tolist() if nbytes <= self.payload_bytes else None
        work.receive = None
        latency, bandwidth, work.stages = world.route(rank.number, peer)
        work.duration = latency + nbytes / bandwidth
        work.order = rank.order = rank.order + 1 if rank.sending else 0
        rank.sending += 1
        mailbox.number = work.number = mailbox.number + 1
        key = (tag * world.size + rank.number) * world.size + peer
        channel = self.channels.get(key)
        if channel is None:
            channel = self.channels[key] = [0]
        receive = channel[1] if len(channel) > 1 and channel[1].kind == "recv" else None
        anyone = mailbox.from_anyone.get((self.label, peer, tag)) if mailbox.from_anyone else None
        if anyone and (receive is None or anyone[0].number < receive.number):  #  the receive that was posted first gets it
            mailbox.matches(work, channel, anyone.pop(0))
        elif receive is not None:
            mailbox.matches(work, channel, channel.pop(1))
        else:
            channel.append(work)
            if nbytes > self.eager:
                return work
        world.links.ask(now, work.order, rank.number, work.number, work)
        return work

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> RecvWork:
        """Post a receive from the position `src` of the group."""
        if not 0 <= src < self.count:
            member_at(self.member.number, "recv", src, self.ranks)
        return self._receive(tensors[0], self.ranks[src], tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> RecvWork:
        """Post a receive from whoever sends first."""
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> RecvWork:
        world, rank, mailbox = self.world, self.member, self.mailbox
        if rank.clock > world.now or world.failure is not None:
            world.enter(rank)
        work = RecvWork()
        work.world = world
        work.rank = rank
        work.future = None
        work.done = work.waited = False
        work.where = where_from(sys._getframe(2))
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():  #  a complex one comes as pairs of real numbers
            refuse(tensor, "recv", rank, work.where)
        work.group = self
        work.tensor = tensor
        work.peer = peer
        work.tag = tag
        collective = current_collective()
        if collective is not self.collective:
            self.collective = collective
            self.event_group = world.event_groups.of(self.label, self.ranks, self.group_desc, collective)
        work.collective = collective
        work.event_group = self.event_group
        work.posted = now = world.now
        work.nbytes = tensor.nbytes
        work.shape = tensor.shape
        work.dtype = tensor.dtype
        work.pointer = tensor.data_ptr()
        mailbox.number = work.number = mailbox.number + 1
        if peer is None:
            channel = self._oldest(tag)
            if channel is None:
                mailbox.from_anyone.setdefault((self.label, rank.number, tag), []).append(work)
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
        mailbox.matches(send, channel, work)
        if send.ended:  #  it went ahead, and is here
            send.deliver(work)
        elif send.nbytes > self.eager:
            world.links.ask(now, send.order, send.rank.number, send.number, send)
        return work

    def _oldest(self, tag: int) -> list | None:
        """The channel with the send to this rank that was posted first, whoever it comes from."""
        size = self.world.size
        channels = (self.channels.get((tag * size + src) * size + self.member.number) for src in self.ranks)
        waiting = [channel for channel in channels if channel is not None and len(channel) > 1 and channel[1].kind == "send"]
        return min(waiting, key=lambda channel: channel[1].number, default=None)


def refuse(tensor: torch.Tensor, kind: str, rank: Rank, where: str) -> None:
    """Say what is wrong with a tensor that must not be sent or received."""
    if tensor.is_cpu:
        problem = unfit(tensor, kind)
    else:
        problem = f"a tensor on {tensor.device} to {kind}; virtual ranks have the CPU only: leave out the device, or take backend='nccl'"
    error = MisuseError(f"rank {rank.number} passes {problem}. At {where}", rank.number)
    rank.world.fail(error, rank)
    raise error
