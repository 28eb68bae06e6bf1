"""What one real rank posts, waits for and (in a recorded run) did: a process group around gloo's or NCCL's own.

    program ──▶ RecordedGroup ──▶ ProcessGroupGloo
                     │ posted, waiting: always (who waits for whom is known at any time)
                     └ events, checks:  in a recorded run

It is registered as a c10d backend, so it sees every message and collective of the program whoever sends it: aliased imports, sub-groups,
DistributedDataParallel. Unrecorded, it counts what was posted and remembers what is waited for, and nothing else.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from parallel101.record.calls import Call, Key, agreement, member_at, terms_within
from parallel101.record.clocks import CpuClock
from parallel101.record.errors import MisuseError
from parallel101.record.events import Event, EventGroup, EventGroups, Row, span_event
from parallel101.record.signatures import COLLECTIVES, flat, shares, snapshot, unchanged, unfit
from parallel101.record.spans import Collective, current_collective
from parallel101.record.where import caller, shown

# ── torch's own work, watched: who waits in it, when it ended, and whether what is being sent stayed what it was.


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
        self,
        inner: dist.Work,
        posted: Posted,
        call: Call,
        group: EventGroup,
        start: Any,
        given: Given,
        received: torch.Tensor | None = None,
    ):
        super().__init__(inner, posted)
        self.call, self.event_group, self.start = call, group, start
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
        self.posted.group.ledger.left.append((None if message else self.inner, self.event(self.start, payload=payload)))

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

    def event(self, end: Any, source: int | None = None, payload: list | None = None) -> Event:
        """Its event. `source`: who sent what a receive from anyone got. Such receives are numbered apart, and so have a negative seq."""
        call = self.call
        seq = call.seq if source is None else -call.seq
        peer = (call.peers[0] if len(call.peers) == 1 else source) if call.kind in ("send", "recv") else call.root
        return call.event(self.event_group, peer=peer, posted=self.start, start=self.start, end=end, seq=seq, payload=payload)

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
        ledger.recorded.append(self.event(end, source, given.payload if received is None else values([received])))
        if checked and given.changed():
            what = f"that was still being sent to rank {call.peers[0]}" if call.kind == "send" else f"that it gave to its {call.kind}"
            advice = "Wait for the send first, or send a clone." if call.kind == "send" else "Wait first, or give it a clone."
            raise MisuseError(f"rank {call.rank} changed a tensor {what}, before its wait(): {call.brief}. {advice}", call.rank)


Report = tuple[dict[Key, int], dict[str, int], dict[tuple[Key, int], str], dict[str, list[str]], dict[Key, str]]
RECENT = 256  #  collectives of a group that are remembered by name


class Ledger:
    """One rank's books. `tell` (a checked run) is called with every call as it is posted, before torch sees it."""

    def __init__(self, rank: int, *, recording: bool, payload_bytes: int = 0, tell: Callable[[Call], None] | None = None):
        self.rank = rank
        self.recording = recording
        self.payload_bytes = payload_bytes
        self.tell = tell
        self.posted: dict[Key, int] = {}
        self.waiting: Posted | None = None  #  what the program's own thread is blocked in; the watcher thread reads it
        self.thread = threading.get_ident()
        self.clock: Any = CpuClock()
        self.recorded: list[Event] = []  # with moments of the clock in place of seconds
        self.open: weakref.WeakSet[RecordedWork] = weakref.WeakSet()  #  posted, and not seen to end
        self.left: list[tuple[dist.Work | None, Event]] = []  # whose work was thrown away: torch's own, for a collective, and the event
        self.taken: collections.deque[tuple[dist.Work, Posted]] = collections.deque()  #  works whose future torch or the program has
        self.places: dict[Key, str] = {}  #  where the newest was posted
        self.dropped: dict[tuple[Key, int], str] = {}  #  messages whose work was thrown away unwaited, and where: gloo takes them back
        self.event_groups = EventGroups()
        self.collectives: dict[str, int] = {}
        self.recent: dict[str, collections.deque[str]] = {}  #  the last collectives of each group, by name

    def now(self) -> Any:
        return self.clock.now()

    def add_span(self, name: str, start: Any, end: Any, args: dict[str, Any], waiting: bool = False) -> None:
        seq = len(self.recorded)
        self.recorded.append(
            span_event(rank=self.rank, name=name, start=start, end=end, seq=seq, where=caller(), labels=args, waiting=waiting)
        )

    @property
    def events(self) -> list[Row]:
        """What is recorded so far."""
        self._look_after(over=False)
        return self._rows(self.recorded)

    @property
    def unfinished(self) -> list[Row]:
        """What was posted and has not been seen to end, as events that end now."""
        now = self.now()
        self._look_after(over=False)
        lost = [event._replace(end=now) for _, event in self.left]
        return self._rows([work.event(now) for work in list(self.open) if not work.done] + lost)

    def _look_after(self, over: bool) -> None:
        """Write the events of collectives whose work was thrown away and that have ended since; when the run is over, all have."""
        now, left = self.now(), self.left
        ended = [work is not None and (over or (work.is_completed() and work.is_success())) for work, _ in left]
        self.recorded += [event._replace(end=now) for (_, event), done in zip(left, ended) if done]
        self.left = [entry for entry, done in zip(left, ended) if not done]

    def _rows(self, events: list[Event]) -> list[Row]:
        return [tuple(event) for event in self.clock.in_seconds(list(events))]

    def compute(self, seconds: float) -> None:
        """Real ranks compute in real time: nothing to pretend."""

    def agree(self, kind: str, ranks: Sequence[int], within: str, alike: Mapping[str, Any]) -> int:
        if self.tell is None:
            return 0
        call = agreement(self.rank, kind, ranks, within, alike, self.collectives)
        self.tell(call)
        return call.seq

    def number(self, key: Key) -> int:
        count = self.posted[key] = self.posted.get(key, 0) + 1
        return count

    def takes_part(self, group: str, part: str) -> int:
        """Count a collective of a group; `part` is what all its ranks must call (see Call.part)."""
        if group not in self.recent:
            self.recent[group] = collections.deque(maxlen=RECENT)
        self.recent[group].append(part)
        seq = self.collectives[group] = self.collectives.get(group, 0) + 1
        return seq

    @contextmanager
    def waits_in(self, posted: Posted) -> Iterator[None]:
        """The program's own thread may be blocked inside."""
        before, self.waiting = self.waiting, posted
        try:
            yield
        finally:
            self.waiting = before

    def report(self) -> Report:
        """What tells who waits for whom (see trace.board.Standing)."""
        recent = {group: list(parts) for group, parts in dict(self.recent).items()}
        return dict(self.posted), dict(self.collectives), dict(self.dropped), recent, dict(self.places)

    def close(self) -> None:
        """The run is over: what was never waited for ended, as far as is known, now."""
        for work in list(self.open):
            work.ended()
        self._look_after(over=True)
        if self.recording:
            self.clock.catch_up()


class RecordedGroup(dist.ProcessGroup):
    """A process group that hands every call to `inner` and keeps the ledger."""

    def __init__(self, inner: Any, whole: Any, label: str, ranks: Sequence[int], ledger: Ledger, backend: str):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  #  torch's stub lacks this form, made for Python
        self.inner = inner  #  torch's backend
        self.whole = whole  #  a process group of torch's own around it, for what the backend alone can't be asked from Python
        self.label = label
        self.ranks = list(ranks)
        self.others = tuple(r for r in ranks if r != ledger.rank)
        self.ledger = ledger
        self.backend = backend
        self.torch_name = label

    def size(self) -> int:
        return len(self.ranks)

    def getBackendName(self) -> str:
        return f"parallel101_{self.backend}"  #  asked by C++ code, which would look inside a group called "gloo"

    # DDP, FSDP2 and the functional collectives look a group up by its name
    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.torch_name

    def _set_group_name(self, name: str) -> None:
        self.torch_name = name

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.inner.shutdown()

    def set_timeout(self, timeout: Any) -> None:
        self.inner.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.inner._get_sequence_number_for_group()

    # ---- messages ----

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        return self._message("send", tensors, dst, tag, lambda: self.inner.send(tensors, dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        return self._message("recv", tensors, src, tag, lambda: self.inner.recv(tensors, src, tag))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        position = self.ranks.index(self.others[0]) if len(self.others) == 1 else None  #  of two, anyone is the other
        return self._message("recv", tensors, position, tag, lambda: self.inner.recv_anysource(tensors, tag))

    def _message(self, kind: str, tensors: list[torch.Tensor], position: int | None, tag: int, start: Callable[[], dist.Work]) -> dist.Work:
        peer = None if position is None else member_at(self.ledger.rank, kind, position, self.ranks)
        key = (kind, peer, tag, self.label)
        place = self.ledger.places[key] = caller()
        posted = Posted(self, key, self.ledger.number(key), place)
        if not self.ledger.recording:
            return WatchedWork(start(), posted)
        tensor = tensors[0]
        peers = self.others if peer is None else (peer,)
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        collective = current_collective()
        call = Call(
            rank=self.ledger.rank, kind=kind, peers=peers, tag=tag, group=self.label, seq=posted.seq, nbytes=tensor.nbytes, shape=shape,
            dtype=dtype, op=None, root=None, where=place, within=terms_within(collective),
        )  # fmt: skip
        self._check(call, tensors)
        small = tensor.nbytes <= self.ledger.payload_bytes
        given = Given([tensor], values([tensor]) if small else None) if kind == "send" else Given([])
        began = self.ledger.now()
        received = tensor if kind == "recv" and small else None
        return RecordedWork(start(), posted, call, self._event_group(collective), began, given, received)

    @contextmanager
    def batched(self, works: list[dist.Work]) -> Iterator[None]:
        """Messages posted inside go out as one batch, as NCCL wants those between two ranks; its work becomes theirs."""
        self.inner._start_coalescing()
        try:
            yield
        finally:
            whole = self.inner._end_coalescing()
            for work in works:
                work.inner = whole  # type: ignore[attr-defined]

    # ---- collectives: one path for all, described by a table ----

    def _collective(self, method: str, *args: Any, **kwargs: Any) -> dist.Work:
        spec = COLLECTIVES[method]
        run = next((getattr(self.inner, name) for name in spec.names if hasattr(self.inner, name)), None) or getattr(self.whole, method)
        seq = self.ledger.takes_part(self.label, spec.kind)
        posted = Posted(self, (spec.kind, None, 0, self.label), seq)
        if not self.ledger.recording:
            with self.ledger.waits_in(posted):  #  some of them block here already
                return WatchedWork(run(*args, **kwargs), posted)
        told = spec.describe(args)
        tensors = flat(args)
        root = None if told.root is None else member_at(self.ledger.rank, spec.kind, told.root, self.ranks)
        call = Call(
            rank=self.ledger.rank, kind=spec.kind, peers=self.others, tag=0, group=self.label, seq=seq, nbytes=told.nbytes,
            shape=told.shape, dtype=told.dtype, op=told.op, root=root, where=caller(),
        )  # fmt: skip
        if spec.kind == "all_to_all":
            gives, takes = shares(args, self.ranks)
            call = call._replace(shape=tuple(tensors[1].shape) if len(tensors) == 2 else (), given=gives, taken=takes)
        self._check(call, tensors)
        given = Given(spec.kept(args, self.ledger.rank == root), values(told.tensors) if told.nbytes <= self.ledger.payload_bytes else None)
        began = self.ledger.now()
        with self.ledger.waits_in(posted):
            inner = run(*args, **kwargs)
        return RecordedWork(inner, posted, call, self._event_group(None), began, given)

    def _event_group(self, collective: Collective | None) -> EventGroup:
        return self.ledger.event_groups.of(self.label, self.ranks, self.group_desc, collective)

    def _check(self, call: Call, tensors: list[torch.Tensor]) -> None:
        if self.ledger.tell is not None:
            self.ledger.tell(call)
        for tensor in tensors:
            if problem := unfit(tensor, call.brief):
                raise MisuseError(f"rank {call.rank} passes {problem}.", call.rank)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        work = self._collective("monitored_barrier", *args, **kwargs)
        if isinstance(work, RecordedWork):  #  it has no work of torch's: it returns when it is over
            work.ended()


def _passing(method: str) -> Callable[..., dist.Work]:
    def call(self: RecordedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self._collective(method, *args, **kwargs)

    call.__name__ = method
    return call


for _method in COLLECTIVES:
    if _method != "monitored_barrier":
        setattr(RecordedGroup, _method, _passing(_method))
