"""The thread in each rank that reports while the program's thread is blocked.

It says in which call, at which line, and what was posted so far.

    program's thread   … compute … ──wait()───────────────────────────▶ …
    watcher            ·    ·    ·    ·  "blocked in recv from 3, at a.py:7" ·    ·  "unblocked"

It looks ten times a second. Counts of what was posted only grow, and a blocked rank posts nothing.
So the newest reports of all ranks together tell a deadlock for certain (see record/wait_for.py).
C code that holds Python's lock keeps it from running, too. Then the rank doesn't answer.

    gloo's thread      throws, and nobody catches it ──▶ sends this rank's last calls ──▶ abort

gloo throws in a thread of its own when more bytes arrive than a rank expects. Then C++ calls the
function that std::set_terminate has got. (Crashes by a signal do not come here.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import torch

from parallel101.laboratory.ranks.wire import (
    ABORTS,
    CALLS,
    EXIT,
    PLACE,
    RECORD,
    STACKS,
    STATUS,
    RankRecord,
    RankStack,
    Wire,
)
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.program_lines import caller, is_inside, is_library, where
from parallel101.laboratory.record.recorder import NEWEST, RankRecorder, WatchedWork

TICK = 0.1  # seconds between two looks
IN_CPP_FOR = 0.5  # seconds without CPU time after which a thread in torch's C++ counts as blocked
MOST_FRAMES = 20  # of a stack: the innermost ones are kept
# std::set_terminate, in the names that the C++ of Linux and macOS gives to functions
SET_TERMINATE = "_ZSt13set_terminatePFvvE"
LIBRARIES = ("libstdc++.so.6", "libc++.1.dylib")
exit_process = os._exit  # on sim os._exit ends one virtual rank only


class ControlThread(threading.Thread):
    """Answers the process that watches the run.

    Attributes:
        may_exit: set when the rank need not wait for others any more.
        outcome: in a job, what all ranks returned and recorded, packed.
    """

    def __init__(self, wire: Wire):
        super().__init__(daemon=True, name="parallel101 watcher")
        self.wire = wire
        self.may_exit = threading.Event()
        self.outcome: Any = None

    def run(self) -> None:
        while not self.may_exit.is_set():
            self.listen()
            with contextlib.suppress(OSError):  # the socket is gone: the next `listen` says so
                self.look()

    def listen(self) -> None:
        """Answer for up to a TICK."""
        if not select.select([self.wire], [], [], TICK)[0]:
            return
        try:
            kind, value = self.wire.receive()
        except (EOFError, OSError):
            return self.unwatched()
        if kind == EXIT:
            self.outcome = value
            self.may_exit.set()
        elif kind == STACKS:
            self.wire.send(STACKS, self.stacks())
        elif kind == RECORD:
            self.send_record()
        else:
            self.failed(*value)

    def unwatched(self) -> None:
        """End this process, because the one that watches it is gone."""
        exit_process(1)

    def failed(self, error: BaseException, teller: int) -> None:
        """End this rank of a job, because the run has failed."""

    def look(self) -> None:
        """Report what has changed. It is called ten times a second."""

    def send_record(self) -> None:
        """Send what was recorded so far."""

    def stacks(self) -> list[RankStack]:
        """Return the stack of each rank of this process."""
        return []


class QuietClock:
    """Notes since when a state is the same, and the CPU time that the process uses.

    Attributes:
        quiet, busy: as in a RankStack, at the last look.
    """

    EVERY = 1.0  # seconds between two samples

    def __init__(self) -> None:
        self.state: object = self
        self.since = self.quiet = self.busy = 0.0
        self.older = self.newer = (-1.0, 0.0)  # samples: the time and the CPU time

    def look(self, state: object) -> bool:
        """Look at the state, and return whether that took a sample. Call it often."""
        now, cpu = time.monotonic(), time.process_time()
        if state != self.state:
            self.state, self.since = state, now
        if sampled := now - self.newer[0] >= self.EVERY:
            self.older, self.newer = self.newer, (now, cpu)
        self.quiet = now - self.since
        self.busy = (cpu - self.older[1]) / (now - self.older[0])
        return sampled


@contextlib.contextmanager
def before_exits(call: Callable[[int], Any]) -> Iterator[None]:
    """Inside the block, call `call(code)` before the program ends this process.

    It does so by os._exit, by os.abort, or by a signal to itself, whose code is negative. What it
    has forked, such as a DataLoader's worker, is another process.
    """
    own = os.getpid()

    def replaced(
        real: Callable[..., Any], code_of: Callable[..., int | None]
    ) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            code = code_of(*args, **kwargs)
            if os.getpid() == own and code is not None:
                call(code)
            return real(*args, **kwargs)

        return function

    with mock.patch.multiple(
        os,
        _exit=replaced(os._exit, lambda status: status),
        abort=replaced(os.abort, lambda: -signal.SIGABRT),
        kill=replaced(os.kill, lambda pid, number: -number if pid == own else None),
    ):
        yield


HANDLER = ctypes.CFUNCTYPE(None)


@contextlib.contextmanager
def before_cpp_aborts(call: Callable[[], Any]) -> Iterator[None]:
    """Inside the block, call `call()` when C++ is about to abort this process.

    A thread has then thrown an exception that nothing catches. The call is on that thread.
    """
    set_terminate: Any = lambda handler: None  # noqa: E731
    for name in LIBRARIES:  # one of them, or none on other systems
        with contextlib.suppress(OSError, AttributeError):
            set_terminate = ctypes.CDLL(name)[SET_TERMINATE]
            set_terminate.argtypes, set_terminate.restype = [HANDLER], ctypes.c_void_p
            break

    @HANDLER
    def terminate() -> None:
        call()
        HANDLER(before)()  # prints the exception, and aborts

    before = set_terminate(terminate)
    try:
        yield
    finally:
        set_terminate(HANDLER(before or 0))


# where torch waits for futures in C++
_WAITING = (*torch.autograd.__path__, *torch.futures.__path__)


class Watcher(ControlThread):
    """The watcher of a real rank: what it posts, what it is blocked in, where its program is.

    Args:
        recorder: of the rank.
        on_record: in a job, takes this rank's record, once, when its program has ended or is about
            to be stopped. The record that is sent then has no events.

    Attributes:
        outside: where the rank is, if not in the program; else "".
    """

    def __init__(
        self,
        recorder: RankRecorder,
        wire: Wire,
        on_record: Callable[[RankRecord], None] | None = None,
    ):
        super().__init__(wire)
        self.recorder, self.on_record = recorder, on_record
        self.with_events, self.keeping = on_record is None, threading.Lock()
        self.outside = "its start, before the program"
        self.calls: list[Call] = []  # that have been posted, and not reported yet
        if recorder.recording:
            recorder.on_call = self.calls.append
        self.sending_calls = threading.Lock()  # the program's thread reports the last ones
        self.clock = QuietClock()
        # of the thread in C++: frame, instruction, CPU time used
        self.position: tuple[int, int, float] | None = None
        self.since = 0.0
        # the call that blocked the program at the last look, and the one that was reported last
        self.seen: Call | None = None
        self.reported: Call | None = None

    def look(self) -> None:
        """Report what has changed.

        A call that blocks the program counts only from the second look.
        """
        if self.clock.look(self.recorder.calls_posted) and not self.outside:
            self.wire.send(PLACE, self.place())
        self.send_calls()
        work = self.blocked_in()
        call = None if work is None else work.call
        seen, self.seen = self.seen, call
        if call is self.reported or (call is not None and call is not seen):
            return
        self.reported = call
        blocked, limit = None, None
        if work is not None:
            blocked, limit = work.call._replace(where=self.place()), work.caught_after
        self.wire.send(STATUS, self.recorder.status(blocked, limit))

    def exits(self, code: int) -> None:
        """Report the line by which the program ends this process."""
        with contextlib.suppress(OSError):
            self.wire.send(PLACE, caller())

    def aborts(self) -> None:
        """Report that C++ is about to abort this process, with the program's last calls."""
        with contextlib.suppress(OSError):
            self.send_record()
            self.wire.send(PLACE, self.place())
            self.wire.send(ABORTS)

    def send_calls(self) -> None:
        with self.sending_calls:
            if new := self.calls[:]:
                del self.calls[: len(new)]
                self.wire.send(CALLS, new)

    def send_record(self, imported: Sequence[str] = ()) -> None:
        """Send what was posted and recorded so far."""
        self.send_calls()
        record = self.record() if self.with_events else RankRecord([], [], self.recorder.unwaited)
        record = record._replace(imported=imported)
        self.wire.send(RECORD, (record, self.recorder.status(messages=NEWEST)))
        self.keep_record()

    def keep_record(self) -> None:
        """Pass on what this rank has recorded, unless that has been done."""
        with self.keeping:
            keep, self.on_record = self.on_record, None
            if keep is not None:
                keep(self.record())

    def record(self) -> RankRecord:
        """Return the record of this rank so far."""
        events = self.recorder.events  # and with it the sums of earlier ones
        earlier = [*map(tuple, self.recorder.earlier)]
        unfinished, unwaited = self.recorder.unfinished, self.recorder.unwaited
        return RankRecord(events, unfinished, unwaited, earlier=earlier)

    def place(self) -> str:
        """Return the "file:line" at which the program is."""
        return where(sys._current_frames().get(self.recorder.thread))

    def stacks(self) -> list[RankStack]:
        self.look()  # first: what the rank has told before may no longer be so
        frame = sys._current_frames().get(self.recorder.thread)
        doing = stack_lines(frame), self.clock.quiet, self.clock.busy
        # the program's innermost frame, or else a library's
        frames = traceback.walk_stack(frame) if frame is not None else ()
        own = ((f.f_code.co_filename, line) for f, line in frames)
        lines = (f"{name}:{line}" for name, line in own if not is_library(name))
        place = self.outside or next(lines, "") or where(frame)
        return [RankStack(self.recorder.rank, place, *doing)]

    def blocked_in(self) -> WatchedWork | None:
        """Return the call in which the program is blocked.

        None while it runs, and while another of its threads may still post.
        """
        if self.recorder.host_time is not None:
            self.recorder.host_time.sample()
        waiting = self.recorder.waiting or self._in_backward()
        return None if waiting is None or _others_at_work(self.recorder.thread) else waiting

    def _in_backward(self) -> WatchedWork | None:
        """Return the call whose future torch's C++ waits for, as DDP's backward does.

        Its wait() is not seen in Python.
        """
        futures = self.recorder.futures
        while futures and futures[0].inner.is_completed():
            futures.popleft()
        frame = sys._current_frames().get(self.recorder.thread) if futures else None
        position = None
        if frame is not None and frame.f_code.co_filename.startswith(_WAITING):
            cpu = getattr(time, "pthread_getcpuclockid", None)  # not on macOS
            if cpu is not None:
                used = time.clock_gettime(cpu(self.recorder.thread))
                position = id(frame), frame.f_lasti, used
        if position != self.position:
            self.position, self.since = position, time.monotonic()
        waits = position is not None and time.monotonic() - self.since >= IN_CPP_FOR
        return futures[0] if waits else None


def _others_at_work(program: int) -> bool:
    """Return whether the program has another thread that may post something.

    A thread that runs a library's code only does not count.
    """
    known = {program, threading.get_ident()}
    if threading.active_count() <= len(known):
        return False
    # Not this thread's: a frame that refers to itself would hold the program's frames, and so every
    # tensor in their variables, until Python looks for cycles.
    frames = {thread: at for thread, at in sys._current_frames().items() if thread not in known}
    for thread in threading.enumerate():
        stack = traceback.walk_stack(frames[thread.ident]) if thread.ident in frames else ()
        own = any(not is_library(f.f_code.co_filename) for f, _ in stack)
        if thread.ident not in known and (own or isinstance(thread, threading.Timer)):
            return True
    return False


# ---- where the program is ----


def stack_lines(frame: FrameType | None) -> list[str]:
    """Return the Python stack as lines of text, without our frames that called the program."""
    if frame is None:
        return []
    frames = list(traceback.walk_stack(frame))[::-1]
    # the outermost ones run the program: ours, and the fork server's own first line
    names = [f.f_code.co_filename for f, _ in frames]
    own = [k for k, name in enumerate(names) if not is_inside(name) and name != "<string>"]
    summary = traceback.StackSummary.extract(iter(frames[own[0] :] if own else frames))
    left_out = len(summary) - MOST_FRAMES
    text = "".join(traceback.format_list(summary[-MOST_FRAMES:])).splitlines()
    return [f"  … {left_out} outer calls", *text] if left_out > 0 else text
