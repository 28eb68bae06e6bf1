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
    find_deadlock,
)
from tests.record.test_calls import call


def posted(counts):
    """The newest message of each key."""
    return {key: [(count, f"a.py:{count}", 4)] for key, count in counts.items()}


def returned(counts=(), **about):
    return RankStatus(returned=True, posted=posted(dict(counts)), **about)


def graph(*statuses):
    made = WaitForGraph(len(statuses))
    made.ranks = list(statuses)
    return made


def receives(rank, peer, counts=(), **about):
    return RankStatus(call(rank, "recv", peer, **about), posted=posted(dict(counts)))


SENT = {("send", 0, 7, "world"): 1, ("send", 0, 0, "pair"): 1}
SECOND = RankStatus(
    call(0, "all_reduce", 1, seq=2), collectives={"world": (2, ["barrier", "all_reduce"])}
)
DIFFERENT = "all_reduce on rank 0, barrier on rank 1"


def calls(*recent, number=None):
    return returned(collectives={"world": (number or len(recent), recent)})


# the reports of the ranks; those that are stuck, and what the error says of it
REPORTS = {
    "a cycle": ([receives(r, (r + 1) % 7) for r in range(7)], range(7), "rank 6 → rank 0"),
    "in flight": ([receives(0, 1), receives(1, 0, {("send", 0, 0, "world"): 1})], (), ""),
    "one runs": ([receives(0, 1), RankStatus(), receives(2, 0)], (), ""),
    "one has returned": (
        [RankStatus(call(0, "all_reduce", 1, 2)), returned(), calls(number=1)],
        [0],
        "waits in all_reduce for rank 1 (returned), at here.py:0",
    ),
    "with this tag": ([receives(0, 1, tag=7), returned(SENT)], (), ""),
    "in this group": ([receives(0, 1, group="pair"), returned(SENT)], (), ""),
    "neither": ([receives(0, 1), returned(SENT)], [0], "posted no matching receive"),
    "the second": ([receives(0, 1, seq=2), returned({("send", 0, 0, "world"): 2})], (), ""),
    "one only": ([receives(0, 1, seq=2), returned({("send", 0, 0, "world"): 1})], [0], "from"),
    "from any rank": (
        [RankStatus(call(0, "send", 1)), returned({("recv", None, 0, "world"): 1})],
        (),
        "",
    ),
    "the same collective": ([SECOND, calls("barrier", "all_reduce")], (), ""),
    "another": ([SECOND, calls("all_reduce", "barrier")], [0], DIFFERENT),
    "another, and more": ([SECOND, calls("all_reduce", "barrier", "barrier")], [0], DIFFERENT),
    "too long ago to be known": ([SECOND, calls("barrier", number=900)], (), ""),
    "unmatched": (
        [
            receives(0, 1, {("send", 1, 5, "world"): 2, ("recv", 1, 0, "world"): 1}),
            receives(1, 0, {("recv", 0, 5, "world"): 1, ("recv", 0, 0, "world"): 1}),
        ],
        [0, 1],
        # this is the only note: the ranks wait for the other message
        "rank 1 → rank 0\n  rank 0 posted a send to rank 1 with tag 5, and rank 1 posted no "
        "matching receive, at a.py:2\n(end)",
    ),
}


@pytest.mark.parametrize(("statuses", "stuck", "text"), REPORTS.values(), ids=REPORTS)
def test_what_is_a_deadlock_and_what_is_said_of_it(statuses, stuck, text):
    found = graph(*statuses).deadlock()
    assert [*(found.waiting if found else ())] == [*stuck]
    assert text in f"{found}\n(end)"


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
            assert found.cycle or found.returned
            assert found.cycle[:1] == sorted(found.cycle)[:1]
            for here, there in zip(found.cycle, [*found.cycle[1:], *found.cycle[:1]]):
                assert choice[here] == there
