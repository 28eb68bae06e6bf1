"""Whether calls that belong together agree, and which rank is named if they do not."""

from __future__ import annotations

import itertools

import pytest

from parallel101.laboratory.record.calls import Call, CallChecker, disagreement


def call(
    rank,
    kind,
    *peers,
    seq=1,
    shape=(2,),
    dtype="float32",
    op=None,
    root=None,
    nbytes=8,
    tag=0,
    group="world",
):
    where = f"here.py:{rank}"
    return Call(rank, kind, peers, group, seq, where, tag, nbytes, shape, dtype, op, root)


def test_agreement():
    assert disagreement(call(0, "send", 1), call(1, "recv", 0)) is None
    assert "16 expected" in disagreement(call(0, "send", 1), call(1, "recv", 0, nbytes=16))
    assert (
        disagreement(call(0, "all_reduce", 1, op="sum"), call(1, "all_reduce", 0, op="sum")) is None
    )


def test_a_message_and_a_collective_with_the_same_number_are_not_compared():
    checker = CallChecker()
    calls = (
        call(0, "all_reduce", 1, 2),
        call(1, "all_reduce", 0, 2, dtype="int64"),
        call(2, "send", 0),
        call(0, "recv", 2),
    )
    assert [checker.check(one) for one in calls] == [False, True, False, False]
    assert "dtypes: float32 and int64" in str(checker.error())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_same_rank_is_named_whoever_comes_first(order):
    calls = [
        call(r, "all_reduce", *({0, 1, 2} - {r}), shape=(3,) if r == 1 else (2,)) for r in range(3)
    ]
    checker = CallChecker()
    for rank in order:
        checker.check(calls[rank])
    assert checker.error().rank == 1
