"""Between its calls, a rank's thread computes, loads data, collects garbage or is blocked: it is
measured how long, and samples tell in which line.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from parallel101.laboratory.record.host_time import (
    HostTime,
    RankStep,
    host_time,
    own_line,
)
from parallel101.laboratory.record.recorder import RankRecorder

LONG = 0.25  # seconds


class Slow(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(LONG / 2)
        return torch.ones(1)


def measured(*steps):
    """What was done in each of these steps, with a sample every 10 ms."""
    recorder = RankRecorder(0, recording=True)
    over, times = threading.Event(), []
    with host_time(recorder, "gloo") as measuring:

        def look():
            while not over.wait(0.01):
                measuring.sample()

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            for step in steps:
                step()
                times.append(measuring.step())
        finally:
            over.set()
            watcher.join()
    assert measuring.collecting not in gc.callbacks
    assert [RankStep(*json.loads(json.dumps(step))) for step in times] == times
    return times


def compute():
    end = time.thread_time() + LONG
    while time.thread_time() < end:
        torch.ones(10).sum()


def test_what_a_thread_did_and_in_which_line():
    slept = lambda: time.sleep(LONG)  # noqa: E731
    lock = threading.Lock()
    lock.acquire()
    steps = [compute, slept, lambda: lock.acquire(timeout=LONG), lambda: list(DataLoader(Slow()))]
    windows = measured(*steps)
    computed, *blocked = windows
    assert computed.busy == pytest.approx(LONG, rel=0.3) and computed.own >= computed.busy
    for window in blocked:
        assert window.busy < LONG / 2 and window.own >= LONG * 0.9
        assert window.queued <= window.own
    most = [window.lines[0] for window in windows]  # they are in order of their samples
    assert [loads for _, loads, *_ in most] == [False, False, False, True]
    code = compute.__code__
    assert most[0][0] in {f"{code.co_filename}:{line}" for *_, line in code.co_lines()}
    assert most[3][0].startswith(__file__), "the line of the dataset, not of torch"
    assert [window.step for window in windows] == [1, 2, 3, 4]


def test_garbage_collections_are_timed():
    gc.freeze()  # what other tests have left takes seconds to look through
    gc.disable()  # no other collection in the window
    garbage = [[] for _ in range(200_000)]
    took = []

    def collect():
        began = time.perf_counter()
        gc.collect()
        took.append(time.perf_counter() - began)

    try:
        (window,) = measured(collect)
    finally:
        gc.enable()
        gc.unfreeze()
    assert 0.5 * took[0] < window.collecting <= took[0] <= window.own and len(garbage)


def test_time_in_a_call_does_not_count():
    recorder = RankRecorder(0, recording=True)
    with host_time(recorder, "gloo") as measuring:
        recorder.waiting = object()  # type: ignore[assignment]
        began = time.perf_counter()
        time.sleep(LONG)
        measuring.sample()
        recorder.waited += time.perf_counter() - began
        recorder.waiting = None
        window = measuring.step()
    assert window.own < LONG / 2 and not window.lines


def test_a_run_without_steps_is_one_step_with_number_0():
    sampler = HostTime(RankRecorder(0, recording=True))
    assert sampler.step(last=True).step == 0 and sampler.step().step == 1


def test_lines_of_libraries_count_for_the_line_that_called_them():
    import sys

    seen = []

    class Odd:
        def __iter__(self):
            seen.append(own_line(sys._getframe(1)))
            return iter(())

    json.dumps({}, default=str)
    os.path.join("a", "b")
    Counter(Odd())  # collections/__init__.py iterates over it
    (place,) = seen
    assert place.startswith(__file__)


def test_nothing_is_measured_elsewhere():
    for recorder, backend in ((object(), "sim"), (RankRecorder(0, recording=True), "nccl")):
        with host_time(recorder, backend) as measuring:
            assert measuring is None
