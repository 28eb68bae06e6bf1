"""When there is a report of stuck ranks, and what it says. Clocks are given by hand.

What a rank's program does is seen from another thread of its process.
"""

from __future__ import annotations

import math
import socket
import sys

import pytest

from parallel101.laboratory.ranks.diagnosis import SILENT, StuckDetector, rank_lines, stuck_text
from parallel101.laboratory.ranks.watcher import Watcher, stack_lines
from parallel101.laboratory.ranks.wire import STACKS, STATUS, RankStack, Wire
from parallel101.laboratory.record.recorder import RankRecorder
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
    while not told or told[-1] < 300.0:
        told.append(max(told[-1] if told else 0.0, detector.due(told[-1] if told else 0.0, ranks)))
        assert detector.stuck(told[-1], {1: told[-1] + 1})
    assert told == [30.0, 90.0, 210.0, 450.0] and detector.pause == 480.0
    ranks.ranks[0].blocked = ranks.ranks[2].blocked = None
    assert detector.due(500.0, ranks) == math.inf
    ranks.ranks[0].blocked = call(0, "recv", 1)
    assert detector.due(501.0, ranks) == 531.0, "a new wait begins with the first pause"


RUNS, WAITS, RETURNED = RankStatus(), RankStatus(call(0, "recv", 1)), RankStatus(returned=True)
DUE = {  # a limit, the ranks → when there is a first look; then, who has called nothing so long
    "no limit": (math.inf, [WAITS, RUNS], math.inf, {}),
    "nobody waits": (30.0, [RUNS, RUNS], math.inf, {}),
    "all have returned": (30.0, [RETURNED, RETURNED], math.inf, {}),
    "one still runs": (30.0, [RETURNED, RUNS, RETURNED], 30.0, {29.0: False, 30.0: True}),
    "it calls something": (30.0, [WAITS, RUNS], 30.0, {12.0: False, 30.0: True}),
    "it does not answer": (30.0, [WAITS, RUNS], 30.0, {None: True}),
}


@pytest.mark.parametrize(("limit", "statuses", "due", "looks"), DUE.values(), ids=DUE)
def test_when_a_run_is_stuck(limit, statuses, due, looks):
    detector, ranks, now = StuckDetector(limit), graph(*statuses), 0.0
    assert detector.due(now, ranks) == due
    for quiet, stuck in looks.items():
        now = detector.due(now, ranks)
        # rank 0 waits, so how long it has been quiet says nothing
        assert detector.stuck(now, {0: 0.0} if quiet is None else {0: 0.0, 1: quiet}) == stuck
        if not stuck:  # it looks again when the rank may have been quiet for long enough
            assert detector.due(now, ranks) == now + max(limit - quiet, 0.5)
            assert detector.since == now - quiet, "so long ago it has called something"
    if looks:
        ranks.ranks[1] = RankStatus(call(1, "recv", 2))
        assert detector.due(200.0, ranks) == 230.0, "a rank that begins to wait is progress"


def test_ranks_that_return_and_that_do_not_answer_and_what_the_others_do_are_named():
    returned, lines = RankStatus(returned=True), ['  File "train.py", line 7']
    stacks = {
        1: RankStack(1, "a.py:7", lines, 31.0, 0.02),
        2: RankStack(2, "a.py:8", [], 1.0, 0.98),
    }
    told = rank_lines(graph(returned, RUNS, RUNS, RUNS, returned), stacks, SILENT, details=True)
    assert told[:2] == ["ranks 0 and 4 have returned", "rank 1 is at a.py:7"]
    assert "In 31 s it has called nothing" in told[2] and "2% of a core: it is blocked" in told[2]
    assert told[4].strip() == lines[0].strip() and told[5] == "rank 2 is at a.py:8"
    assert "it computes or loops" in told[6] and told[7].startswith("rank 3 does not answer")
    assert "the next report comes in 60 s" in stuck_text(told, 30.9, 60.0)


def test_seconds_without_a_call_begin_again_with_each_call():
    recorder = RankRecorder(0, recording=False)
    watcher = Watcher(recorder, None)
    watcher.clock.look(0)
    for calls in (
        lambda: recorder.count_collective("world", "barrier"),
        lambda: recorder.next_seq(("send", 1, 0, "world"), "a.py:1", 4),
    ):
        watcher.clock.since -= 100.0
        assert 100.0 <= watcher.stacks()[0].quiet < 130.0
        calls()
        assert watcher.stacks()[0].quiet < 30.0


def test_a_rank_that_is_asked_tells_first_that_it_is_no_longer_blocked():
    ours, theirs = map(Wire, socket.socketpair())
    with ours.sock, theirs.sock:
        watcher = Watcher(RankRecorder(0, recording=False), theirs)
        watcher.reported = call(0, "all_reduce", 1)  # what it told last
        ours.send(STACKS)
        watcher.listen()
        (kind, status), (last, _) = ours.receive(), ours.receive()
    assert (kind, status.blocked, last) == (STATUS, None, STACKS)


def test_of_a_deep_stack_the_innermost_calls_are_shown():
    def deep(n):
        return stack_lines(sys._getframe()) if n == 0 else deep(n - 1)

    lines = deep(50)
    assert lines[0].endswith("outer calls") and len(lines) < 70
    assert "stack_lines(sys._getframe())" in "".join(lines)
