"""Who waits for whom, on standings written by hand: what is a deadlock, what is not, and which circle is named."""

from __future__ import annotations

import itertools

import pytest

import parallel101 as p101
from parallel101.record.calls import Call, Referee, cycle, disagreement, stuck
from parallel101.record.wait_for import LIKELY, SURE, Board, Standing


def call(rank, kind, *peers, seq=1, shape=(2,), dtype="float32", op=None, root=None, nbytes=8, tag=0, group="world"):
    return Call(rank, kind, peers, tag, group, seq, nbytes, shape, dtype, op, root, f"here.py:{rank}")


def board(*standings):
    made = Board(len(standings))
    made.ranks = list(standings)
    return made


@pytest.mark.parametrize("n", [2, 3, 7])
def test_a_circle_of_receives_and_what_breaks_it(n):
    standings = [Standing(call(r, "recv", (r + 1) % n)) for r in range(n)]
    found = board(*standings).look()
    assert found.cycle == list(range(n))
    assert found.waiting[0] == ("recv", 1, "here.py:0")
    standings[1] = Standing(call(1, "recv", 2 % n), posted={("send", 0, 0, "world"): 1})  #  on its way to 0
    assert board(*standings).look() is None


def test_a_running_rank_may_always_still_post():
    assert board(Standing(call(0, "recv", 1)), Standing(), Standing(call(2, "recv", 0))).look() is None


def test_waiting_for_one_that_has_returned():
    found = board(Standing(call(0, "all_reduce", 1, 2)), Standing(returned=True), Standing(returned=True, collectives={"world": 1})).look()
    assert found.waiting == {0: ("all_reduce", 1, "here.py:0")}
    assert (found.cycle, found.returned) == ([], [1])


def test_tags_and_groups_keep_messages_apart():
    sent = {("send", 0, 7, "world"): 1, ("send", 0, 0, "pair"): 1}
    for wanted, lost in ((call(0, "recv", 1, tag=7), False), (call(0, "recv", 1), True), (call(0, "recv", 1, group="pair"), False)):
        assert (board(Standing(wanted), Standing(returned=True, posted=sent)).look() is not None) == lost


def test_the_kth_receive_needs_the_kth_send():
    for sends, lost in ((1, True), (2, False)):
        other = Standing(returned=True, posted={("send", 0, 0, "world"): sends})
        assert (board(Standing(call(0, "recv", 1, seq=2)), other).look() is not None) == lost


def test_a_deadlock_must_stand_before_it_is_told():
    standing = board(Standing(call(0, "recv", 1)), Standing(call(1, "recv", 0)))
    assert standing.deadlock(10.0) is None
    assert standing.deadlock(10.0 + SURE / 2) is None
    assert standing.deadlock(10.0 + 1.01 * SURE) is not None
    standing.ranks[0] = Standing()
    assert standing.deadlock(20.0) is None


def test_a_message_thrown_away_counts_only_if_nothing_else_explains_the_wait():
    key = ("send", 0, 0, "world")
    standing = board(Standing(call(0, "recv", 1)), Standing(returned=True, posted={key: 1}, dropped={(key, 1): "there.py:3"}))
    assert standing.deadlock(0.0) is None
    assert standing.deadlock(1.1 * SURE) is None
    assert "there.py:3" in str(standing.deadlock(1.1 * LIKELY))


def test_the_same_place_must_hold_the_same_collective():
    blocked = call(0, "all_reduce", 1, seq=2)
    for recent, lost in (
        (["barrier", "all_reduce"], False),
        (["all_reduce", "barrier"], True),
        (["all_reduce", "barrier", "all_reduce"], True),
    ):
        other = Standing(returned=True, collectives={"world": len(recent)}, recent={"world": recent})
        found = board(Standing(blocked, collectives={"world": 2}, recent={"world": ["barrier", "all_reduce"]}), other).look()
        assert (found is not None) == lost
        assert not lost or "all_reduce on rank 0, barrier on rank 1" in str(found)
    forgotten = Standing(returned=True, collectives={"world": 900}, recent={"world": ["barrier"]})
    assert board(Standing(blocked), forgotten).look() is None, "too long ago to be held against anyone"


def test_what_one_side_alone_has_posted_is_told_and_what_is_waited_for_is_not_told_twice():
    mine = {("send", 1, 5, "world"): 2, ("recv", 1, 0, "world"): 1}
    theirs = {("recv", 0, 5, "world"): 1, ("recv", 0, 0, "world"): 1}
    standings = Standing(call(0, "recv", 1), posted=mine), Standing(call(1, "recv", 0), posted=theirs)
    assert board(*standings).look().notes == [("rank 0 posted a send to rank 1 with tag 5, for which rank 1 has no receive", "")]
    running = Standing(posted=theirs)
    assert board(standings[0], running).look() is None


def test_all_small_worlds_of_receives():
    """Every way in which three ranks can each receive from another, or have returned: against a brute-force answer."""
    for choice in itertools.product(("gone", 0, 1, 2), repeat=3):
        if any(peer == rank for rank, peer in enumerate(choice)):
            continue
        waits = {rank: call(rank, "recv", peer) for rank, peer in enumerate(choice) if peer != "gone"}
        gone = [rank for rank, peer in enumerate(choice) if peer == "gone"]
        found = stuck(waits, lambda c: list(c.peers), gone)
        assert (found is None) == (not waits), "nobody sends: whoever receives is stuck"
        if found is not None:
            assert sorted(found.waiting) == sorted(waits)
            if found.cycle:
                assert all(choice[a] == b for a, b in itertools.pairwise([*found.cycle, found.cycle[0]]))
            else:
                assert found.returned


def test_cycle():
    assert cycle({0: [1], 1: [2], 2: [1]}) == [1, 2]
    assert cycle({3: [2], 2: [0], 0: [3]}) == [0, 3, 2]
    assert cycle({0: [1], 1: []}) == []
    assert cycle({0: [5]}) == []


def test_agreement():
    assert disagreement(call(0, "send", 1), call(1, "recv", 0)) is None
    assert "16 expected" in disagreement(call(0, "send", 1), call(1, "recv", 0, nbytes=16))
    assert disagreement(call(0, "all_reduce", 1, op="sum"), call(1, "all_reduce", 0, op="sum")) is None


def test_a_message_is_no_part_of_a_collective_with_its_number():
    referee = Referee()
    said = (call(0, "all_reduce", 1, 2), call(1, "all_reduce", 0, 2, dtype="int64"), call(2, "send", 0), call(0, "recv", 2))
    assert [referee.hear(one) for one in said] == [False, True, False, False]
    assert "dtypes: float32 and int64" in str(referee.verdict())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_referee_names_the_same_rank_whoever_comes_first(order):
    calls = [call(r, "all_reduce", *({0, 1, 2} - {r}), shape=(3,) if r == 1 else (2,)) for r in range(3)]
    referee = Referee()
    for rank in order:
        referee.hear(calls[rank])
    assert referee.verdict().rank == 1


def test_errors_survive_their_journey():
    import pickle

    error = p101.DeadlockError({0: ("recv", 1, "a.py:1")}, [0], [1], ["thrown"])
    again = pickle.loads(pickle.dumps(error))
    assert (again.waiting, again.cycle, again.returned, str(again)) == (error.waiting, error.cycle, error.returned, str(error))
    failed = pickle.loads(pickle.dumps(p101.MisuseError("why", 3)))
    assert (type(failed), failed.rank, str(failed)) == (p101.MisuseError, 3, "why")


def test_places_show_the_line_itself_and_call_a_cell_by_its_number(monkeypatch):
    import linecache
    import sys
    import types

    from parallel101.record.where import shown

    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/2.py", (20, None, ["x = 1\n", "    dist.recv(x, 1)\n"], "/tmp/ipykernel_1/2.py"))
    assert shown("/tmp/ipykernel_1/2.py:2") == "/tmp/ipykernel_1/2.py:2: dist.recv(x, 1)"
    shell = types.SimpleNamespace(
        compile=types.SimpleNamespace(format_code_name=lambda name: ("Cell", "In[5]") if "ipykernel" in name else None)
    )
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert shown("/tmp/ipykernel_1/2.py:2") == "cell [5], line 2: dist.recv(x, 1)"
    sent = p101.MisuseError("changed: send() at /tmp/ipykernel_1/2.py:2: dist.send(x), see a.py:3", 0)
    assert str(sent) == "changed: send() at cell [5], line 2: dist.send(x), see a.py:3"
    raised = p101.RankFailed('  File "/tmp/ipykernel_1/2.py", line 2, in f\n  File "a.py", line 3', 0)
    assert str(raised) == '  cell [5], line 2, in f\n  File "a.py", line 3'
    assert shown("no/such/file.py:3") == "no/such/file.py:3"
    assert shown("?") == "?"
