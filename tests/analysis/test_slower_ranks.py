"""A rank whose own time in a step is longer than the others' is found, with the steps, the cause
and the line.
"""

from __future__ import annotations

from collections import Counter

import pytest

from parallel101.laboratory.analysis.slower_ranks import (
    BLOCKED,
    COLLECTING,
    COMPUTING,
    LOADING,
    QUEUED,
    slower_ranks,
)
from parallel101.laboratory.analysis.waiting import with_compute
from parallel101.laboratory.record.events import span_event
from parallel101.laboratory.record.host_time import RankStep
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.run_table import tables
from parallel101.spans import OPTIMIZER_STEP

STEP = 0.29


def trace(own, size=4, steps=40):
    """A record in which `own(rank, step)` is what a rank did in a step: [what, line, seconds]."""
    events = []
    for rank in range(size):
        for step in range(1, steps + 1):
            doing, seconds = own(rank, step), Counter()
            for what, _, took in doing:
                seconds[what] += took
            lines = [  # a sample each ms
                [line, what == LOADING, round(1e3 * took), 1e3 * took * (what == COMPUTING)]
                for what, line, took in doing
                if line
            ]
            time = RankStep(
                step=step,
                elapsed=STEP,
                own=seconds.total(),
                busy=seconds[COMPUTING] + seconds[COLLECTING],
                queued=seconds[QUEUED],
                collecting=seconds[COLLECTING],
                lines=lines,
            )
            end, labels = STEP * step, time._asdict()
            events.append(span_event(rank, OPTIMIZER_STEP, end, end, labels))
    return Trace(events, size, "gloo")


def usual(rank, step):
    return [[COMPUTING, "train.py:9", 0.09 + 0.001 * rank]]


def test_a_rank_that_is_slower_since_some_step():
    def own(rank, step):
        slow = rank == 2 and step >= 11
        return usual(rank, step) + [[COMPUTING, "train.py:5", 0.2]] * slow

    (row,) = slower_ranks(trace(own))
    assert (row.rank, row.slower, row.first, row.last, row.steps) == (2, 30, 11, 40, 39)
    assert row.seconds == pytest.approx(0.2, abs=0.002)
    (cause,) = row.causes
    assert (cause.what, cause.where) == (COMPUTING, "train.py:5")
    assert cause.seconds == pytest.approx(0.2, abs=0.002)
    (table,) = [table for table in tables(trace(own)) if table.title.startswith("Slower")]
    ((rank, more, what, steps, line),) = table.rows
    assert (rank, what, steps) == ("2", "computing", "30 of 39, from 11")
    assert more in ("200 ms", "201 ms") and line.startswith("train.py:5")
    # the marks appear in no picture
    assert not with_compute(trace(own)).spans(OPTIMIZER_STEP)


def test_ranks_that_are_alike_are_not_named():
    once = lambda rank, step: 9.0 if rank == step == 3 else 0.1  # noqa: E731
    first = lambda rank, step: 9.0 if rank and step == 1 else 0.1  # noqa: E731
    for took in (once, first):
        assert not slower_ranks(trace(lambda r, step, t=took: [[COMPUTING, "a.py:1", t(r, step)]]))
    assert slower_ranks(trace(usual)) == slower_ranks(Trace([], 4, "gloo")) == []


def test_two_causes_in_some_steps():
    def own(rank, step):
        slow = rank == 0 and step % 2 == 0
        extra = [[COLLECTING, "", 0.15], [BLOCKED, "data.py:3", 0.1]]
        return usual(rank, step) + extra * slow

    (row,) = slower_ranks(trace(own, steps=64))
    assert (row.rank, row.slower, row.first, row.last, row.steps) == (0, 32, 2, 64, 63)
    first, second = ((cause.what, cause.where) for cause in row.causes)
    assert first == (COLLECTING, "") and second == (BLOCKED, "data.py:3")
    assert row.seconds == pytest.approx(0.25, abs=0.003)


@pytest.mark.parametrize("what", [COMPUTING, LOADING, QUEUED, BLOCKED])
def test_each_cause(what):
    def own(rank, step):
        return usual(rank, step) + [[what, "train.py:5", 0.2]] * (rank == 3)

    (row,) = slower_ranks(trace(own))
    (cause,) = row.causes
    assert (row.rank, cause.what, cause.where) == (3, what, "train.py:5")
    assert cause.seconds == pytest.approx(0.2, abs=0.01)


def test_a_run_without_steps_is_compared_as_a_whole():
    def own(rank, step):
        return [[COMPUTING, "infer.py:2", 3.0 if rank == 1 else 1.0]]

    whole = trace(own, size=2, steps=1)
    for event in whole.events:
        event.args.update(step=0)
    (row,) = slower_ranks(whole)
    assert (row.rank, row.first, row.seconds) == (1, 0, pytest.approx(2.0))
