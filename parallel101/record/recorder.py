"""Records one real rank (gloo, NCCL): a process group around torch's own sees what the rank posts and waits for.

    program ──▶ RecordedGroup ──▶ ProcessGroupGloo
                     │ always: counts of what was posted, and the call in which the program waits
                     └ in a recorded run: an event for each call, and its arguments for the checks

RecordedGroup is registered as a c10d backend (see process_groups.py), so it sees every message and collective of the program, also those
of DistributedDataParallel and of sub-groups. Virtual ranks do not use this file: the simulator writes their record itself.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel101.record import torch_private
from parallel101.record.calls import Call, Key, call_to_compare, collective_terms, rank_at, tensor_changed, waited_twice
from parallel101.record.clocks import CpuClock
from parallel101.record.errors import MisuseError
from parallel101.record.events import P2P, Event, EventGroup, EventGroups, Row, span_event
from parallel101.record.overloads import as_torch_calls_it, own_limit
from parallel101.record.signatures import COLLECTIVES, bytes_by_rank, flat, size, snapshot, unchanged, unfit
from parallel101.record.spans import Collective, current_collective
from parallel101.record.where import caller

StatusReport = tuple[dict[Key, int], dict[str, int], dict[tuple[Key, int], str], dict[str, list[str]], dict[Key, str]]
SHORTEST_WAIT = 50e-6  # seconds
LONGEST_LIMIT = 60.0  # seconds: a program's own time limit that is longer is not awaited, and a deadlock is reported at once
RECENT = 256  # collectives of a group that are remembered by name


class RankRecorder:
    """What is known of one rank. Its watcher, in a thread of its own, reads `waiting` and `report()` while the program runs.

    Args:
        rank: of the world.
        recording: whether to write events and check calls. Counts of what was posted are kept in any case.
        payload_bytes: events of up to so many bytes keep their values.
        on_call: in a checked run, called with every call when it is posted, before torch gets it.
    """

    def __init__(self, rank: int, *, recording: bool, payload_bytes: int = 0, on_call: Callable[[Call], None] | None = None):
        self.rank = rank
        self.recording = recording
        self.record_waits = False  # whether each time in which the program is blocked in a call becomes a span
        self.payload_bytes = payload_bytes
        self.on_call = on_call
        self.thread = threading.get_ident()  # the program's own
        self.clock: Any = CpuClock()
        # who waits for whom
        self.waiting: PostedCall | None = None  # the call in which the program's own thread is blocked
        self.posted: dict[Key, int] = {}  # how many messages
        self.places: dict[Key, str] = {}  # where the newest of them was posted
        self.dropped: dict[tuple[Key, int], str] = {}  # messages whose work was dropped without a wait, and where: gloo cancels them
        self.collectives: dict[str, int] = {}  # how many, by group
        self.recent: dict[str, collections.deque[str]] = {}  # by group, the names of the last ones
        self.futures: collections.deque[tuple[dist.Work, PostedCall]] = collections.deque()  # works whose future torch or the program has
        # the record; in place of seconds, events have moments of the clock
        self.recorded: list[Event] = []
        self.unfinished_works: weakref.WeakSet[RecordedWork] = weakref.WeakSet()
        self.dropped_works: list[tuple[dist.Work | None, Event]] = []  # torch's own work, if it is a collective, and the event
        self.unwaited: list[Call] = []  # sends and receives for which the program never waited
        self.event_groups = EventGroups()

    # ---- what spans.Recorder asks for ----

    def now(self) -> Any:
        return self.clock.now()

    def add_span(self, name: str, start: Any, end: Any, args: dict[str, Any], waiting: bool = False) -> None:
        seq = len(self.recorded)
        self.recorded.append(
            span_event(rank=self.rank, name=name, start=start, end=end, seq=seq, where=caller(), labels=args, waiting=waiting)
        )

    def add_wait(self, posted: PostedCall, began: Any) -> None:
        """The program was blocked in a call until now. That is recorded if it took longer than to call torch does."""
        end = self.now()
        if isinstance(end, float) and end - began < SHORTEST_WAIT:
            return
        call = posted.call("")
        self.add_span(call.kind, began, end, call.wait_labels, waiting=True)

    def compute(self, seconds: float) -> None:
        """Nothing: real ranks compute in real time."""

    def agree(self, kind: str, ranks: Sequence[int], within: str, alike: Mapping[str, Any]) -> int:
        if self.on_call is None:
            return 0
        call = call_to_compare(self.rank, kind, ranks, within, alike, self.collectives)
        self.on_call(call)
        return call.seq

    # ---- who waits for whom ----

    def next_seq(self, key: Key) -> int:
        """Count a message."""
        count = self.posted[key] = self.posted.get(key, 0) + 1
        return count

    def count_collective(self, group: str, operation: str) -> int:
        """Count a collective of a group; `operation` is what all its ranks must call (see Call.operation)."""
        if group not in self.recent:
            self.recent[group] = collections.deque(maxlen=RECENT)
        self.recent[group].append(operation)
        seq = self.collectives[group] = self.collectives.get(group, 0) + 1
        return seq

    @contextmanager
    def blocked_in(self, posted: PostedCall) -> Iterator[None]:
        """The program's own thread may be blocked inside."""
        before, self.waiting = self.waiting, posted
        try:
            yield
        finally:
            self.waiting = before

    def report(self) -> StatusReport:
        """What has been posted so far: the last five fields of a RankStatus (see wait_for.py)."""
        recent = {group: list(operations) for group, operations in dict(self.recent).items()}
        return dict(self.posted), dict(self.collectives), dict(self.dropped), recent, dict(self.places)

    # ---- the record ----

    @property
    def events(self) -> list[Row]:
        """What is recorded so far."""
        self._end_dropped(run_is_over=False)
        return self._rows(self.recorded)

    @property
    def unfinished(self) -> list[Row]:
        """What was posted and has not been seen to end, as events that end now."""
        now = self.now()
        self._end_dropped(run_is_over=False)
        dropped = [event._replace(end=now) for _, event in self.dropped_works]
        return self._rows([work.event(now) for work in list(self.unfinished_works) if not work.done] + dropped)

    def close(self) -> None:
        """The run is over: what was never waited for has ended now, as far as is known."""
        for work in list(self.unfinished_works):
            work.note_unwaited()
            work.ended()
        self._end_dropped(run_is_over=True)
        if self.recording:
            self.clock.catch_up()

    def _end_dropped(self, run_is_over: bool) -> None:
        """Write the events of collectives whose work was dropped and that have ended since. When the run is over, all of them have."""
        now, dropped = self.now(), self.dropped_works
        ended = [work is not None and (run_is_over or (work.is_completed() and work.is_success())) for work, _ in dropped]
        self.recorded += [event._replace(end=now) for (_, event), done in zip(dropped, ended) if done]
        self.dropped_works = [entry for entry, done in zip(dropped, ended) if not done]

    def _rows(self, events: list[Event]) -> list[Row]:
        return [tuple(event) for event in self.clock.in_seconds(list(events))]


class PostedCall:
    """A call that may block, with what the watcher needs to say whom it waits for."""

    __slots__ = ("group", "key", "limit", "others", "seq", "where")

    def __init__(
        self,
        group: RecordedGroup,
        key: Key,
        seq: int,
        where: str = "?",
        others: tuple[int, ...] | None = None,
        limit: float | None = None,
    ):
        self.group, self.key, self.seq, self.where = group, key, seq, where
        self.others = group.others if others is None else others  # the ranks it needs, if it is no message
        self.limit = limit  # seconds after which the program itself wants an error

    @property
    def times_out(self) -> bool:
        """Whether the program has set a time limit that it will see: then it may catch the error, and go on."""
        return self.limit is not None and self.limit <= LONGEST_LIMIT

    @property
    def once(self) -> bool:
        """Whether wait() may be called only once: on gloo, a second wait() for a message waits for another message."""
        return self.key[0] in P2P and self.group.backend == "gloo"

    def call(self, where: str) -> Call:
        kind, peer, tag, label = self.key
        peers = self.others if peer is None else (peer,)
        return Call(
            rank=self.group.recorder.rank, kind=kind, peers=peers, tag=tag, group=label, seq=self.seq, nbytes=0, shape=(), dtype="",
            op=None, root=None, where=where,
        )  # fmt: skip


class WatchedWork(dist.Work):
    """torch's own work. It notes when the program waits in it, and whether it is dropped."""

    def __init__(self, inner: dist.Work, posted: PostedCall):
        super().__init__()
        self.inner = inner
        self.posted = posted
        self.kept = posted.key[0] not in P2P  # gloo cancels a message whose work is dropped; a collective goes on
        self.waited = False
        self.batch: Sequence[WatchedWork] = ()  # on NCCL, the works of its batch: whoever waits for one has waited for all

    def __del__(self) -> None:
        if not self.kept:
            self.posted.group.recorder.dropped[self.posted.key, self.posted.seq] = self.posted.where

    def wait(self, *timeout: Any) -> bool:
        if self.waited and self.posted.once:
            raise waited_twice(self.posted.group.recorder.rank, self.posted.key[0])
        self.kept = True
        for work in self.batch:
            work.kept = True
        recorder = self.posted.group.recorder
        if threading.get_ident() != recorder.thread:
            return self.inner.wait(*timeout)
        if timeout:
            self.posted.limit = own_limit(*timeout)
        elif self.posted.limit is not None and self.posted.key[0] in P2P:  # gloo's messages keep the limit that their group began with
            timeout = (timedelta(seconds=self.posted.limit),)
        recorder.waiting = self.posted
        began = recorder.now() if recorder.record_waits else None
        try:
            answer = self.inner.wait(*timeout)
        finally:
            recorder.waiting = None
            if began is not None:
                recorder.add_wait(self.posted, began)
        self.waited = True
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
        self.kept = True
        self.posted.group.recorder.futures.append((self.inner, self.posted))
        return self.inner.get_future()


class Inputs:
    """What a rank passed to a call, before torch got it: the payload of the event, and tensors that must not change until the wait()."""

    __slots__ = ("payload", "tensors")

    def __init__(self, tensors: list[torch.Tensor], payload: list | None = None):
        self.payload = payload
        self.tensors = [(tensor, _version(tensor), snapshot(tensor)) for tensor in tensors]

    def changed(self) -> bool:
        # comparing a GPU tensor would wait for the GPU, so there only a tensor that torch wrote to is compared
        return any((t.is_cpu or _version(t) != version) and not unchanged(t, before) for t, version, before in self.tensors)


def _version(tensor: torch.Tensor) -> int:
    """How often torch wrote to the tensor or another view of its memory. Writes through x.data and NumPy are not counted."""
    return -1 if tensor.is_inference() else tensor._version


def values(tensors: list[torch.Tensor]) -> list:
    return [value for tensor in tensors for value in tensor.detach().reshape(-1).tolist()]


class RecordedWork(WatchedWork):
    """The work of a recorded call: it writes an event when it ends. `received`: the tensor of a receive, if the event keeps its values."""

    done = True  # until __init__ has run

    def __init__(
        self,
        inner: dist.Work,
        posted: PostedCall,
        call: Call,
        group: EventGroup,
        start: Any,
        inputs: Inputs,
        received: torch.Tensor | None = None,
    ):
        super().__init__(inner, posted)
        self.call, self.event_group, self.start = call, group, start
        self.inputs: Inputs | None = inputs
        self.received = received
        self.done = False
        posted.group.recorder.unfinished_works.add(self)

    def __del__(self) -> None:
        if not self.done:
            self.note_unwaited()
            self._note_dropped()
        super().__del__()

    def note_unwaited(self) -> None:
        """Its rank has dropped it, or returned. A message that the program has not waited for may not have arrived."""
        if self.call.kind in P2P and not self.kept:
            self.posted.group.recorder.unwaited.append(self.call)

    def _note_dropped(self) -> None:
        """Nobody will see this work end. A collective ends all the same; of a message it is not known."""
        payload = None if self.inputs is None else self.inputs.payload
        event = self.event(self.start, payload=payload)
        self.posted.group.recorder.dropped_works.append((None if self.call.kind in P2P else self.inner, event))

    def wait(self, *timeout: Any) -> bool:
        answer = super().wait(*timeout)
        for work in self.batch or (self,):
            work.ended(checked=True)  # type: ignore[attr-defined]
        return answer

    def is_completed(self) -> bool:
        done = super().is_completed()
        if done:
            self.ended(checked=True)
        return done

    def get_future(self) -> Any:
        if self.posted.group.recorder.record_waits:
            torch_private.after_backward(self.wait)  # where DDP's C++ waits for this future, which Python would not see
        return super().get_future().then(self._passed_on)

    def _passed_on(self, future: Any) -> Any:
        self.ended()
        return future.value()

    def event(self, end: Any, source: int | None = None, payload: list | None = None) -> Event:
        """Its event. `source`: who sent what a receive from any rank got. Such receives are numbered apart, and so have a negative seq."""
        call = self.call
        seq = call.seq if source is None else -call.seq
        peer = (call.peers[0] if len(call.peers) == 1 else source) if call.kind in P2P else call.root
        return call.event(self.event_group, peer=peer, posted=self.start, start=self.start, end=end, seq=seq, payload=payload)

    def ended(self, checked: bool = False) -> None:
        """Write the event, once. With `checked`, raise MisuseError if a tensor that the rank passed has changed."""
        if self.done:
            return
        self.done = True
        call, recorder = self.call, self.posted.group.recorder
        end = recorder.now()
        recorder.unfinished_works.discard(self)
        source = self.posted.group.ranks[self.inner._source_rank()] if call.kind == "recv" and len(call.peers) != 1 else None
        inputs, received, self.inputs, self.received = self.inputs, self.received, None, None
        assert inputs is not None
        recorder.recorded.append(self.event(end, source, inputs.payload if received is None else values([received])))
        if checked and inputs.changed():
            raise tensor_changed(call)


class RecordedGroup(torch_private.PythonGroup):
    """A process group that passes every call on to torch's own backend, and tells the recorder.

    Args:
        inner: torch's backend.
        whole: a process group of torch's own around `inner`, for calls that the backend does not offer to Python.
        label: the group's name in the record.
        ranks: of the world, in order.
        backend: "gloo" or "nccl".
    """

    def __init__(self, inner: Any, whole: Any, label: str, ranks: Sequence[int], recorder: RankRecorder, backend: str):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub lacks this form, which is made for Python
        self.inner = inner
        self.whole = whole
        self.label = label
        self.ranks = list(ranks)
        self.others = tuple(r for r in ranks if r != recorder.rank)
        self.recorder = recorder
        self.backend = backend
        self.device_type = "cuda" if backend == "nccl" else "cpu"
        self.torch_name = label
        self.limit: float | None = None  # the program's own time limit for this group, in seconds

    def size(self) -> int:
        return len(self.ranks)

    def getBackendName(self) -> str:
        return f"parallel101_{self.backend}"  # C++ code asks for it, and would look inside a group called "gloo"

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

    def set_timeout(self, timeout: timedelta) -> None:
        torch_private.set_timeout(self.inner, timeout)
        self.limit = own_limit(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.inner._get_sequence_number_for_group()

    # ---- messages ----

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        return self._message("send", tensors, dst, tag, lambda: self.inner.send(tensors, dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        return self._message("recv", tensors, src, tag, lambda: self.inner.recv(tensors, src, tag))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        position = self.ranks.index(self.others[0]) if len(self.others) == 1 else None  # of two ranks, any rank is the other
        return self._message("recv", tensors, position, tag, lambda: self.inner.recv_anysource(tensors, tag))

    def _message(self, kind: str, tensors: list[torch.Tensor], position: int | None, tag: int, start: Callable[[], dist.Work]) -> dist.Work:
        peer = None if position is None else rank_at(self.recorder.rank, kind, position, self.ranks)
        key = (kind, peer, tag, self.label)
        where = self.recorder.places[key] = caller()
        posted = PostedCall(self, key, self.recorder.next_seq(key), where, limit=self.limit)
        if not self.recorder.recording:
            return WatchedWork(start(), posted)
        tensor = tensors[0]
        peers = self.others if peer is None else (peer,)
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        collective = current_collective()
        call = Call(
            rank=self.recorder.rank, kind=kind, peers=peers, tag=tag, group=self.label, seq=posted.seq, nbytes=size(tensor), shape=shape,
            dtype=dtype, op=None, root=None, where=where, within=collective_terms(collective),
        )  # fmt: skip
        self._check(call, unfit(tensor, call.brief))
        small = tensor.nbytes <= self.recorder.payload_bytes
        inputs = Inputs([tensor], values([tensor]) if small else None) if kind == "send" else Inputs([])
        began = self.recorder.now()
        received = tensor if kind == "recv" and small else None
        return RecordedWork(start(), posted, call, self._event_group(collective), began, inputs, received)

    @contextmanager
    def batched(self, works: list[dist.Work]) -> Iterator[None]:
        """Messages posted inside start as one batch, as NCCL requires of messages between two ranks. The batch's work becomes theirs."""
        self.inner._start_coalescing()
        try:
            yield
        finally:
            whole = self.inner._end_coalescing()
            for work in works:
                work.inner, work.batch = whole, works  # type: ignore[attr-defined]

    # ---- collectives: the same for all, after the table in signatures.py ----

    def _collective(self, method: str, *args: Any, **kwargs: Any) -> dist.Work:
        spec = COLLECTIVES[method]
        run = next((getattr(self.inner, name) for name in spec.names if hasattr(self.inner, name)), None) or getattr(self.whole, method)
        seq = self.recorder.count_collective(self.label, spec.kind)
        options = args[-1] if args else None
        limit = own_limit(options if isinstance(options, timedelta) else getattr(options, "timeout", None))
        posted = PostedCall(self, (spec.kind, None, 0, self.label), seq, limit=limit or self.limit)
        if not self.recorder.recording:
            with self.recorder.blocked_in(posted):  # some of them block here already
                return WatchedWork(run(*args, **kwargs), posted)
        arguments = spec.arguments(args)
        tensors = flat(args)
        root = None if arguments.root is None else rank_at(self.recorder.rank, spec.kind, arguments.root, self.ranks)
        call = Call(
            rank=self.recorder.rank, kind=spec.kind, peers=self.others, tag=0, group=self.label, seq=seq, nbytes=arguments.nbytes,
            shape=arguments.shape, dtype=arguments.dtype, op=arguments.op, root=root, where=caller(), layout=arguments.layout,
        )  # fmt: skip
        if spec.kind == "all_to_all":
            gives, takes = bytes_by_rank(args, self.ranks)
            call = call._replace(shape=tuple(tensors[1].shape) if len(tensors) == 2 else (), gives=gives, takes=takes)
        self._check(call, spec.unfit(args, call.brief))
        small = arguments.nbytes <= self.recorder.payload_bytes and arguments.layout != "sparse"
        payload = values(arguments.tensors) if small else None
        inputs = Inputs(spec.unwritten_inputs(args, self.recorder.rank == root), payload)
        began = self.recorder.now()
        with self.recorder.blocked_in(posted):
            inner = run(*args, **kwargs)
        return RecordedWork(inner, posted, call, self._event_group(None), began, inputs)

    def _event_group(self, collective: Collective | None) -> EventGroup:
        return self.recorder.event_groups.of(self.label, self.ranks, torch_private.mesh_axis(self), collective)

    def _check(self, call: Call, problem: str | None) -> None:
        """`problem`: why its tensors must not be passed, if they must not."""
        if self.recorder.on_call is not None:
            self.recorder.on_call(call)
        if problem is not None:
            raise MisuseError(f"rank {call.rank} passes {problem}.", call.rank)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        work = self._collective("monitored_barrier", timeout, wait_all_ranks=wait_all_ranks)
        if isinstance(work, RecordedWork):  # it has no work of torch's own: when it returns, it is over
            if self.recorder.record_waits:
                self.recorder.add_wait(work.posted, work.start)
            work.ended()


def _passing(method: str) -> Callable[..., dist.Work]:
    def call(self: RecordedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self._collective(method, *as_torch_calls_it(method, args, kwargs))

    call.__name__ = method
    return call


for _method in COLLECTIVES:
    if _method != "monitored_barrier":
        setattr(RecordedGroup, _method, _passing(_method))
