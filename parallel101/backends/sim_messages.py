"""Messages on the sim: a send and a receive find each other, the links carry the bytes, and both works are done.

    send posted ─┐
                 ├─▶ matched ─▶ asks for its links ─▶ starts ─▶ ends: the receiver has the bytes, both events are written
    recv posted ─┘

The bytes leave the sender's tensor when the send is posted, and enter the receiver's when the message ends, not before. That the
sender's tensor keeps them until its wait is checked. A run has millions of messages: what each of them passes through, here and in
sim_mailbox, is written out without a call more than it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_char
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from parallel101.backends.sim_work import SimWork
from parallel101.backends.works import waited_twice
from parallel101.errors import MisuseError
from parallel101.trace.calls import Call

if TYPE_CHECKING:
    from parallel101.backends.sim_mailbox import Messenger

WHOLE = 1 << 20  #  bytes up to which a sent tensor is kept and compared whole; of a larger one
SAMPLES, SAMPLE = 64, 64  #  so many samples of so many bytes

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
        *("dtype", "done", "future", "group", "nbytes", "number", "part", "peer", "pointer", "posted", "rank", "shape", "tag", "tensor"),
        *("__weakref__", "waited", "where", "world"),
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
    part: tuple[tuple[str, str], ...]  #  of which collective it is (see trace.spans)
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
        return Call(me, self.kind, peers, self.tag, group.label, 0, self.nbytes, shape, dtype, None, None, self.where, self.part)

    def missing(self) -> set[int]:
        return set(self.call().peers)

    def row(self, seq: int) -> tuple:
        """The fields of its Event, if it ended now."""
        call = self.call()
        about = (self.where, self.posted, call.group, seq, call.shape, call.dtype, None, None, None)
        return (call.rank, self.kind, self.peer, self.tag, self.nbytes, self.posted, self.world.now, *about)


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
        """The bytes enter the receiver's tensor; the message is written down, both sides in one row (see trace.events)."""
        block(self.nbytes).from_address(receive.pointer).raw = self.data  # type: ignore[assignment]
        self.data = None
        src, dst, tag, nbytes, group = self.rank.number, self.peer, self.tag, self.nbytes, self.group.label
        shape, dtype = _shapes.get(self.shape) or plain_shape(self.shape), _dtypes.get(self.dtype) or dtype_name(self.dtype)
        sent = (self.where, self.posted, group, self.seq, shape, dtype, self.payload, None, None)
        self.world.events.append((src, "send", dst, tag, nbytes, self.started, self.world.now, *sent, receive.where, receive.posted))
        receive.done = True
        if receive.future is not None:
            receive.finish()
            return
        receive.tensor = None
        if receive.rank.waiting is receive:
            self.world.wake(receive.rank)
