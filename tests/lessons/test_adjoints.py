"""Lesson 03: the backward passes by hand are right on any number of ranks, the wrong ones fail the
adjoint test, products equal one process, and the answers to the exercises are right.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.lessons.lesson import answer, definitions

LESSON = definitions("03_adjoints", "CASES")
random, gather = LESSON["random"], LESSON["ring_all_gather"]


def on_sim(function, *args, n=4):
    return p101.launch(function, *args, world_size=n, backend="sim")


def ratio(forward, backward=None, n=4):
    left, right = LESSON["adjoint_test"](forward, backward, n, shape=(n, 3))
    return right / left


def close(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [2, 5])
def test_the_adjoint_test_tells_right_backwards_from_wrong_ones(n):
    exactly = partial(pytest.approx, rel=1e-12)
    for forward, backward, expected in [
        (gather, LESSON["ring_all_gather_backward"], 1),
        (gather, LESSON["all_reduce_then_slice"], 1),
        (gather, LESSON["n_times_too_large"], n),
        (p101.all_reduce, LESSON["summed"], 1),
        (LESSON["centre"], answer("03_adjoints", "centre-answer", LESSON), 1),
        (LESSON["centre"], LESSON["centre"], 1),
        (p101.all_reduce, p101.all_reduce, 1),  # self-adjoint, and so is one more of the eight
        (p101.all_to_all, p101.all_to_all, 1),
    ]:
        assert ratio(forward, backward, n) == exactly(expected)
    for forward, backward in [
        (gather, LESSON["own_part_only"]),
        (p101.broadcast, LESSON["summed"]),
        (p101.all_to_all, LESSON["summed"]),
        (LESSON["centre"], LESSON["centre_backward"]),  # what the reader begins with
        (p101.broadcast, p101.broadcast),
    ]:
        assert abs(ratio(forward, backward, n) - 1) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
def test_which_loss_counts(n):
    x, W = random(3, 8), random(8, 12, seed=1)
    leaves = [t.clone().requires_grad_() for t in (x, W)]
    (leaves[0] @ leaves[1]).square().sum().backward()
    for reduce, factor in ((p101.all_reduce, n), (p101.reduce_from_group, 1)):
        found = on_sim(LESSON["cut_by_rows"], x, W, reduce, n=n).results
        assert close(torch.cat(found), factor * leaves[1].grad)
    for enter, right in ((p101.copy_to_group, True), (torch.clone, False)):
        for found in on_sim(LESSON["cut_by_columns"], x, W, enter, n=n).results:
            assert close(found, leaves[0].grad) is right


def test_the_four_cases_are_right_and_cost_what_the_plan_says():
    A, B = random(8, 12), random(12, 8, seed=1)
    for text in LESSON["CASES"].values():
        ran = p101.sharding.run(text, A, B, mesh={"X": 4})
        assert not ran.wrong and ran.run.trace.bytes_sent == ran.plan.bytes_sent, text


def test_exercise_1_the_sum_of_the_columns():
    def gathered():
        x = torch.tensor([dist.get_rank() + 1.0], requires_grad=True)
        (dist.get_rank() * p101.all_gather(x).sum()).backward()
        return x.grad.item()

    assert on_sim(gathered, n=3).results == [3, 3, 3]


def test_exercise_2_one_loss_counts_once():
    assert abs(ratio(p101.reduce_from_group) - 1) > 1e-3

    def once():
        x, g = (random(4, 3, seed=seed).requires_grad_() for seed in (dist.get_rank(), 9))
        y = p101.reduce_from_group(x)
        (gradient,) = torch.autograd.grad(y, x, g)
        return (y * g).sum().item(), (x * gradient).sum().item()

    results = on_sim(once).results
    assert results[0][0] == pytest.approx(sum(right for _, right in results), rel=1e-12)


def test_exercise_3_mean_and_max():
    mean = partial(p101.all_reduce, op="mean")
    for backward in (mean, None):
        assert ratio(mean, backward) == pytest.approx(1, rel=1e-12)
    with pytest.raises(p101.RankFailed, match="op='max' has no backward"):
        ratio(partial(p101.all_reduce, op="max"))
