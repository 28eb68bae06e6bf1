"""A standstill is told from long work by the CPU time of the ranks' processes."""

from __future__ import annotations

import os
from itertools import count

import pytest

from parallel101.ranks.diagnosis import IDLE, LOOK, STILL, Stillness


class Clocks(Stillness):
    """Ranks whose CPU time is a list given for each look."""

    def __init__(self, looks):
        super().__init__([])
        self.looks = iter(looks)

    def _spent(self):
        return next(self.looks)


def first_believed(stillness, all_wait=lambda now: True, until=10.0):
    for now in (k * LOOK for k in count()):
        if stillness.lasts(now, all_wait(now)):
            return now
        if now > until:
            return None


def test_ranks_without_work_stand_still_after_a_while():
    assert first_believed(Clocks([1.0, 2.0 + 0.1 * IDLE * k] for k in range(5))) == STILL


@pytest.mark.parametrize("busy", [0, 1])
def test_one_rank_that_works_is_enough(busy):
    assert first_believed(Clocks([k * 2 * IDLE * (rank == busy) for rank in range(2)] for k in count())) is None


def test_a_rank_that_does_not_wait_begins_it_anew():
    assert first_believed(Clocks([0.0] for _ in count()), all_wait=lambda now: now != 2 * LOOK) == 3 * LOOK + STILL


def test_what_can_not_be_known_is_no_standstill():
    assert first_believed(Clocks(None for _ in count())) is None


def test_cpu_time_is_that_of_the_processes():
    (before,) = Stillness([os.getpid()])._spent()
    while Stillness([os.getpid()])._spent()[0] - before <= IDLE:
        pass
    assert Stillness([2**22 + 1])._spent() is None, "nobody's pid"
