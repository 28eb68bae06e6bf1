"""Between its calls, a rank's thread computes, loads data, collects garbage or is blocked: the
samples tell which, and in which line.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter

import torch
from torch.utils.data import DataLoader, Dataset

from parallel101.record import host_time as module
from parallel101.record.host_time import (
    BLOCKED,
    COLLECTING,
    COMPUTING,
    LOADING,
    QUEUED,
    HostTime,
    host_time,
    own_line,
)
from parallel101.record.recorder import RankRecorder

LONG = 0.25  # seconds: a dozen samples


def compute():
    end = time.thread_time() + LONG
    while time.thread_time() < end:
        torch.ones(10).sum()


class Slow(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(LONG / 2)
        return torch.ones(1)


def sampled(*steps):
    """What the sampler says of each step: a Counter of seconds by (what, line)."""
    recorder = RankRecorder(0, recording=True)
    with host_time(recorder, "gloo") as sampler:
        for step in steps:
            step()
            sampler.step()
    assert sampler.collecting not in gc.callbacks and not sampler.is_alive()
    return sampler, [Counter(window.doing) for window in sampler.windows]


def test_what_a_thread_did_and_in_which_line():
    slept = lambda: time.sleep(LONG)  # noqa: E731
    lock = threading.Lock()
    lock.acquire()
    sampler, windows = sampled(
        compute, slept, lambda: lock.acquire(timeout=LONG), lambda: list(DataLoader(Slow()))
    )
    for of in windows:  # on a busy machine
        for key in [key for key in of if key[0] == QUEUED]:
            del of[key]
    kinds = [max(of, key=of.get) for of in windows]
    assert [what for what, _ in kinds] == [COMPUTING, BLOCKED, BLOCKED, LOADING]
    code = compute.__code__
    lines = {f"{code.co_filename}:{line}" for *_, line in code.co_lines() if line}
    assert kinds[0][1] in lines
    assert kinds[3][1].startswith(__file__), "the line of the dataset, not of torch"
    assert [window.first for window in sampler.windows] == [1, 2, 3, 4]
    assert all(window.own >= LONG * 0.9 for window in sampler.windows)
    assert len(sampler.rows()) == 4


def test_garbage_collections_are_timed_exactly():
    garbage = [[] for _ in range(200_000)]
    took = []

    def collect():
        began = time.perf_counter()
        gc.collect()
        took.append(time.perf_counter() - began)

    (window,) = sampled(collect)[1]
    assert 0.5 * took[0] < window[COLLECTING, ""] <= took[0]
    assert len(garbage)


def test_time_in_a_call_does_not_count():
    recorder = RankRecorder(0, recording=True)
    with host_time(recorder, "gloo") as sampler:
        recorder.waiting = object()  # type: ignore[assignment]
        began = time.perf_counter()
        time.sleep(LONG)
        recorder.waited += time.perf_counter() - began
        recorder.waiting = None
        sampler.step()
    (window,) = sampler.windows
    assert window.own < LONG / 2 and sum(window.doing.values()) < LONG / 2


def test_a_long_run_keeps_few_windows(monkeypatch):
    monkeypatch.setattr(module, "MOST_WINDOWS", 8)
    sampler = HostTime(RankRecorder(0, recording=True))
    for _ in range(100):
        sampler.step()
    assert sampler.width == 16
    assert [(w.first, w.steps) for w in sampler.windows] == [(k, 16) for k in range(1, 97, 16)]


def test_lines_of_libraries_count_for_the_line_that_called_them():
    import json
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


def test_nothing_is_sampled_elsewhere():
    before = threading.active_count()
    for recorder, backend in ((object(), "sim"), (RankRecorder(0, recording=True), "nccl")):
        with host_time(recorder, backend) as sampler:
            assert sampler is None and threading.active_count() == before
