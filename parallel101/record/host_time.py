"""What a rank's own thread does between its calls: it computes, loads data, or is blocked.

    program   ▇▇▇▇▇▇░░░░▇▇▇▇▇▇▇░░░░░      ▇ its own time    ░ blocked in a call
    samples   · · · · · · · · · · ·       line, and whether the thread used the CPU

All ranks leave an all-reduce at the same time, so each of them takes as long for a step as the
slowest one. Their own times differ, and `analysis/slower_ranks.py` compares them.

The program pays for one addition in each call, one clock read in each step of an optimizer and two
in each garbage collection. A thread takes samples, at first 50 times a second: it reads the line
of the program's thread and, from the operating system, its CPU time. On Linux it also reads how
long the thread was ready to run without a core.

A rank on a GPU only queues its work, so nothing is sampled there. Nothing is sampled on sim.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.utils.data

from parallel101.record.events import EventRow, span_event
from parallel101.record.where import is_inside, where

if TYPE_CHECKING:
    from parallel101.record.recorder import RankRecorder

HOST_TIME = "host time"  # the name of the events
# seconds between two samples: at first, and after so many. Each takes about 0.1 ms of the CPU on
# our machine, most of it for the wakeup: 0.5 % of a core, then 0.2 %
PERIOD, LATER_PERIOD, FIRST_SAMPLES = 0.02, 0.05, 1000
MOST_WINDOWS = 256  # of a rank, an even number; then two neighbours become one
MOST_LINES = 12  # of a window

# what a thread did
COMPUTING = "computing"
LOADING = "loading data"
COLLECTING = "garbage collection"
BLOCKED = "blocked: sleep, lock, file or GPU"
QUEUED = "waiting for a free core"
_DATA = os.path.dirname(torch.utils.data.__file__) + os.sep
_INSTALLED = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

Doing = dict[tuple[str, str], float]  # (what, "file:line") → seconds


class StepWindow(NamedTuple):
    """Some steps of one rank, one after the other."""

    first: int  # the first step, from 1
    steps: int
    start: float  # on the run's clock
    end: float
    own: float  # seconds in which it was not blocked in a call
    doing: Doing  # from samples

    def joined(self, later: StepWindow) -> StepWindow:
        doing = dict(self.doing)
        for (what, where), seconds in dict(later.doing).items():
            _count(doing, what, where, seconds)
        return StepWindow(
            self.first,
            self.steps + later.steps,
            self.start,
            later.end,
            self.own + later.own,
            dict(_longest(doing)),
        )


def _count(doing: Doing, what: str, where: str, seconds: float) -> None:
    if seconds > 0:
        doing[what, where] = doing.get((what, where), 0.0) + seconds


def _longest(doing: Doing) -> list[tuple[tuple[str, str], float]]:
    return sorted(dict(doing).items(), key=lambda entry: -entry[1])[:MOST_LINES]


class HostTime(threading.Thread):
    """Samples the program's thread of a rank, until `stop()`.

    A window ends with a step of an optimizer (see `step`); a run without steps is one window.
    """

    def __init__(self, recorder: RankRecorder):
        super().__init__(daemon=True, name="parallel101 host time")
        self.recorder = recorder
        self.windows: list[StepWindow] = []
        self.width = 1  # steps of a window
        self.steps = 0  # made so far
        self.first = 1  # step of the window that has not ended
        self.began = recorder.now()
        self.waited = recorder.waited
        self.doing: Doing = {}  # of the window that has not ended
        # seconds in which the thread neither ran nor is known to have been blocked, and where
        self.idle: tuple[Doing, str, float] | None = None
        self.collecting_since = 0.0
        self.collected = 0.0  # seconds of garbage collection, in all
        self.over = False

    # ---- called by the program's thread ----

    def step(self) -> None:
        """A step has ended."""
        self.steps += 1
        if self.steps % self.width == 0:
            window = self._window()
            self.windows.append(window)
            self.first, self.began, self.waited = self.steps + 1, window.end, self.recorder.waited
            self.doing = {}
            if len(self.windows) == MOST_WINDOWS:  # all ranks do this after the same step
                pairs = zip(self.windows[::2], self.windows[1::2])
                self.windows = [earlier.joined(later) for earlier, later in pairs]
                self.width *= 2

    def _window(self) -> StepWindow:
        now, first = self.recorder.now(), self.first
        own = now - self.began - (self.recorder.waited - self.waited)
        steps = self.steps + 1 - first
        return StepWindow(first, steps, self.began, now, own, self.doing)

    def collecting(self, phase: str, info: Any) -> None:
        """Called by Python before and after a garbage collection."""
        if threading.get_ident() != self.recorder.thread:
            return
        now = time.perf_counter()
        if phase == "start":
            self.collecting_since = now
        else:
            self.collected += now - self.collecting_since
            _count(self.doing, COLLECTING, "", now - self.collecting_since)

    # ---- the thread that samples ----

    def run(self) -> None:
        with cpu_clock(self.recorder.thread) as used:
            self._sample(used)

    def _sample(self, used: Callable[[], tuple[float, float]]) -> None:
        last, collected, newest = time.perf_counter(), 0.0, None
        cpu, queued = used()
        was_waiting = False
        for sample in itertools.count():
            # an Event's wait takes half as much CPU again
            time.sleep(PERIOD if sample < FIRST_SAMPLES else LATER_PERIOD)
            if self.over:
                break
            recorder = self.recorder
            waiting = recorder.waiting is not None
            recorded = recorder.recorded
            event = recorded[-1] if recorded else None
            called = waiting or was_waiting or event is not newest  # since the last sample
            frame = None if waiting else sys._current_frames().get(recorder.thread)
            now, (cpu_now, queued_now) = time.perf_counter(), used()
            in_collection, collected = self.collected - collected, self.collected
            elapsed = max(0.0, now - last - in_collection)
            busy = min(elapsed, max(0.0, cpu_now - cpu - in_collection))
            in_queue = queued_now - queued
            ready = min(elapsed - busy, in_queue)
            if busy or in_queue:
                self._settle(in_queue - ready)
            if frame is not None:
                # of an interval with a call, the rest may be a wait
                self._add(frame, busy, ready, 0.0 if called else elapsed - busy - ready)
            last, cpu, queued, newest, was_waiting = now, cpu_now, queued_now, event, waiting
        self._settle(0.0)

    def _add(self, frame: FrameType, busy: float, ready: float, idle: float) -> None:
        place, doing = own_line(frame), self.doing
        if loads_data(frame):
            _count(doing, LOADING, place, busy + ready + idle)
            return
        _count(doing, COMPUTING, place, busy)
        _count(doing, QUEUED, place, ready)
        before = self.idle[2] if self.idle is not None else 0.0  # the thread is still there
        self.idle = (doing, place, before + idle)

    def _settle(self, in_queue: float) -> None:
        """The thread runs again. Of the time in which it did not, so much was in the queue.

        Linux counts a time in the queue when it ends.
        """
        if self.idle is not None:
            doing, place, seconds = self.idle
            _count(doing, QUEUED, place, min(seconds, in_queue))
            _count(doing, BLOCKED, place, seconds - min(seconds, in_queue))
            self.idle = None

    def stop(self) -> None:
        self.over = True
        self.join()

    # ---- the record ----

    def rows(self) -> list[EventRow]:
        """An event for each window. Its labels have the numbers."""
        windows = list(self.windows)
        if self.steps == 0 and self.recorder.now() > self.began:
            windows = [self._window()._replace(first=0, steps=0)]
        return [
            tuple(
                span_event(
                    rank=self.recorder.rank,
                    name=HOST_TIME,
                    start=window.start,
                    end=window.end,
                    seq=0,
                    where="",
                    labels={
                        "first": window.first,
                        "steps": window.steps,
                        "own": window.own,
                        "doing": [[*key, seconds] for key, seconds in _longest(window.doing)],
                    },
                )
            )
            for window in windows
        ]


def own_line(frame: FrameType) -> str:
    """The innermost line of the program's own: not of torch, and of no library if there is one."""
    own: FrameType | None = frame
    while own is not None and is_library(own.f_code.co_filename):
        own = own.f_back
    return where(own or frame)


def is_library(filename: str) -> bool:
    return is_inside(filename) or filename.startswith(_INSTALLED)


def loads_data(frame: FrameType | None) -> bool:
    """Whether a thread is inside of torch.utils.data: it waits for a batch, or makes it."""
    for _ in range(12):  # frames; the program's own is at most so far away
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(_DATA):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def cpu_clock(thread: int) -> Iterator[Callable[[], tuple[float, float]]]:
    """Yields a function that says for how long a thread has run, and was ready without a core.

    In seconds. The second is 0 where the operating system does not tell; without a clock for
    threads (macOS), the thread seems to run all the time.
    """
    native = next((t.native_id for t in threading.enumerate() if t.ident == thread), None)
    try:
        # man 5 proc, /proc/pid/schedstat: ns on the CPU, ns in the run queue, time slices
        file = os.open(f"/proc/self/task/{native}/schedstat", os.O_RDONLY)
    except OSError:
        if not hasattr(time, "pthread_getcpuclockid"):
            yield lambda: (time.perf_counter(), 0.0)
        else:
            clock = time.pthread_getcpuclockid(thread)
            yield lambda: (time.clock_gettime(clock), 0.0)
        return

    def read() -> tuple[float, float]:
        run, ready, _ = os.pread(file, 64, 0).split()
        return int(run) / 1e9, int(ready) / 1e9

    try:
        yield read
    finally:
        os.close(file)


@contextlib.contextmanager
def host_time(recorder: Any, backend: str) -> Iterator[HostTime | None]:
    """Inside, the program's thread is sampled; on gloo only."""
    if not hasattr(recorder, "host_time") or "gloo" not in backend:
        yield None
        return
    recorder.host_time = sampler = HostTime(recorder)
    gc.callbacks.append(sampler.collecting)
    sampler.start()
    try:
        yield sampler
    finally:
        gc.callbacks.remove(sampler.collecting)
        sampler.stop()
