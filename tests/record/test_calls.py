"""Whether calls that belong together agree, and which rank is named if they do not."""

from __future__ import annotations

import itertools

import pytest

from parallel101.laboratory.record.calls import Call, CallChecker

CALL = Call(0, "recv", (), "world", 1, "", nbytes=8, shape=(2,), dtype="float32")


def call(rank, kind, *peers, **about):
    return CALL._replace(rank=rank, kind=kind, peers=peers, where=f"here.py:{rank}", **about)


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
