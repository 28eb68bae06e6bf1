"""Between its calls, a rank's thread computes, loads data, collects garbage or is blocked: it is
measured how long, and samples tell in which line.
"""

from __future__ import annotations

import gc
import json
import sys
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
    """What was done in each of these steps, with a sample every 10 ms. Each gets the recorder."""
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
                step(recorder)
                times.append(measuring.step())
        finally:
            over.set()
            watcher.join()
    assert measuring.collecting not in gc.callbacks
    assert [RankStep(*json.loads(json.dumps(step))) for step in times] == times
    return times


def compute(_):
    end = time.thread_time() + LONG
    while time.thread_time() < end:
        torch.ones(10).sum()


def in_a_call(recorder):
    recorder.waiting, began = object(), time.perf_counter()
    time.sleep(LONG)
    recorder.waited += time.perf_counter() - began
    recorder.waiting = None


def test_what_a_thread_did_and_in_which_line():
    lock = threading.Lock()
    lock.acquire()
    steps = [
        compute,
        lambda _: time.sleep(LONG),
        lambda _: lock.acquire(timeout=LONG),
        lambda _: list(DataLoader(Slow())),
        in_a_call,
    ]
    *windows, called = measured(*steps)
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
    # a sample may fall between the call and its ends
    assert called.own < LONG / 2 and sum(number for *_, number, _ in called.lines) < 3


def test_garbage_collections_are_timed():
    gc.freeze()  # what other tests have left takes seconds to look through
    gc.disable()  # no other collection in the window
    garbage, took = [[] for _ in range(200_000)], []

    def collect(_):
        began = time.perf_counter()
        gc.collect()
        took.append(time.perf_counter() - began)

    try:
        (window,) = measured(collect)
    finally:
        gc.enable()
        gc.unfreeze()
    assert 0.5 * took[0] < window.collecting <= took[0] <= window.own and len(garbage)


def test_lines_of_libraries_count_for_the_line_that_called_them():
    seen = []

    class Odd:
        def __iter__(self):
            seen.append(own_line(sys._getframe(1)))
            return iter(())

    Counter(Odd())  # collections/__init__.py iterates over it
    assert seen[0].startswith(__file__)


def test_a_run_without_steps_is_step_0_and_nothing_is_measured_elsewhere():
    recorder = RankRecorder(0, recording=True)
    sampler = HostTime(recorder)
    assert sampler.step(last=True).step == 0 and sampler.step().step == 1
    with host_time(object(), "sim") as on_sim, host_time(recorder, "nccl") as on_nccl:
        assert on_sim is on_nccl is None
