"""When there is a report of stuck ranks, and what it says. Clocks are given by hand."""

from __future__ import annotations

import math

import pytest

from parallel101.laboratory.ranks.rank_stack import RankStack
from parallel101.laboratory.ranks.stuck import SILENT, StuckDetector, rank_lines, stuck_text
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
        status.collectives = {"world": (1, ["all_reduce"])}
    return graph(waits[0], RankStatus(), waits[2])


def test_reports_come_with_pauses_that_double_until_something_moves():
    detector, ranks = StuckDetector(30.0), one_is_missing()
    told = []
    now = 0.0
    while now < 300.0:
        now = max(now, detector.due(now, ranks))
        assert detector.stuck(now, {1: now + 1})
        told.append(now)
    assert told == [30.0, 90.0, 210.0, 450.0] and detector.pause == 480.0
    ranks.ranks[0].blocked = ranks.ranks[2].blocked = None
    assert detector.due(500.0, ranks) == math.inf
    ranks.ranks[0].blocked = call(0, "recv", 1)
    assert detector.due(501.0, ranks) == 531.0, "a new wait begins with the first pause"


def test_a_rank_that_still_calls_something_postpones_the_report():
    detector, ranks = StuckDetector(30.0), one_is_missing()
    detector.due(0.0, ranks)
    assert not detector.stuck(30.0, {1: 12.0})
    assert detector.due(30.0, ranks) == 30.0 + 30.0 - 12.0
    assert detector.stuck(48.0, {1: 30.0})


def test_ranks_that_have_returned_wait_for_those_that_have_not():
    ranks = graph(RankStatus(returned=True), RankStatus(), RankStatus(returned=True))
    detector = StuckDetector(30.0)
    assert detector.due(0.0, ranks) == 30.0
    assert not detector.stuck(30.0, {1: 29.0})
    assert detector.stuck(31.0, {1: 30.0})
    ranks.ranks[1].returned = True
    assert detector.due(32.0, ranks) == math.inf


def test_a_rank_that_begins_to_wait_is_progress_and_one_that_does_not_answer_is_none():
    ranks = graph(RankStatus(call(0, "recv", 1)), RankStatus(), RankStatus())
    detector = StuckDetector(30.0)
    detector.due(0.0, ranks)
    ranks.ranks[1].blocked = call(1, "recv", 2)
    assert detector.due(20.0, ranks) == 50.0
    assert detector.stuck(50.0, {}), "rank 2 does not answer"


def test_nothing_is_due_without_a_limit_or_a_wait():
    assert StuckDetector(math.inf).due(9.0, one_is_missing()) == math.inf
    assert StuckDetector(30.0).due(9.0, graph(RankStatus(), RankStatus())) == math.inf


@pytest.mark.parametrize(("busy", "does"), [(0.02, "is blocked"), (0.98, "computes or loops")])
def test_a_report_has_who_waits_for_whom_and_the_stack_of_the_rank_that_does_not_come(busy, does):
    stack = RankStack(1, "train.py:7", ['  File "train.py", line 7'], 31.0, busy)
    lines = rank_lines(one_is_missing(), {1: stack}, details=True)
    assert lines[0] == "rank 0 waits in all_reduce for rank 1, at here.py:0"
    assert lines[1] == "rank 1 is at train.py:7"
    assert "In 31 s it has called nothing of torch.distributed." in lines[2]
    assert f"Now it uses {busy:.0%} of a core: it {does}." in lines[2]
    assert lines[-2].strip() == 'File "train.py", line 7'
    text = stuck_text(lines, 30.9, 60.0)
    assert "no progress for 30 s" in text and "The run goes on" in text
    assert "the next report comes in 60 s" in text


def test_ranks_that_have_returned_and_that_do_not_answer_are_named():
    returned = RankStatus(returned=True)
    lines = rank_lines(graph(returned, RankStatus(), returned), {}, SILENT)
    assert lines[0] == "ranks 0 and 2 have returned" and lines[1].startswith("rank 1 does not")
