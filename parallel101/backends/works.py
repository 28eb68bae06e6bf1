"""torch's own work, watched: who waits in it, when it ended, and whether what is being sent stayed what it was."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallel101.backends.describe import snapshot, unchanged
from parallel101.errors import MisuseError
from parallel101.trace.calls import Call, Key
from parallel101.trace.where import caller, shown

if TYPE_CHECKING:
    from parallel101.backends.record import RecordedGroup


class Posted:
    """A call that may block: what the watcher needs to say what it waits for."""

    __slots__ = ("group", "key", "others", "place", "seq")

    def __init__(self, group: RecordedGroup, key: Key, seq: int, place: str = "?", others: tuple[int, ...] | None = None):
        self.group, self.key, self.seq, self.place = group, key, seq, place
        self.others = group.others if others is None else others  #  whom it needs, where it is no message

    @property
    def once(self) -> bool:
        """Whether it can be waited for once only: a message on gloo, where the next wait() would wait for another one."""
        return self.key[0] in ("send", "recv") and self.group.backend == "gloo"

    def call(self, where: str) -> Call:
        kind, peer, tag, label = self.key
        peers = self.others if peer is None else (peer,)
        return Call(self.group.ledger.rank, kind, peers, tag, label, self.seq, 0, (), "", None, None, where)


def waited_twice(rank: int, kind: str) -> MisuseError:
    return MisuseError(
        f"rank {rank} waits a second time for one {kind}, at {shown(caller())}: gloo would wait there for ever, "
        "for another message. Keep the work until its wait(), and drop it then.",
        rank,
    )


class WatchedWork(dist.Work):
    """torch's own work, and a note of who waits in it."""

    def __init__(self, inner: dist.Work, posted: Posted):
        super().__init__()
        self.inner = inner
        self.posted = posted
        self.kept = posted.key[0] not in ("send", "recv")  #  a message's work that is thrown away takes the message with it
        self.over = False

    def __del__(self) -> None:
        if not self.kept:
            self.posted.group.ledger.dropped[self.posted.key, self.posted.seq] = self.posted.place

    def wait(self, *timeout: Any) -> bool:
        if self.over and self.posted.once:
            raise waited_twice(self.posted.group.ledger.rank, self.posted.key[0])
        self.kept = True
        ledger = self.posted.group.ledger
        if threading.get_ident() != ledger.thread:
            return self.inner.wait(*timeout)
        ledger.waiting = self.posted
        try:
            answer = self.inner.wait(*timeout)
        finally:
            ledger.waiting = None
        self.over = True
        return answer

    def is_completed(self) -> bool:
        done = self.inner.is_completed()
        self.kept = self.kept or done
        return done

    def is_success(self) -> bool:
        return self.inner.is_success()

    def exception(self) -> Any:
        return self.inner.exception()

    def result(self) -> Any:
        return self.inner.result()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def _source_rank(self) -> int:
        return self.inner._source_rank()

    source_rank = _source_rank

    def get_future(self) -> Any:
        return self.inner.get_future()


class RecordedWork(WatchedWork):
    """The same, whose end is an event."""

    def __init__(self, inner: dist.Work, posted: Posted, call: Call, start: Any, tensors: list[torch.Tensor], root: int | None):
        super().__init__(inner, posted)
        self.call, self.start, self.root = call, start, root
        self.tensors = tensors
        self.copy = snapshot(tensors[0]) if call.kind == "send" else None
        self.payload = None if call.kind == "recv" else self._values()
        self.version = tensors[0]._version if call.kind == "send" and not tensors[0].is_inference() else None
        self.done = False
        posted.group.ledger.open.add(self)

    def _values(self) -> list | None:
        if self.call.nbytes > self.posted.group.ledger.payload_bytes:
            return None
        return [value for tensor in self.tensors for value in tensor.detach().reshape(-1).tolist()]

    def wait(self, *timeout: Any) -> bool:
        answer = super().wait(*timeout)
        self.ended(checked=True)
        return answer

    def is_completed(self) -> bool:
        done = super().is_completed()
        if done:
            self.ended(checked=True)
        return done

    def get_future(self) -> Any:
        return self.inner.get_future().then(self._passed_on)

    def _passed_on(self, future: Any) -> Any:
        self.ended()
        return future.value()

    def row(self, end: Any, source: int | None = None, payload: list | None = None) -> tuple:
        """The fields of its Event. `source`: whose message a receive from anyone got."""
        call = self.call
        peer = (call.peers[0] if len(call.peers) == 1 else source) if call.kind in ("send", "recv") else self.root
        who = (call.rank, call.kind, peer, call.tag, call.nbytes)
        return (*who, self.start, end, call.where, self.start, call.group, call.seq, call.shape, call.dtype, payload, call.op, None)

    def ended(self, checked: bool = False) -> None:
        """Write the event, once; in a checked run, see whether what was sent is still what it was."""
        if self.done:
            return
        self.done = True
        call, ledger = self.call, self.posted.group.ledger
        end = ledger.now()
        ledger.open.discard(self)
        source = self.posted.group.ranks[self.inner._source_rank()] if call.kind == "recv" and len(call.peers) != 1 else None
        ledger.rows.append(self.row(end, source, self._values() if call.kind == "recv" else self.payload))
        if checked and self.version is not None and self.tensors[0]._version != self.version and not unchanged(self.tensors[0], self.copy):
            raise MisuseError(
                f"rank {call.rank} changed a tensor that was still being sent to rank {call.peers[0]}, before its wait(): {call.brief}. "
                "Wait for the send first, or send a clone.",
                call.rank,
            )
        self.tensors, self.copy = [], None
