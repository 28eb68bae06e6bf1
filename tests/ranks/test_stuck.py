"""When there is a report of stuck ranks, about whom, and what it says. Clocks are given by hand."""

from __future__ import annotations

import math

import pytest

from parallel101.laboratory.ranks.rank_stack import RankStack
from parallel101.laboratory.ranks.stuck import StuckDetector, report_lines, stuck_text
from parallel101.laboratory.record.wait_for import RankStatus, WaitForGraph
from tests.record.test_calls import call


def graph(*statuses):
    made = WaitForGraph(len(statuses))
    made.ranks = list(statuses)
    return made


def one_is_missing():
    """Ranks 0 and 2 wait for rank 1, which runs."""
    waits = [RankStatus(call(r, "all_reduce", *{0, 1, 2} - {r})) for r in range(3)]
    for status in waits:
        status.collectives, status.recent = {"world": 1}, {"world": ["all_reduce"]}
    return graph(waits[0], RankStatus(), waits[2])


def test_reports_come_with_pauses_that_double_until_something_moves():
    detector, ranks = StuckDetector(30.0), one_is_missing()
    told = []
    now = 0.0
    while now < 300.0:
        now = max(now, detector.due(now, ranks))
        assert detector.stuck(now, ranks, {1: now + 1}) == {0, 1, 2}
        told.append(now)
    assert told == [30.0, 90.0, 210.0, 450.0] and detector.pause == 480.0
    ranks.ranks[0].blocked = ranks.ranks[2].blocked = None
    assert detector.due(500.0, ranks) == math.inf
    ranks.ranks[0].blocked = call(0, "recv", 1)
    assert detector.due(501.0, ranks) == 531.0, "a new wait begins with the first pause"


def test_a_rank_that_still_calls_something_postpones_the_report():
    detector, ranks = StuckDetector(30.0), one_is_missing()
    detector.due(0.0, ranks)
    assert detector.stuck(30.0, ranks, {1: 12.0}) == set()
    assert detector.due(30.0, ranks) == 30.0 + 30.0 - 12.0
    assert detector.stuck(48.0, ranks, {1: 30.0}) == {0, 1, 2}


def test_who_waits_for_a_stuck_rank_is_named_however_short_its_own_wait():
    ranks = graph(RankStatus(call(0, "recv", 1)), RankStatus(), RankStatus())
    detector = StuckDetector(30.0)
    detector.due(0.0, ranks)
    ranks.ranks[2].blocked = call(2, "recv", 0)
    assert detector.stuck(30.0, ranks, {1: 99.0}) == {0, 1, 2}


def test_ranks_that_have_returned_wait_for_those_that_have_not():
    ranks = graph(RankStatus(returned=True), RankStatus(), RankStatus(returned=True))
    detector = StuckDetector(30.0)
    assert detector.due(0.0, ranks) == 30.0
    assert detector.stuck(30.0, ranks, {1: 29.0}) == set()
    assert detector.stuck(31.0, ranks, {1: 30.0}) == {0, 1, 2}
    ranks.ranks[1].returned = True
    assert detector.due(32.0, ranks) == math.inf


def test_so_does_a_rank_in_the_chain_that_has_begun_to_wait_only_now():
    ranks = graph(RankStatus(call(0, "recv", 1)), RankStatus(), RankStatus())
    detector = StuckDetector(30.0)
    detector.due(0.0, ranks)
    ranks.ranks[1].blocked = call(1, "recv", 2)
    detector.due(20.0, ranks)
    assert detector.stuck(30.0, ranks, {2: 99.0}) == set()
    assert detector.stuck(detector.due(30.0, ranks), ranks, {2: 99.0}) == {0, 1, 2}


def test_ranks_that_do_not_answer_count_as_stuck_and_others_are_left_out():
    ranks = graph(RankStatus(call(0, "recv", 1)), RankStatus(), RankStatus())
    detector = StuckDetector(30.0)
    detector.due(0.0, ranks)
    assert detector.stuck(31.0, ranks, {2: 0.0}) == {0, 1}, "rank 2 has nothing to do with it"


def test_nothing_is_due_without_a_limit_or_a_wait():
    assert StuckDetector(math.inf).due(9.0, one_is_missing()) == math.inf
    assert StuckDetector(30.0).due(9.0, graph(RankStatus(), RankStatus())) == math.inf


@pytest.mark.parametrize(
    ("cpu", "native", "does"),
    [(0.1, "read in libc.so.6", "it is blocked"), (1.4, "", "it computes or loops")],
)
def test_a_report_has_who_waits_for_whom_and_the_stack_of_the_rank_that_does_not_come(
    cpu, native, does
):
    stack = RankStack(1, "train.py:7", ['  File "train.py", line 7'], native, 31.0, 1.5, cpu)
    lines = report_lines(one_is_missing(), {1: stack}, {0, 1, 2})
    assert lines[0] == "rank 0 waits in all_reduce for rank 1, at here.py:0"
    assert lines[1] == "rank 1 is at train.py:7"
    assert "In 31 s it has called nothing of torch.distributed." in lines[2]
    assert f"In the last 1.5 s it has used {cpu:.1f} s of CPU time" in lines[2]
    assert lines[2].endswith(f"{does}.") and lines[-2].strip() == 'File "train.py", line 7'
    assert (f"  In C: {native}" in lines) == bool(native)
    text = stuck_text(lines, 30.9, 60.0)
    assert "no progress for 30 s" in text and "The run goes on" in text
    assert "the next report comes in 60 s" in text


def test_ranks_that_have_returned_and_that_do_not_answer_are_named():
    lines = report_lines(graph(RankStatus(returned=True), RankStatus()), {})
    assert lines[0] == "rank 0 has returned" and lines[1].startswith("rank 1 does not answer")
