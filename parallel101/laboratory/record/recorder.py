"""Keeps what one real rank (gloo, NCCL) has posted, where its program is blocked, and its events.

    RankRecorder     counts what was posted, and knows the call in which the program waits; in a
                     recorded run it keeps the events
    WatchedWork      a call that may block, and torch's own work of it: notes when the program
                     waits in it, and whether it is dropped; in a recorded run, writes an event
                     when the call ends

The process group that posts the calls is in recorded_group.py. Virtual ranks use neither: the
simulator writes their record itself.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import (
    Call,
    CallKey,
    PostedMessage,
    call_to_compare,
    tensor_changed,
    waited_twice,
)
from parallel101.laboratory.record.clocks import CpuClock
from parallel101.laboratory.record.events import (
    P2P,
    Event,
    EventGroup,
    EventRow,
    span_event,
)
from parallel101.laboratory.record.host_time import HostTime
from parallel101.laboratory.record.last_events import LastEvents
from parallel101.laboratory.record.program_lines import caller
from parallel101.laboratory.record.rank_files import RankFiles
from parallel101.laboratory.record.signatures import own_limit, snapshot, values
from parallel101.laboratory.record.wait_for import RankStatus

SHORTEST_WAIT = 50e-6  # seconds
MOST_DROPPED = 100_000  # works that nobody saw end, whose events are kept until they have
NEWEST = 8  # messages with a key whose lines and bytes are remembered
Began = tuple[EventGroup, Any, "list | None"]  # of a call's event: group, start and payload
RECENT = 256  # collectives of a group that are remembered by name


class RankRecorder:
    """Keeps the calls, waits and events of one rank.

    Its watcher, in a thread of its own, reads `waiting` and `status()` while the program runs.

    Args:
        rank: of the world.
        recording: whether to write events and check calls. Counts of what was posted are kept in
            any case.
        payload_bytes: events of up to this many bytes keep their values.
        keep_waiting: whether the program handles the time limits of its groups itself (see
            WatchedWork.caught_after).
    """

    def __init__(
        self,
        rank: int,
        *,
        recording: bool,
        payload_bytes: int = 0,
        keep_waiting: bool = False,
    ):
        self.rank = rank
        self.recording = recording
        self.keep_waiting = keep_waiting
        # whether each time in which the program is blocked in a call becomes a span
        self.record_waits = False
        # in unrecorded(), the name under which its calls are numbered, so that later ones keep
        # their numbers
        self.unrecorded_label = ""
        self.payload_bytes = payload_bytes
        # in a checked run, called with every call when it is posted, before torch gets it
        self.on_call: Callable[[Call], None] | None = None
        self.thread = threading.get_ident()  # the program's own
        self.clock: Any = CpuClock()
        # who waits for whom
        # the call in which the program's own thread is blocked
        self.waiting: WatchedWork | None = None
        self.calls_posted = 0  # messages and collectives
        self.posted: dict[CallKey, collections.deque[PostedMessage]] = {}  # the newest messages
        # messages whose work was dropped without a wait, and where: gloo cancels them
        self.dropped: dict[tuple[CallKey, int], str] = {}
        # by group: how many, and the names of the last ones
        self.collectives: dict[str, tuple[int, collections.deque[str]]] = {}
        self.compared: dict[str, int] = {}  # calls to compare, by the ranks that make them
        # works whose future torch or the program has
        self.futures: collections.deque[WatchedWork] = collections.deque()
        # the record; in place of seconds, events have moments of the clock
        self.recorded: list[Event] = []
        # takes events away from `recorded`, if only the newest are kept; and sums of the others
        self.last_events: LastEvents | None = None
        self.earlier: list[Event] = []
        self.unfinished_works: weakref.WeakSet[WatchedWork] = weakref.WeakSet()
        # torch's own work, if it is a collective, and the event
        self.dropped_works: collections.deque[tuple[dist.Work | None, Event]]
        self.dropped_works = collections.deque(maxlen=MOST_DROPPED)
        self.unwaited: list[Call] = []  # sends and receives for which the program never waited
        # what the program does between its calls, in `parallel101 run`
        self.waited = 0.0  # seconds in which it was blocked in a call, if these are recorded
        self.host_time: HostTime | None = None

    # ---- what spans.Recorder asks for ----

    def now(self) -> Any:
        return self.clock.now()

    def add_span(
        self, name: str, start: Any, end: Any, args: dict[str, Any], waiting: bool = False
    ) -> None:
        if self.unrecorded_label:
            return
        taken = 0 if self.last_events is None else self.last_events.taken
        seq = taken + len(self.recorded)
        about: dict[str, Any] = {"where": caller(), "seq": seq, "waiting": waiting}
        self.recorded.append(span_event(self.rank, name, start, end, args, **about))

    def add_wait(self, call: Call, began: Any) -> None:
        """Record that the program was blocked in a call until now.

        That is recorded if it took longer than to call torch does.
        """
        end = self.now()
        if isinstance(end, float):
            self.waited += end - began
            if end - began < SHORTEST_WAIT:
                return
        self.add_span(call.kind, began, end, call.wait_labels, waiting=True)

    def compute(self, seconds: float) -> None:
        """Do nothing: real ranks compute in real time."""

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        before, self.unrecorded_label = self.unrecorded_label, " unrecorded"
        try:
            yield
        finally:
            self.unrecorded_label = before

    def agree(self, kind: str, ranks: Sequence[int], within: str, alike: Mapping[str, Any]) -> int:
        if self.on_call is None:
            return 0
        call = call_to_compare(
            self.rank, kind, ranks, within + self.unrecorded_label, alike, self.compared
        )
        self.on_call(call)
        return call.seq

    # ---- who waits for whom ----

    def next_seq(self, key: CallKey, where: str, nbytes: int) -> int:
        """Count a message."""
        self.calls_posted += 1
        messages = self.posted.get(key)
        if messages is None:
            messages = collections.deque(maxlen=NEWEST)
        seq = messages[-1][0] + 1 if messages else 1
        messages.append((seq, where, nbytes))
        self.posted[key] = messages  # now, since another thread may read its last entry
        return seq

    def count_collective(self, group: str, operation: str) -> int:
        """Count a collective of a group.

        `operation` is what all its ranks must call (see CollectiveSpec.operation).
        """
        self.calls_posted += 1
        count, recent = self.collectives.get(group) or (0, collections.deque(maxlen=RECENT))
        recent.append(operation)
        self.collectives[group] = count + 1, recent
        return count + 1

    @contextmanager
    def blocked_in(self, work: WatchedWork, recorded: bool = True) -> Iterator[None]:
        """Mark the program's own thread as possibly blocked in a call, inside the block.

        `recorded`: whether the time becomes a span, in a run that records them.
        """
        before, self.waiting = self.waiting, work
        began = self.now() if recorded and self.record_waits else None
        try:
            yield
        finally:
            self.waiting = before
            if began is not None:
                self.add_wait(work.call, began)

    def status(
        self,
        blocked: Call | None = None,
        limit: float | None = None,
        *,
        returned: bool = False,
        messages: int = 1,
    ) -> RankStatus:
        """Return this rank's report: the call it is blocked in, and all that it has posted so far.

        `messages`: how many of the newest ones with a key are in it.
        """
        while True:
            with suppress(RuntimeError):  # another thread posts while the counts are copied
                return RankStatus(
                    blocked,
                    returned,
                    {key: list(newest)[-messages:] for key, newest in dict(self.posted).items()},
                    {g: (n, list(names)) for g, (n, names) in dict(self.collectives).items()},
                    dict(self.dropped),
                    limit,
                )

    # ---- the record ----

    @property
    def events(self) -> list[EventRow]:
        """Return the events recorded so far, or the newest of them.

        `earlier` then has the sums of the others.
        """
        self._end_dropped(run_is_over=False)
        if self.last_events is None:
            return self._rows(self.recorded)
        rows, self.earlier = self.last_events.rows(lambda: self._rows(self.recorded))
        return rows

    def keeping_last(self, limit: int, files: RankFiles | None = None) -> LastEvents:
        """Return a context in which the newest events are kept only, and sums of the others.

        Args:
            limit: how many events, at least.
            files: to which they are written while the program runs.
        """
        self.last_events = LastEvents(
            limit, self.recorded, self.clock.in_seconds, lambda: self.unfinished, files
        )
        return self.last_events

    @property
    def unfinished(self) -> list[EventRow]:
        """Return calls that were posted and not seen to end, as events that end now."""
        now = self.now()
        self._end_dropped(run_is_over=False)
        dropped = [event._replace(end=now) for _, event in self.dropped_works]
        works = [(work, work.began) for work in list(self.unfinished_works) if not work.unrecorded]
        events = [work.event(began, now) for work, began in works if began is not None]
        return self._rows(events + dropped)

    def close(self) -> None:
        """End calls that were never waited for, as far as is known, because the run is over."""
        for work in list(self.unfinished_works):
            work.note_unwaited()
            work.ended()
        self._end_dropped(run_is_over=True)
        if self.recording:
            self.clock.catch_up()

    def _end_dropped(self, run_is_over: bool) -> None:
        """Write the events of collectives whose work was dropped and that have ended since.

        When the run is over, all of them have.
        """
        now = self.now()
        for _ in range(len(self.dropped_works)):
            try:
                work, event = self.dropped_works.popleft()
            except IndexError:  # another thread does the same
                return
            if work is not None and (run_is_over or (work.is_completed() and work.is_success())):
                self.recorded.append(event._replace(end=now))
            else:
                self.dropped_works.append((work, event))

    def _rows(self, events: list[Event]) -> list[EventRow]:
        return [tuple(event) for event in self.clock.in_seconds(list(events))]


class Ended(dist.Work):
    """The work of a call for which torch's backend returns none.

    NCCL's does so for a collective that isn't asynchronous: what the program does next on the GPU
    comes after it. (And monitored_barrier, which is over when it returns.)
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    is_completed = is_success = wait


def _contents(tensor: torch.Tensor) -> bytes | int:
    """Return the tensor's bytes, or samples of them; on a GPU, how often torch wrote to its memory.

    To read the memory of a GPU would wait for it. (Writes through x.data aren't counted there.)
    """
    if tensor.is_cpu:
        return snapshot(tensor.data_ptr(), tensor.nbytes)
    return -1 if tensor.is_inference() else tensor._version


def _of_inner(method: str) -> Any:
    """Return a method that calls the one of torch's own work."""
    return lambda self: getattr(self.inner, method)()


class WatchedWork(dist.Work):
    """A call that may block, and torch's own work of it.

    It notes when the program waits in it, and whether it is dropped. In a recorded run it writes an
    event when the call ends.

    Args:
        group: the RecordedGroup in which the call is made.
        limit: seconds after which torch ends it with an error; None: torch's default.
        limit_in_call: whether the limit was given to this call alone.
    """

    inner: dist.Work
    waited = False
    # False for a message that gloo cancels if the work is dropped now; a collective goes on
    kept = True
    # on NCCL, the works of its batch: waiting for one is waiting for all
    batch: Sequence[WatchedWork] = ()
    # in a recorded run, from the start of the call to its end: the group, start and payload of the
    # event, the tensors that must not change until the wait() with their contents, and the tensor
    # of a receive whose values are kept
    began: Began | None = None
    inputs: Sequence[tuple[torch.Tensor, bytes | int]] = ()
    received: torch.Tensor | None = None

    def __init__(
        self, group: Any, call: Call, limit: float | None = None, limit_in_call: bool = False
    ):
        super().__init__()
        self.group, self.call, self.recorder = group, call, group.recorder
        self.limit, self.limit_in_call = limit, limit_in_call
        self.unrecorded = bool(self.recorder.unrecorded_label)

    def record(
        self, group: EventGroup, inputs: Sequence[torch.Tensor], payload: list | None
    ) -> Began:
        """Note that the call starts now, and what its inputs contain."""
        self.inputs = [(tensor, _contents(tensor)) for tensor in inputs]
        return group, self.recorder.now(), payload

    def event(self, began: Began, end: Any) -> Event:
        group, start, payload = began
        return self.call.event(group, start, start, end, payload)

    def started(self, inner: dist.Work | None, began: Began | None = None) -> WatchedWork:
        """Take what torch's backend has returned for the call; return itself.

        `began`: in a recorded run, what `record` has returned.
        """
        self.inner, self.began = inner or Ended(), began
        self.kept = self.call.kind not in P2P
        if began is not None:
            self.recorder.unfinished_works.add(self)
        return self

    @property
    def caught_after(self) -> float | None:
        """Return the seconds after which the program handles its own time limit's error.

        A program says that it does so by giving the limit to the call itself, as in
        `work.wait(timedelta(seconds=5))`, or by `keep_waiting`. The limit of a group does not say
        it: many scripts pass one to init_process_group. None: it does not handle it.
        """
        return self.limit if self.limit_in_call or self.recorder.keep_waiting else None

    def __del__(self) -> None:
        if self.began is not None:
            self.note_unwaited()
            # nobody will see it end: a collective ends anyway, a message may or may not
            if not self.unrecorded:
                work = None if self.call.kind in P2P else self.inner
                event = self.event(self.began, self.began[1])
                self.recorder.dropped_works.append((work, event))
        if not self.kept:
            self.recorder.dropped[self.call.key, self.call.seq] = self.call.where

    def note_unwaited(self) -> None:
        """Note that the work's rank has dropped it, or returned.

        A message that the program has not waited for may not have arrived.
        """
        if self.call.kind in P2P and not self.kept:
            self.recorder.unwaited.append(self.call)

    def wait(self, *timeout: Any) -> bool:
        recorder, is_message = self.recorder, self.call.kind in P2P
        # on gloo, a second wait() for a message waits for another message
        if self.waited and is_message and self.group.backend == "gloo":
            raise waited_twice(recorder.rank, self.call.kind)
        works = self.batch or (self,)
        for work in works:
            work.kept = True
        in_program = threading.get_ident() == recorder.thread
        if in_program:
            if timeout:
                self.limit, self.limit_in_call = own_limit(*timeout), True
            elif self.limit is not None and is_message:
                # gloo's messages keep the limit that their group began with
                timeout = (timedelta(seconds=self.limit),)
        with recorder.blocked_in(self) if in_program else nullcontext():
            answer = self.inner.wait(*timeout)
        self.waited |= in_program
        for work in works:
            work.ended(checked=True)
        return answer

    def is_completed(self) -> bool:
        if done := self.inner.is_completed():
            self.kept = True
            self.ended(checked=True)
        return done

    is_success = _of_inner("is_success")
    exception = _of_inner("exception")
    result = _of_inner("result")
    synchronize = _of_inner("synchronize")
    _source_rank = source_rank = _of_inner("_source_rank")

    def get_future(self) -> Any:
        self.kept = True
        self.recorder.futures.append(self)
        if self.began is None:
            return self.inner.get_future()
        if self.recorder.record_waits:
            # where DDP's C++ waits for this future, which Python would not see
            torch_private.after_backward(self.wait)
        return self.inner.get_future().then(self._passed_on)

    def _passed_on(self, future: Any) -> Any:
        self.ended()
        return future.value()

    def ended(self, checked: bool = False) -> None:
        """Write the event, once.

        With `checked`, raise MisuseError if a tensor that the rank passed has changed.
        """
        began, self.began = self.began, None
        if began is None:
            return
        recorder, call = self.recorder, self.call
        recorder.unfinished_works.discard(self)
        inputs, self.inputs = self.inputs, ()
        received, self.received = self.received, None
        if not self.unrecorded:
            event = self.event(began, recorder.now())
            if received is not None:
                event = event._replace(payload=values([received]))
            if call.from_anyone:
                # such receives are numbered separately, and so have a negative seq
                peer = self.group.ranks[self.inner._source_rank()]
                event = event._replace(peer=peer, seq=-call.seq)
            recorder.recorded.append(event)
        if checked and any(_contents(tensor) != before for tensor, before in inputs):
            raise tensor_changed(call)
