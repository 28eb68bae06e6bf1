"""The thread in each rank that reports while the program's thread is blocked.

It says in which call, at which line, and what was posted so far.

    program's thread   … compute … ──wait()───────────────────────────▶ …
    watcher            ·    ·    ·    ·  "blocked in recv from 3, at a.py:7" ·    ·  "unblocked"

It looks ten times a second. Counts of what was posted only grow, and a blocked rank posts nothing.
So the newest reports of all ranks together tell a deadlock for certain (see record/wait_for.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from parallel101.laboratory.ranks.rank_stack import (
    QuietClock,
    RankStack,
    program_place,
    stack_lines,
)
from parallel101.laboratory.ranks.uncaught_in_cpp import UncaughtInCpp
from parallel101.laboratory.ranks.wire import (
    ASK_RECORD,
    ASK_STACKS,
    CALLS,
    EXIT,
    RECORD,
    STACKS,
    STATUS,
    RankRecord,
    Wire,
)
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.program_lines import is_library, where
from parallel101.laboratory.record.recorder import NEWEST, RankRecorder, WatchedWork

TICK = 0.1  # seconds between two looks
IN_CPP_FOR = 0.5  # seconds without CPU time after which a thread in torch's C++ counts as blocked
exit_process = os._exit  # on sim os._exit ends one virtual rank only


def recorded(recorder: RankRecorder, imported: Sequence[str] = ()) -> RankRecord:
    """Return the record of a rank so far."""
    events = recorder.events  # and with it the sums of earlier ones
    return RankRecord(
        events,
        recorder.unfinished,
        recorder.unwaited,
        earlier=[*map(tuple, recorder.earlier)],
        imported=imported,
    )


class ControlThread(threading.Thread):
    """Answers the launching process.

    `may_exit` is set when the rank may exit. If the launching process is gone, the rank exits at
    once.
    """

    def __init__(self, wire: Wire):
        super().__init__(daemon=True, name="parallel101 watcher")
        self.wire = wire
        self.may_exit = threading.Event()

    def run(self) -> None:
        while not self.may_exit.is_set():
            if select.select([self.wire], [], [], TICK)[0]:
                self._answer()
            with contextlib.suppress(OSError):  # the socket is gone: the next _answer exits
                self.look()

    def _answer(self) -> None:
        try:
            kind, _ = self.wire.receive()
        except (EOFError, OSError):
            exit_process(1)
        if kind == EXIT:
            self.may_exit.set()
        elif kind == ASK_STACKS:
            self.wire.send(STACKS, self.stacks())
        elif kind == ASK_RECORD:
            self.send_record()

    def look(self) -> None:
        """Report what has changed. It is called ten times a second."""

    def send_record(self) -> None:
        """Send what was recorded so far."""

    def stacks(self) -> list[RankStack]:
        """Return the stack of each rank of this process."""
        return []


# where torch waits for futures in C++
_WAITING = (*torch.autograd.__path__, *torch.futures.__path__)


class RankObserver:
    """Observes a real rank: what it posts, what it is blocked in, and where its program is.

    Args:
        recorder: of the rank.
        send: takes the reports: STATUS and a RankStatus, or in a checked run CALLS and a list.
    """

    def __init__(self, recorder: RankRecorder, send: Callable[[bytes, Any], None]):
        self.recorder, self.send = recorder, send
        self.calls: list[Call] = []  # that have been posted, and not reported yet
        if recorder.recording:
            recorder.on_call = self.calls.append
        self.sending_calls = threading.Lock()  # the program's thread reports the last ones
        self.clock, self.uncaught = QuietClock(), UncaughtInCpp()
        # of the thread in C++: frame, instruction, CPU time used
        self.position: tuple[int, int, float] | None = None
        self.since = 0.0
        # the call that blocked the program at the last look, and the one that was reported last
        self.seen: Call | None = None
        self.reported: Call | None = None

    def look(self) -> None:
        """Report what has changed. Call it ten times a second.

        A call that blocks the program counts only from the second look.
        """
        self.clock.look(self.recorder.calls_posted)
        self.send_calls()
        work = self.blocked_in()
        call = None if work is None else work.call
        seen, self.seen = self.seen, call
        if call is self.reported or (call is not None and call is not seen):
            return
        self.reported = call
        if work is None:
            return self.send(STATUS, self.recorder.status())
        blocked = work.call._replace(where=self.place())
        self.send(STATUS, self.recorder.status(blocked, work.caught_after))

    def send_calls(self) -> None:
        with self.sending_calls:
            if new := self.calls[:]:
                del self.calls[: len(new)]
                self.send(CALLS, new)

    def place(self) -> str:
        """Return the "file:line" at which the program is."""
        return where(sys._current_frames().get(self.recorder.thread))

    def stack(self, outside: str = "") -> RankStack:
        """Return the stack now. `outside`: where the rank is, if it isn't in its program."""
        recorder, frame = self.recorder, sys._current_frames().get(self.recorder.thread)
        quiet, busy = self.clock.look(recorder.calls_posted)
        place = outside or program_place(frame)
        return RankStack(recorder.rank, place, stack_lines(frame), quiet, busy)

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
        if (
            frame is None
            or not frame.f_code.co_filename.startswith(_WAITING)
            or not hasattr(time, "pthread_getcpuclockid")
        ):
            self.position = None
            return None
        position = (
            id(frame),
            frame.f_lasti,
            time.clock_gettime(time.pthread_getcpuclockid(self.recorder.thread)),
        )
        now = time.monotonic()
        if position != self.position:
            self.position, self.since = position, now
        return futures[0] if now - self.since >= IN_CPP_FOR else None


class Watcher(ControlThread):
    """The watcher of a real rank."""

    def __init__(self, recorder: RankRecorder, wire: Wire):
        super().__init__(wire)
        self.observer = RankObserver(recorder, wire.send)
        # where the rank is, if not in the program; else ""
        self.outside = "its start, before the program"

    def look(self) -> None:
        self.observer.look()
        uncaught = self.observer.uncaught
        if uncaught.thrown.is_set() and not uncaught.may_abort.is_set():
            self.send_record()
            uncaught.may_abort.set()

    def send_record(self, imported: Sequence[str] = ()) -> None:
        """Send what was posted and recorded so far."""
        self.observer.send_calls()
        recorder = self.observer.recorder
        self.wire.send(RECORD, (recorded(recorder, imported), recorder.status(messages=NEWEST)))

    def stacks(self) -> list[RankStack]:
        return [self.observer.stack(self.outside)]


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
    others = [thread for thread in threading.enumerate() if thread.ident not in known]
    return any(
        isinstance(thread, threading.Timer) or _in_program(frames.get(thread.ident or 0))
        for thread in others
    )


def _in_program(frame: FrameType | None) -> bool:
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
