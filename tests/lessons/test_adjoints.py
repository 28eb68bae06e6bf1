"""Lesson 03: the backward passes written by hand are right on any number of ranks, the wrong ones
fail the adjoint test, the layers and the products equal one process, and the answers to the
exercises are right."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.lessons.lesson import answer, definitions

LESSON = definitions("03_adjoints")
random = LESSON["random"]


def on_sim(function, *args, n=4):
    return p101.launch(function, *args, world_size=n, backend="sim")


def adjoint_test(forward, backward=None, n=4, **options):
    return LESSON["adjoint_test"](forward, backward, n, backend="sim", **options)


def close(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_backward_by_hand_is_a_reduce_scatter_with_the_messages_of_the_forward_reversed(n):
    def both():
        g = random(n * 2, 3, seed=dist.get_rank())
        with p101.span("forward"):
            LESSON["ring_all_gather"](g[:2])
        with p101.span("backward"):
            found = LESSON["ring_all_gather_backward"](g)
        return found, p101.reduce_scatter(g, algorithm="ring")

    run = on_sim(both, n=n)
    assert all(close(found, expected) for found, expected in run.results)
    sends = [(m.src, m.dst, m.nbytes) for m in sorted(run.trace.messages(), key=lambda m: m.start)][
        : 2 * n * (n - 1)
    ]
    there, back = sends[: n * (n - 1)], sends[n * (n - 1) :]
    assert sorted(back) == sorted((dst, src, nbytes) for src, dst, nbytes in there)


@pytest.mark.parametrize("n", [2, 5])
def test_the_adjoint_test_finds_each_wrong_backward(n):
    def ratio(forward, backward):
        left, right = adjoint_test(forward, backward, n, shape=(n, 3))
        return right / left

    gather = LESSON["ring_all_gather"]
    for forward, backward, expected in [
        (gather, LESSON["ring_all_gather_backward"], 1),
        (gather, LESSON["all_reduce_then_slice"], 1),
        (gather, LESSON["n_times_too_large"], n),
        (p101.all_reduce, LESSON["summed"], 1),
    ]:
        assert ratio(forward, backward) == pytest.approx(expected, rel=1e-12)
    for forward, backward in [
        (gather, LESSON["own_part_only"]),
        (p101.broadcast, LESSON["summed"]),
        (p101.all_to_all, LESSON["summed"]),
    ]:
        assert abs(ratio(forward, backward) - 1) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
def test_which_loss_counts(n):
    x, W = random(3, 8), random(8, 12, seed=1)
    leaves = [t.clone().requires_grad_() for t in (x, W)]
    (leaves[0] @ leaves[1]).square().sum().backward()
    for reduce, factor in ((p101.all_reduce, n), (p101.reduce_from_group, 1)):
        assert close(
            torch.cat(on_sim(LESSON["cut_by_rows"], x, W, reduce, n=n).results),
            factor * leaves[1].grad,
        )
    assert all(
        close(gradient, leaves[0].grad)
        for gradient in on_sim(LESSON["cut_by_columns"], x, W, p101.copy_to_group, n=n).results
    )
    assert not close(
        on_sim(LESSON["cut_by_columns"], x, W, torch.clone, n=n).results[0], leaves[0].grad
    )


def test_the_four_cases_are_right_and_cost_what_the_plan_says():
    A, B = random(8, 12), random(12, 8, seed=1)
    for text in definitions("03_adjoints", "CASES")["CASES"].values():
        ran = p101.sharding.run(text, A, B, mesh={"X": 4})
        assert not ran.wrong and ran.run.trace.bytes_sent == ran.plan.bytes_sent, text


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_answer_to_the_backward_to_write_is_right_and_self_adjoint(n):
    backward = answer("03_adjoints", "centre-answer", LESSON)
    for other in (backward, LESSON["centre"]):
        left, right = adjoint_test(LESSON["centre"], other, n)
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)
    left, right = adjoint_test(LESSON["centre"], LESSON["centre_backward"], n)
    assert abs(left - right) > 1e-3  # its beginning


def test_which_collectives_are_self_adjoint():
    """The text says: the all-reduce, and one more of the eight."""
    same_shape = (p101.broadcast, p101.all_reduce, p101.all_to_all)
    found = []
    for collective in same_shape:
        left, right = adjoint_test(collective, collective)
        if math.isclose(left, right, rel_tol=1e-12):
            found.append(collective.__name__)
    assert found == ["all_reduce", "all_to_all"]


def test_exercise_1_the_sum_of_the_columns():
    def gather():
        x = torch.tensor([dist.get_rank() + 1.0], requires_grad=True)
        (dist.get_rank() * p101.all_gather(x).sum()).backward()
        return x.grad.item()

    assert on_sim(gather, n=3).results == [3, 3, 3]


def test_exercise_2_one_loss_counts_once():
    left, right = adjoint_test(p101.reduce_from_group)
    assert not math.isclose(left, right, rel_tol=1e-3)

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
        left, right = adjoint_test(mean, backward)
        assert left == pytest.approx(right, rel=1e-12)
    with pytest.raises(p101.RankFailed, match="op='max' has no backward"):
        adjoint_test(partial(p101.all_reduce, op="max"))
