"""Measures a rank's own thread between its calls: it computes, loads data, or is blocked.

    program   ▇▇▇▇▇▇░░░░▇▇▇▇▇▇▇░░░░░      ▇ its own time    ░ blocked in a call
    samples        ·     ·     ·          the line in which it is, ten times a second

All ranks leave an all-reduce at the same time, so each of them takes as long for a step as the
slowest one. Their own times differ, and `analysis/slower_ranks.py` compares them.

The seconds are exact: at each step of an optimizer, the thread reads the clock, its CPU time and,
on Linux, how long it was ready to run without a core. That takes about 4 µs a step. The mark of the
step in the record has them as labels. A call costs one addition, and a garbage collection two clock
reads. Only the lines come from samples, which the watcher of the rank takes when it looks what the
program is blocked in. (A thread that sampled more often would slow the program: to look, it needs
Python's lock, and on a machine with more ranks than cores the program waits until that thread has
got a core.)

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
from typing import Any, NamedTuple

import torch.utils.data

from parallel101.laboratory.record.program_lines import is_library, where

MOST_LINES = 12  # of a step
_DATA = os.path.dirname(torch.utils.data.__file__) + os.sep


class RankStep(NamedTuple):
    """What one rank did in a step: the labels of the step's mark. Times are in seconds."""

    step: int  # from 1; 0 for a run without steps
    elapsed: float
    own: float  # in which it was not blocked in a call
    busy: float  # in which the thread used the CPU
    queued: float  # in which it was ready to run and had no core
    collecting: float  # in garbage collections
    # for each line: "file:line", whether it loads data there, how many samples found the thread
    # in it, and in how many of these it used the CPU (a part of one if it used it partly)
    lines: list[list[Any]]


class HostTime:
    """Measures the program's thread of a rank, a RankRecorder's. It is made by that thread."""

    def __init__(self, recorder: Any):
        self.recorder = recorder
        self.cpu = ThreadClock()
        self.steps = 0  # made so far
        self.collecting_since = self.collected = 0.0
        # of the step that has not ended
        self.before = self._totals()
        self.lines: dict[tuple[str, bool], list[float]] = {}
        # of the last sample: when, and the thread's CPU time
        self.sampled = self.before[0], self.before[2]

    def _totals(self) -> tuple[float, ...]:
        """Return seconds so far: the time, blocked in calls, busy, queued, collecting garbage."""
        now, recorder = self.recorder.now(), self.recorder
        return now, recorder.waited, self.cpu.busy(), self.cpu.queued(), self.collected

    # ---- called by the program's thread ----

    def step(self, last: bool = False) -> RankStep:
        """Return what it did since the last step.

        `last`: the run is over, and no optimizer has made a step.
        """
        self.steps += not last
        before, self.before = self.before, self._totals()
        found = sorted(self.lines.items(), key=lambda entry: -entry[1][0])[:MOST_LINES]
        lines, self.lines = [[*key, *samples] for key, samples in found], {}
        elapsed, waited, busy, queued, collecting = (b - a for a, b in zip(before, self.before))
        own = elapsed - waited
        return RankStep(self.steps, elapsed, own, busy, queued, collecting, lines)

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
        samples = self.lines.setdefault((own_line(frame), loads_data(frame)), [0, 0.0])
        samples[0] += 1
        samples[1] += min(1.0, max(0.0, busy - busy_then) / (now - last))


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
