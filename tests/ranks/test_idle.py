"""IdleDetector tells ranks that are stuck from ranks that compute for long, by their CPU time."""

from __future__ import annotations

import os
from itertools import count

import pytest

from parallel101.laboratory.ranks import diagnosis
from parallel101.laboratory.ranks.diagnosis import (
    BUSY_FOR,
    IDLE_CPU,
    IDLE_FOR,
    SAMPLE,
    IdleDetector,
)


class GivenTimes(IdleDetector):
    """Ranks whose CPU times are given, a list for each look."""

    def __init__(self, looks):
        super().__init__([])
        self.looks = iter(looks)

    def _cpu_seconds(self):
        return next(self.looks)


def stuck_at(detector, all_wait=lambda now: True, until=10.0, dropped_receive=False):
    """The time at which the detector first says that the ranks are stuck; None if it does not."""
    for now in (k * SAMPLE for k in count()):
        if detector.stuck(now, all_wait(now), dropped_receive):
            return now
        if now > until:
            return None


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A machine with less work than cores, whatever else runs on it."""
    monkeypatch.setattr(diagnosis, "work_per_core", lambda: 0.5)


def test_ranks_that_do_not_work_count_as_stuck_after_a_while():
    assert stuck_at(GivenTimes([1.0, 2.0 + 0.1 * IDLE_CPU * k] for k in range(5))) == IDLE_FOR


def test_on_a_busy_machine_it_takes_longer(monkeypatch):
    monkeypatch.setattr(diagnosis, "work_per_core", lambda: 4.0)
    assert stuck_at(GivenTimes([0.0] for _ in count())) == 2 * IDLE_FOR


@pytest.mark.parametrize("busy", [0, 1])
def test_one_rank_that_works_is_enough(busy):
    assert (
        stuck_at(
            GivenTimes([k * 2 * IDLE_CPU * (rank == busy) for rank in range(2)] for k in count())
        )
        is None
    )


def test_a_rank_that_does_not_wait_starts_the_time_again():
    assert (
        stuck_at(GivenTimes([0.0] for _ in count()), all_wait=lambda now: now != 2 * SAMPLE)
        == 3 * SAMPLE + IDLE_FOR
    )


def test_after_a_dropped_receive_ranks_that_wait_count_as_stuck_although_a_thread_of_gloo_spins():
    def busy():
        return GivenTimes([k * 2 * IDLE_CPU] * 2 for k in count())

    assert stuck_at(busy()) is None
    assert stuck_at(busy(), dropped_receive=True) == BUSY_FOR
    assert (
        stuck_at(busy(), all_wait=lambda now: now != SAMPLE, dropped_receive=True)
        == 2 * SAMPLE + BUSY_FOR
    )


def test_ranks_whose_cpu_time_is_unknown_do_not_count_as_stuck():
    assert stuck_at(GivenTimes(None for _ in count())) is None


def test_cpu_time_is_that_of_the_processes():
    (before,) = IdleDetector([os.getpid()])._cpu_seconds()
    while IdleDetector([os.getpid()])._cpu_seconds()[0] - before <= IDLE_CPU:
        pass
    assert IdleDetector([2**22 + 1])._cpu_seconds() is None, "nobody's pid"
