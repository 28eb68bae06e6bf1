"""Who waits for whom, for statuses written by hand: what is a deadlock, what is not, and which
cycle is named.
"""

from __future__ import annotations

import itertools

import pytest

from parallel101.laboratory.record.wait_for import (
    CONFIRM_AFTER,
    CONFIRM_DROPPED_AFTER,
    RankStatus,
    WaitForGraph,
    cycle,
    find_deadlock,
)
from tests.record.test_calls import call


def posted(counts):
    """The newest message of each key."""
    return {key: [(count, f"a.py:{count}", 4)] for key, count in counts.items()}


def graph(*statuses):
    made = WaitForGraph(len(statuses))
    made.ranks = list(statuses)
    return made


@pytest.mark.parametrize("n", [2, 3, 7])
def test_a_cycle_of_receives_and_what_breaks_it(n):
    statuses = [RankStatus(call(r, "recv", (r + 1) % n)) for r in range(n)]
    found = graph(*statuses).deadlock()
    assert found.cycle == list(range(n))
    assert found.waiting[0] == ("recv", 1, "here.py:0")
    # in flight to rank 0
    statuses[1] = RankStatus(call(1, "recv", 2 % n), posted=posted({("send", 0, 0, "world"): 1}))
    assert graph(*statuses).deadlock() is None


def test_a_running_rank_may_still_post():
    waits = RankStatus(call(0, "recv", 1)), RankStatus(), RankStatus(call(2, "recv", 0))
    assert graph(*waits).deadlock() is None


def test_waiting_for_a_rank_that_has_returned():
    found = graph(
        RankStatus(call(0, "all_reduce", 1, 2)),
        RankStatus(returned=True),
        RankStatus(returned=True, collectives={"world": (1, [])}),
    ).deadlock()
    assert found.waiting == {0: ("all_reduce", 1, "here.py:0")}
    assert (found.cycle, found.returned) == ([], [1])


def test_a_rank_that_handles_its_own_limit_goes_on_and_is_reported_once():
    statuses = [RankStatus(call(r, "recv", 1 - r), limit=9.0 if r == 0 else None) for r in (0, 1)]
    made = graph(*statuses)
    assert made.deadlock() is None and made.confirmed_deadlock(5.0) is None
    assert made.report_of_limits(5.0) is None and made.next_look == 5.0 + CONFIRM_AFTER
    report = made.report_of_limits(made.next_look)
    assert "the cycle: rank 0 → rank 1 → rank 0" in report
    assert "rank 0 will go on by its own time limit, after 9 s" in report
    assert made.report_of_limits(99.0) is None, "the same lines again"
    statuses[0].limit = None  # its next wait has no limit
    assert made.deadlock().cycle == [0, 1]


def test_tags_and_groups_keep_messages_apart():
    sent = posted({("send", 0, 7, "world"): 1, ("send", 0, 0, "pair"): 1})
    for wanted, lost in (
        (call(0, "recv", 1, tag=7), False),
        (call(0, "recv", 1), True),
        (call(0, "recv", 1, group="pair"), False),
    ):
        assert (
            graph(RankStatus(wanted), RankStatus(returned=True, posted=sent)).deadlock() is not None
        ) == lost


def test_the_kth_receive_needs_the_kth_send():
    for sends, lost in ((1, True), (2, False)):
        other = RankStatus(returned=True, posted=posted({("send", 0, 0, "world"): sends}))
        assert (graph(RankStatus(call(0, "recv", 1, seq=2)), other).deadlock() is not None) == lost


def test_a_deadlock_is_confirmed_before_it_is_reported():
    waits = graph(RankStatus(call(0, "recv", 1)), RankStatus(call(1, "recv", 0)))
    assert waits.confirmed_deadlock(10.0) is None
    assert waits.confirmed_deadlock(10.0 + CONFIRM_AFTER / 2) is None
    assert waits.confirmed_deadlock(10.0 + 1.01 * CONFIRM_AFTER) is not None
    waits.ranks[0] = RankStatus()
    assert waits.confirmed_deadlock(20.0) is None


def test_a_dropped_message_counts_only_if_nothing_else_explains_the_wait():
    key = ("send", 0, 0, "world")
    waits = graph(
        RankStatus(call(0, "recv", 1)),
        RankStatus(returned=True, posted=posted({key: 1}), dropped={(key, 1): "there.py:3"}),
    )
    assert waits.confirmed_deadlock(0.0) is None
    assert waits.confirmed_deadlock(1.1 * CONFIRM_AFTER) is None
    assert "there.py:3" in str(waits.confirmed_deadlock(1.1 * CONFIRM_DROPPED_AFTER))


def test_collectives_with_the_same_number_must_be_the_same():
    blocked = call(0, "all_reduce", 1, seq=2)
    for recent, lost in (
        (["barrier", "all_reduce"], False),
        (["all_reduce", "barrier"], True),
        (["all_reduce", "barrier", "all_reduce"], True),
    ):
        other = RankStatus(returned=True, collectives={"world": (len(recent), recent)})
        ours = RankStatus(blocked, collectives={"world": (2, ["barrier", "all_reduce"])})
        found = graph(ours, other).deadlock()
        assert (found is not None) == lost
        assert not lost or "all_reduce on rank 0, barrier on rank 1" in str(found)
    forgotten = RankStatus(returned=True, collectives={"world": (900, ["barrier"])})
    assert graph(RankStatus(blocked), forgotten).deadlock() is None, "too long ago to be known"


def test_unmatched_messages_are_noted_except_those_that_are_waited_for():
    mine = posted({("send", 1, 5, "world"): 2, ("recv", 1, 0, "world"): 1})
    theirs = posted({("recv", 0, 5, "world"): 1, ("recv", 0, 0, "world"): 1})
    statuses = (
        RankStatus(call(0, "recv", 1), posted=mine),
        RankStatus(call(1, "recv", 0), posted=theirs),
    )
    note = "rank 0 posted a send to rank 1 with tag 5, and rank 1 posted no matching receive"
    assert graph(*statuses).deadlock().notes == [(note, "a.py:2")]
    running = RankStatus(posted=theirs)
    assert graph(statuses[0], running).deadlock() is None


def test_all_small_worlds_of_receives():
    """Every way in which each of three ranks receives from another rank, or has returned."""
    for choice in itertools.product(("gone", 0, 1, 2), repeat=3):
        if any(peer == rank for rank, peer in enumerate(choice)):
            continue
        waits = {
            rank: call(rank, "recv", peer) for rank, peer in enumerate(choice) if peer != "gone"
        }
        gone = [rank for rank, peer in enumerate(choice) if peer == "gone"]
        found = find_deadlock(waits, lambda c: list(c.peers), gone)
        assert (found is None) == (not waits), "nobody sends, so every rank that receives is stuck"
        if found is not None:
            assert sorted(found.waiting) == sorted(waits)
            if found.cycle:
                assert all(
                    choice[a] == b for a, b in itertools.pairwise([*found.cycle, found.cycle[0]])
                )
            else:
                assert found.returned


def test_cycle():
    assert cycle({0: [1], 1: [2], 2: [1]}) == [1, 2]
    assert cycle({3: [2], 2: [0], 0: [3]}) == [0, 3, 2]
    assert cycle({0: [1], 1: []}) == []
    assert cycle({0: [5]}) == []
