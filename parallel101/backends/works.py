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
        self.posted.group.ledger.taken.append((self.inner, self.posted))
        return self.inner.get_future()


class Given:
    """What a rank put into a call, seen before torch had it: `watched` are the tensors that must stay what they are until its wait()."""

    __slots__ = ("payload", "watched")

    def __init__(self, watched: list[torch.Tensor], payload: list | None = None):
        self.payload = payload
        self.watched = [(tensor, _version(tensor), snapshot(tensor)) for tensor in watched]

    def changed(self) -> bool:
        #  to compare what lies on a GPU would wait for it, so there only a tensor that was written to is compared
        return any((t.is_cpu or _version(t) != version) and not unchanged(t, copy) for t, version, copy in self.watched)


def _version(tensor: torch.Tensor) -> int:
    """How often torch wrote to the tensor, or to another view of its memory; it does not count what goes by x.data or NumPy."""
    return -1 if tensor.is_inference() else tensor._version


def values(tensors: list[torch.Tensor]) -> list:
    return [value for tensor in tensors for value in tensor.detach().reshape(-1).tolist()]


class RecordedWork(WatchedWork):
    """The same, whose end is an event. `received`: the tensor of a receive, whose values the record is to have."""

    done = True  #  until it is made

    def __init__(
        self, inner: dist.Work, posted: Posted, call: Call, start: Any, given: Given, received: torch.Tensor | None, root: int | None
    ):
        super().__init__(inner, posted)
        self.call, self.start, self.root = call, start, root
        self.given: Given | None = given
        self.received = received
        self.done = False
        posted.group.ledger.open.add(self)

    def __del__(self) -> None:
        if not self.done:
            self._thrown_away()
        super().__del__()

    def _thrown_away(self) -> None:
        """Nobody will see it end: a collective ends all the same, of a message that is not known."""
        message = self.call.kind in ("send", "recv")
        payload = None if self.given is None else self.given.payload
        self.posted.group.ledger.left.append((None if message else self.inner, self.row(self.start, payload=payload)))

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
        return super().get_future().then(self._passed_on)

    def _passed_on(self, future: Any) -> Any:
        self.ended()
        return future.value()

    def row(self, end: Any, source: int | None = None, payload: list | None = None) -> tuple:
        """The fields of its Event. `source`: whose message a receive from anyone got; its number is among its like, and so negative."""
        call = self.call
        seq = call.seq if source is None else -call.seq
        peer = (call.peers[0] if len(call.peers) == 1 else source) if call.kind in ("send", "recv") else self.root
        who = (call.rank, call.kind, peer, call.tag, call.nbytes)
        return (*who, self.start, end, call.where, self.start, call.group, seq, call.shape, call.dtype, payload, call.op, None)

    def ended(self, checked: bool = False) -> None:
        """Write the event, once; in a checked run, see whether what was sent is still what it was."""
        if self.done:
            return
        self.done = True
        call, ledger = self.call, self.posted.group.ledger
        end = ledger.now()
        ledger.open.discard(self)
        source = self.posted.group.ranks[self.inner._source_rank()] if call.kind == "recv" and len(call.peers) != 1 else None
        given, received, self.given, self.received = self.given, self.received, None, None
        assert given is not None
        ledger.rows.append(self.row(end, source, given.payload if received is None else values([received])))
        if checked and given.changed():
            what = f"that was still being sent to rank {call.peers[0]}" if call.kind == "send" else f"that it gave to its {call.kind}"
            advice = "Wait for the send first, or send a clone." if call.kind == "send" else "Wait first, or give it a clone."
            raise MisuseError(f"rank {call.rank} changed a tensor {what}, before its wait(): {call.brief}. {advice}", call.rank)
