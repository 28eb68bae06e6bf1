"""Measures a rank's own thread between its calls: it computes, loads data, or is blocked.

    program   ▇▇▇▇▇▇░░░░▇▇▇▇▇▇▇░░░░░      ▇ its own time    ░ blocked in a call
    samples        ·     ·     ·          the line in which it is, ten times a second

All ranks leave an all-reduce at the same time, so each of them takes as long for a step as the
slowest one. Their own times differ, and `analysis/slower_ranks.py` compares them.

The seconds are exact: at each step of an optimizer the thread reads the clock, its CPU time and, on
Linux, how long it was ready to run without a core. That takes about 4 µs a step. A call costs one
addition, and a garbage collection two clock reads. Only the lines come from samples, which the
watcher of the rank takes when it looks what the program is blocked in. (A thread that sampled more
often would slow the program: to look, it needs Python's lock, and on a machine with more ranks than
cores the program waits until that thread has got a core.)

A rank on a GPU only queues its work, so nothing is measured there. Nothing is measured on sim.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch.utils.data

from parallel101.laboratory.record.events import EventRow, span_event
from parallel101.laboratory.record.program_lines import is_library, where
from parallel101.spans import HOST_TIME

MOST_WINDOWS = 256  # of a rank, an even number; then two neighbours become one
MOST_LINES = 12  # of a window
_DATA = os.path.dirname(torch.utils.data.__file__) + os.sep


class MeasuredRank(Protocol):
    """The attributes of a RankRecorder that HostTime needs."""

    rank: int
    thread: int  # the program's
    waited: float  # seconds in which the program was blocked in a call
    waiting: Any  # the call in which it is blocked, or None

    def now(self) -> Any: ...


class LineSamples(NamedTuple):
    """The samples that found the thread in one line."""

    number: int
    busy: float  # of these, in how many it used the CPU; a part of one if it used it partly

    def plus(self, other: LineSamples) -> LineSamples:
        return LineSamples(self.number + other.number, self.busy + other.busy)


# ("file:line", whether it loads data there) → samples
Lines = dict[tuple[str, bool], LineSamples]


class StepWindow(NamedTuple):
    """Some steps of one rank, one after the other. Times are in seconds."""

    first: int  # the first step, from 1; 0 for a run without steps
    steps: int
    start: float  # on the run's clock
    end: float
    own: float  # in which it was not blocked in a call
    busy: float  # in which the thread used the CPU
    queued: float  # in which it was ready to run and had no core
    collecting: float  # in garbage collections
    lines: Lines

    def joined(self, later: StepWindow) -> StepWindow:
        lines = dict(self.lines)
        for key, samples in dict(later.lines).items():
            lines[key] = lines.get(key, LineSamples(0, 0.0)).plus(samples)
        return StepWindow(
            self.first,
            self.steps + later.steps,
            self.start,
            later.end,
            self.own + later.own,
            self.busy + later.busy,
            self.queued + later.queued,
            self.collecting + later.collecting,
            dict(_longest(lines)),
        )


def _longest(lines: Lines) -> list[tuple[tuple[str, bool], LineSamples]]:
    return sorted(dict(lines).items(), key=lambda entry: -entry[1].number)[:MOST_LINES]


class Totals(NamedTuple):
    """Seconds since the start of the program's thread."""

    now: float  # on the run's clock
    waited: float  # blocked in calls
    busy: float
    queued: float
    collecting: float


class HostTime:
    """Measures the program's thread of a rank.

    It is made by that thread. A window ends with a step of an optimizer (see `step`); a run without
    steps is one window.
    """

    def __init__(self, recorder: MeasuredRank):
        self.recorder = recorder
        self.cpu = ThreadClock()
        self.windows: list[StepWindow] = []
        self.width = 1  # steps of a window
        self.steps = 0  # made so far
        self.collecting_since = self.collected = 0.0
        # of the window that has not ended
        self.first = 1
        self.before = self._totals()
        self.lines: Lines = {}
        # of the last sample: when, and the thread's CPU time
        self.sampled = self.before.now, self.before.busy

    def _totals(self) -> Totals:
        now, recorder = self.recorder.now(), self.recorder
        return Totals(now, recorder.waited, self.cpu.busy(), self.cpu.queued(), self.collected)

    # ---- called by the program's thread ----

    def step(self) -> None:
        """Note that a step has ended."""
        self.steps += 1
        if self.steps % self.width == 0:
            totals, lines, self.lines = self._totals(), self.lines, {}
            self.windows.append(self._window(totals, lines))
            self.first, self.before = self.steps + 1, totals
            if len(self.windows) == MOST_WINDOWS:  # all ranks do this after the same step
                pairs = zip(self.windows[::2], self.windows[1::2])
                self.windows = [earlier.joined(later) for earlier, later in pairs]
                self.width *= 2

    def _window(self, totals: Totals, lines: Lines) -> StepWindow:
        passed = [b - a for a, b in zip(self.before, totals)]
        elapsed, waited, busy, queued, collecting = passed
        steps = self.steps + 1 - self.first
        return StepWindow(
            self.first,
            steps,
            self.before.now,
            totals.now,
            elapsed - waited,
            busy,
            queued,
            collecting,
            lines,
        )

    def collecting(self, phase: str, info: Any) -> None:
        """Note the start or the end of a garbage collection. Python calls it."""
        if threading.get_ident() != self.recorder.thread:
            return
        if phase == "start":
            self.collecting_since = time.perf_counter()
        else:
            self.collected += time.perf_counter() - self.collecting_since

    # ---- called by the watcher ----

    def sample(self) -> None:
        """Note the line in which the program is, unless it is blocked in a call."""
        frame = sys._current_frames().get(self.recorder.thread)
        now, busy = self.recorder.now(), self.cpu.busy()
        (last, busy_then), self.sampled = self.sampled, (now, busy)
        if self.recorder.waiting is not None or frame is None or now <= last:
            return
        key, lines = (own_line(frame), loads_data(frame)), self.lines
        share = min(1.0, max(0.0, busy - busy_then) / (now - last))
        lines[key] = lines.get(key, LineSamples(0, 0.0)).plus(LineSamples(1, share))

    # ---- the record ----

    def rows(self) -> list[EventRow]:
        """Return an event for each window. Its labels have the numbers."""
        windows = list(self.windows)
        if self.steps == 0:
            windows = [self._window(self._totals(), self.lines)._replace(first=0, steps=0)]
        return [
            tuple(
                span_event(
                    rank=self.recorder.rank,
                    name=HOST_TIME,
                    start=window.start,
                    end=window.end,
                    seq=0,
                    where="",
                    labels=labels_of(window),
                )
            )
            for window in windows
        ]


NUMBERS = ("first", "steps", "own", "busy", "queued", "collecting")


def labels_of(window: StepWindow) -> dict[str, Any]:
    """Return a window as the labels of its event. `window_of` reads them."""
    labels: dict[str, Any] = {name: getattr(window, name) for name in NUMBERS}
    labels["lines"] = [[*key, *samples] for key, samples in _longest(window.lines)]
    return labels


def window_of(labels: dict[str, Any], start: float, end: float) -> StepWindow:
    lines = {
        (place, loads): LineSamples(count, busy) for place, loads, count, busy in labels["lines"]
    }
    numbers = {name: labels[name] for name in NUMBERS}
    return StepWindow(**numbers, start=start, end=end, lines=lines)


def own_line(frame: FrameType) -> str:
    """Return the innermost line of the program's own.

    That is a line outside torch, and outside any library if there is one.
    """
    own: FrameType | None = frame
    while own is not None and is_library(own.f_code.co_filename):
        own = own.f_back
    return where(own or frame)


def loads_data(frame: FrameType | None) -> bool:
    """Return whether a thread is inside torch.utils.data: it waits for a batch, or makes it."""
    for _ in range(12):  # frames; the program's own is at most so far away
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(_DATA):
            return True
        frame = frame.f_back
    return False


class ThreadClock:
    """Measures how long this thread has run, and was ready to run without a core, in seconds.

    Any thread may ask.
    """

    def __init__(self) -> None:
        self.thread = thread = threading.get_ident()
        self.clock = (
            time.pthread_getcpuclockid(thread) if hasattr(time, "pthread_getcpuclockid") else None
        )
        # not Thread.native_id, which in a forked process may be that of the parent's thread
        native, self.file = threading.get_native_id(), -1
        with contextlib.suppress(OSError):
            # man 5 proc, /proc/pid/schedstat: ns on the CPU, ns in the run queue, time slices
            self.file = os.open(f"/proc/self/task/{native}/schedstat", os.O_RDONLY)
        self.last = 0.0

    def busy(self) -> float:
        """Return the seconds that the thread has run.

        Without clocks for threads (macOS), it is the value at the thread's own last question.
        """
        if threading.get_ident() == self.thread:
            self.last = time.thread_time()
        elif self.clock is not None:
            self.last = time.clock_gettime(self.clock)
        return self.last

    def queued(self) -> float:
        """Return the seconds ready to run without a core; 0 if the system does not tell."""
        return int(os.pread(self.file, 64, 0).split()[1]) / 1e9 if self.file >= 0 else 0.0

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


@contextlib.contextmanager
def host_time(recorder: Any, backend: str) -> Iterator[HostTime | None]:
    """Measure the program's thread inside the block; on gloo only."""
    if not hasattr(recorder, "host_time") or "gloo" not in backend:
        yield None
        return
    recorder.host_time = measured = HostTime(recorder)
    gc.callbacks.append(measured.collecting)
    try:
        yield measured
    finally:
        gc.callbacks.remove(measured.collecting)
