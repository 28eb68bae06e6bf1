"""Messages on the sim: a send and a receive find each other, the links carry the bytes, and both works are done.

    send posted ─┐
                 ├─▶ matched ─▶ asks for its links ─▶ starts ─▶ ends: the receiver has the bytes, both events are written
    recv posted ─┘

The bytes leave the sender's tensor when the send is posted, and enter the receiver's when the message ends, not before. That the
sender's tensor keeps them until its wait is checked, as is that both sides agree.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallel101.backends.sim_clock import Rank, Unwound, World
from parallel101.backends.sim_futures import SimFuture, future_of
from parallel101.errors import MisuseError
from parallel101.trace.calls import Call, disagreement
from parallel101.trace.where import caller

if TYPE_CHECKING:
    from parallel101.backends.sim_group import SimGroup

WHOLE = 1 << 20  #  bytes up to which a sent tensor is kept and compared whole; of a larger one
SAMPLES, SAMPLE = 64, 64  #  so many samples of so many bytes

_copy_out = ctypes.string_at
_copy_in = ctypes.memmove
_shapes: dict[Any, tuple[int, ...]] = {}
_dtypes: dict[torch.dtype, str] = {}


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's shape as a plain tuple, one object for all that are alike: a run holds millions of events."""
    shape = tensor.shape
    known = _shapes.get(shape)
    if known is None:
        known = _shapes[shape] = tuple(shape)
    return known


def dtype_of(tensor: torch.Tensor) -> str:
    """The tensor's dtype by name: "float32"."""
    dtype = tensor.dtype
    known = _dtypes.get(dtype)
    if known is None:
        known = _dtypes[dtype] = str(dtype).removeprefix("torch.")
    return known


def values_of(tensor: torch.Tensor) -> list:
    """The tensor's values, flattened."""
    return tensor.detach().reshape(-1).tolist()


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor (or any view of the same memory) was written; 0 for an inference tensor, which does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


class Contents:
    """The bytes of a tensor when it was given away, to see whether it is still the same; whole when small, else in samples."""

    __slots__ = ("nbytes", "pointer", "seen", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, nbytes: int):
        self.tensor = tensor
        self.nbytes = nbytes
        self.pointer = tensor.data_ptr()
        self.version = version_of(tensor)
        self.seen = self.look()

    def look(self) -> bytes:
        if self.nbytes <= WHOLE:
            return _copy_out(self.pointer, self.nbytes)
        step = (self.nbytes - SAMPLE) // (SAMPLES - 1)
        return b"".join(_copy_out(self.pointer + i * step, SAMPLE) for i in range(SAMPLES))

    def changed(self) -> bool:
        """A view's version counts writes to all of its base, so where it moved the bytes decide."""
        version = version_of(self.tensor)
        if version == self.version:
            return False
        self.version = version
        return self.look() != self.seen


class SimWork(dist.Work):
    """What isend and irecv return: `wait` lets virtual time pass until the message has ended."""

    __slots__ = ("done", "future", "rank", "world")

    def __init__(self, world: World, rank: Rank):
        dist.Work.__init__(self)
        self.world = world
        self.rank = rank
        self.done = False
        self.future: SimFuture | None = None

    def wait(self, timeout: object = None) -> bool:
        """Block this rank until the work is done. A time limit in wall time has no meaning here."""
        if not self.done:
            rank, block = self.rank, self.world.block
            if self.world.failure is not None:
                raise Unwound
            rank.waiting = self
            while not self.done:
                block(rank)
            rank.waiting = None
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self.rank.waiting = self
            self.world.poll(self.rank)
            self.rank.waiting = None
        return self.done

    def is_success(self) -> bool:
        return self.done

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> SimFuture:
        return future_of(self)

    def result(self) -> list[torch.Tensor]:
        return []

    def finish(self) -> None:
        """It is done: whoever waits for it can go on."""
        self.done = True
        rank = self.rank
        if self.future is not None:
            rank.futures.append(self)
            self.world.wake(rank)
        elif rank.waiting is self:
            self.world.wake(rank)

    def settle(self) -> None:
        """Tell the future, on the rank's own thread."""
        if self.future is not None:
            self.future.set_result(self.result())

    def call(self) -> Call:
        raise NotImplementedError

    def missing(self) -> set[int]:
        raise NotImplementedError


class MessageWork(SimWork):
    """One side of a message."""

    __slots__ = ("dtype", "group", "nbytes", "peer", "posted", "shape", "tag", "tensor", "where")
    kind = ""

    def __init__(self, group: SimGroup, tensor: torch.Tensor, peer: int | None, tag: int, where: str):
        SimWork.__init__(self, group.world, group.member)
        self.group = group
        self.tensor = tensor
        self.peer = peer  #  rank of the world
        self.tag = tag
        self.where = where
        self.nbytes = tensor.nbytes
        self.shape = shape_of(tensor)
        self.dtype = dtype_of(tensor)
        self.posted = self.world.now

    def result(self) -> list[torch.Tensor]:
        return [self.tensor]

    def call(self) -> Call:
        group, me = self.group, self.rank.number
        peers = tuple(r for r in group.ranks if r != me) if self.peer is None else (self.peer,)
        return Call(me, self.kind, peers, self.tag, group.label, 0, self.nbytes, self.shape, self.dtype, None, None, self.where)

    def missing(self) -> set[int]:
        return set(self.call().peers)


class RecvWork(MessageWork):
    __slots__ = ("number", "source")
    kind = "recv"

    def __init__(self, group: SimGroup, tensor: torch.Tensor, peer: int | None, tag: int, where: str):
        MessageWork.__init__(self, group, tensor, peer, tag, where)
        self.source = -1  #  position in the group of who sent it

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank


class SendWork(MessageWork):
    """A send, and the message itself on its way through the links."""

    __slots__ = ("checked", "contents", "data", "duration", "ended", "number", "order", "payload", "receive", "seq", "stages", "started")
    kind = "send"

    def __init__(self, group: SimGroup, tensor: torch.Tensor, peer: int, tag: int, where: str):
        MessageWork.__init__(self, group, tensor, peer, tag, where)
        world, rank = self.world, self.rank
        latency, bandwidth, self.stages = world.route(rank.number, peer)
        self.duration = latency + self.nbytes / bandwidth
        self.receive: RecvWork | None = None
        self.ended = False
        self.checked = False
        self.contents = Contents(tensor, self.nbytes)
        self.data: Any = None
        self.payload = values_of(tensor) if self.nbytes <= group.payload_bytes else None
        if not rank.sending:
            rank.order = 0
        self.order = rank.order
        rank.order += 1
        rank.sending += 1

    def wait(self, timeout: object = None) -> bool:
        SimWork.wait(self)
        if not self.checked:
            self.checked = True
            if self.contents.changed():
                raise self.misused()
        return True

    def misused(self) -> MisuseError:
        me = self.rank
        error = MisuseError(
            f"rank {me.number} changed a tensor between its isend to rank {self.peer} and the wait for it: {self.call().brief}. "
            "Until then it belongs to the message: wait first, or send a clone.",
            me.number,
        )
        self.world.fail(error, me)
        return error

    def start(self, now: float) -> None:
        """The links are there: the bytes leave."""
        self.started = now
        contents = self.contents
        if contents.changed():
            self.misused()
        self.data = contents.seen if self.nbytes <= WHOLE else _copy_out(contents.pointer, self.nbytes)

    def happen(self) -> None:
        """The message is through: the links are free, and the receiver has it if it has asked for it."""
        if self.stages:
            self.world.links.free(self.stages[-1])
        self.ended = True
        self.rank.sending -= 1
        if self.receive is not None:
            self.deliver()
        self.finish()

    def deliver(self) -> None:
        """The bytes enter the receiver's tensor; both events are written."""
        receive, group, world = self.receive, self.group, self.world
        assert receive is not None
        if self.nbytes:
            _copy_in(receive.tensor.data_ptr(), self.data, self.nbytes)
        self.data = None
        src, dst, tag, nbytes, label, seq, payload = self.rank.number, self.peer, self.tag, self.nbytes, group.label, self.seq, self.payload
        start, end, shape, dtype = self.started, world.now, self.shape, self.dtype
        events = world.events
        events.append((src, "send", dst, tag, nbytes, start, end, self.where, self.posted, label, seq, shape, dtype, payload, None, None))
        events.append((dst, "recv", src, tag, nbytes, start, end, receive.where, receive.posted, label, seq, shape, dtype, payload, None, None))
        receive.finish()


class Mailbox:
    """Sends and receives that have not found each other yet, in the order in which they were posted."""

    def __init__(self, world: World, eager: float):
        self.world = world
        self.eager = eager or -1
        self.number = 0
        self.sends: dict[tuple, list[SendWork]] = {}  #  by (group, src, dst, tag)
        self.receives: dict[tuple, list[RecvWork]] = {}  #  by (group, src or None, dst, tag)
        self.counts: dict[tuple, int] = {}

    def send(self, group: SimGroup, tensor: torch.Tensor, peer: int, tag: int) -> SendWork:
        """Post a send to rank `peer` of the world."""
        rank = group.member
        self.world.enter(rank)
        where = caller()
        check(tensor, "send", rank, where)
        work = SendWork(group, tensor, peer, tag, where)
        self.number = work.number = self.number + 1
        name, src = group.label, rank.number
        key = (name, src, peer, tag)
        receives = self.receives
        queue = receives.get(key)
        if (name, None, peer, tag) in receives:  #  a receive from anyone: the one that was posted first gets it
            anyone = receives[name, None, peer, tag]
            if not queue or anyone[0].number < queue[0].number:
                key, queue = (name, None, peer, tag), anyone
        if queue:
            receive = queue.pop(0)
            if not queue:
                del receives[key]
            self.match(work, receive)
        else:
            self.sends.setdefault(key, []).append(work)
        if work.receive is not None or work.nbytes <= self.eager:
            self.world.links.ask(self.world.now, work.order, src, work.number, work)
        return work

    def recv(self, group: SimGroup, tensor: torch.Tensor, peer: int | None, tag: int) -> RecvWork:
        """Post a receive from rank `peer` of the world, or from any rank of the group (None)."""
        rank = group.member
        self.world.enter(rank)
        where = caller()
        check(tensor, "recv", rank, where)
        work = RecvWork(group, tensor, peer, tag, where)
        self.number = work.number = self.number + 1
        name, dst = group.label, rank.number
        key: tuple = (name, peer, dst, tag)
        if peer is None:
            first = min((queue[0].number, key) for src in group.ranks if (queue := self.sends.get(key := (name, src, dst, tag)))) if self.sends else None
            key = first[1] if first else key
        queue = self.sends.get(key)
        if not queue:
            self.receives.setdefault(key, []).append(work)
            return work
        send = queue.pop(0)
        if not queue:
            del self.sends[key]
        self.match(send, work)
        if send.ended:  #  it went ahead, and is here
            send.deliver()
        elif send.nbytes > self.eager:
            self.world.links.ask(self.world.now, send.order, send.rank.number, send.number, send)
        return work

    def match(self, send: SendWork, receive: RecvWork) -> None:
        """A send and a receive belong together: they must agree."""
        if send.nbytes != receive.nbytes or send.dtype != receive.dtype or send.shape != receive.shape:
            error = MisuseError(f"{disagreement(send.call(), receive.call())}", receive.rank.number)
            self.world.fail(error, receive.rank)
            raise error
        key = (send.group.label, send.rank.number, send.peer, send.tag)
        send.seq = self.counts[key] = self.counts.get(key, 0) + 1
        send.receive = receive
        receive.source = send.group.position


def check(tensor: torch.Tensor, kind: str, rank: Rank, where: str) -> None:
    """What must not be sent or received at all."""
    if tensor.is_contiguous() and tensor.is_cpu:
        return
    if tensor.is_cpu:
        problem = (
            f"a strided tensor to {kind}: its shape is {tuple(tensor.shape)}, its strides are {tensor.stride()}, and gloo reads and writes its memory "
            "as if it were contiguous. Send x.contiguous(), and receive into a tensor that is"
        )
    else:
        problem = f"a tensor on {tensor.device} to {kind}; virtual ranks have the CPU only: leave out the device, or take backend='nccl'"
    error = MisuseError(f"rank {rank.number} passes {problem}. At {where}", rank.number)
    rank.world.fail(error, rank)
    raise error
