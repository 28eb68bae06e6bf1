"""Lesson 04: its loop by hand gives the weights of one process, its mistakes do not, and the
answers to its exercises are right.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.lessons.lesson import answer, definitions, glossary_terms, prose

LESSON = definitions("04_data_parallel", "LAYER", "VARIANTS", "PIECES", "near")
# "weighted" is what the reader changes
COMBINE = {**LESSON, "answer": answer("04_data_parallel", "break-uneven-answer", LESSON)}
LINKS = p101.Network(latency=0.1, bandwidth=LESSON["LAYER"])


def batch(samples):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(dim=1, keepdim=True)


def by_one(samples, steps=5):
    """Plain torch, the whole batch at once."""
    model = MLP([8, 16, 1], dtype=torch.float64)
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), batch(samples)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(samples, n, combine):
    return p101.launch(
        LESSON["by_hand"], batch(samples), COMBINE[combine], world_size=n, backend="sim"
    ).results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_by_hand_equals_one_process_with_even_shares_or_weighted_ones(n):
    for samples, combine in ((12, "mean"), (12, "answer"), (10, "answer")):
        for weights in by_hand(samples, n, combine):
            assert torch.allclose(weights, by_one(samples), rtol=1e-11, atol=1e-13), (
                samples,
                combine,
            )


@pytest.mark.parametrize(("samples", "combine"), [(12, "summed"), (10, "mean"), (10, "weighted")])
def test_the_mistakes_give_other_weights(samples, combine):
    assert not any(
        torch.allclose(weights, by_one(samples), rtol=1e-6)
        for weights in by_hand(samples, 4, combine)
    )


@pytest.mark.parametrize("every", [False, True], ids=["one all-reduce", "one for each microbatch"])
def test_accumulated_gradients_equal_those_of_the_whole_batch(every):
    """The text says that only the bytes differ."""
    model, (x, y) = MLP([8, 16, 1], dtype=torch.float64), batch(12)
    F.mse_loss(model(x), y).backward()
    for gradients in p101.launch(
        LESSON["accumulate_by_hand"], (x, y), 3, every, world_size=2, backend="sim"
    ).results:
        assert all(
            torch.allclose(mine, p.grad, rtol=1e-10, atol=1e-14)
            for mine, p in zip(gradients, model.parameters(), strict=True)
        )


def steps_of(options):
    names = {**LESSON["VARIANTS"], "mine": options}
    batch = [torch.randn(8, 64) for _ in range(2)]
    trace = p101.launch(
        LESSON["three_ways"],
        LESSON["Paced"],
        batch,
        names,
        world_size=2,
        backend="sim",
        network=LINKS,
    ).trace
    return {name: trace.spans(name)[0].end - trace.spans(name)[0].start for name in names}


def test_exercise_2_other_buckets():
    layer = LESSON["LAYER"]
    one, quarter, nothing = (
        steps_of({"bucket_bytes": size}) for size in (4 * layer, layer // 4, 0)
    )
    assert one["overlapped"] < one["mine"] < one["bucketed"]
    assert (
        quarter["mine"] == pytest.approx(nothing["mine"])
        and quarter["mine"] > quarter["overlapped"]
    )
    assert [round(found["mine"], 1) for found in (one, quarter, nothing)] == [16.4, 14.5, 14.5]
    assert round(one["overlapped"], 1) == 14.0


def test_the_lesson_needs_lesson_01_only():
    """Every term of the glossary that it uses is explained in it, in bold, or in 00 or 01."""
    text = prose("04_data_parallel")
    assert "You need lesson 01 (" in text
    known = prose("00_ranks") + prose("01_collectives") + " ".join(re.findall(r"\*\*.*?\*\*", text))
    assert glossary_terms(text) <= glossary_terms(known)


def test_strong_scaling_flattens_and_weak_scaling_stays_near_the_line():
    rate = LESSON["rate"]
    one, sixteen, thirty_two = (rate(n, 32) for n in (1, 16, 32))
    assert thirty_two < 1.2 * sixteen and 9 * one < thirty_two < 11 * one
    assert 0.75 * 32 < rate(32, 4 * 32) / rate(1, 4) < 0.85 * 32
    # messages of nearly 8 s, and computation that can't hide them
    assert 60 * 32 / thirty_two > 2 * 31 / 32 * 4


def test_adamw_hides_a_constant_factor_and_not_one_that_changes():
    lesson = definitions("04_data_parallel")
    lesson["batch"], with_adamw = batch(12), lesson["with_adamw"]
    right = with_adamw(lambda i: 1)
    assert (with_adamw(lambda i: 4) - right).abs().max() < 1e-5
    assert (with_adamw(lambda i: 1 if i < 25 else 4) - right).abs().max() > 1e-3


def test_weight_decay_shrinks_differences_as_slowly_as_the_text_says():
    """Two ranks with equal gradients: only AdamW's decay changes the distance of their weights."""
    here, there = (torch.nn.Parameter(torch.tensor([w], dtype=torch.float64)) for w in (0.0, 1.0))
    optimizer, steps = LESSON["adamw"]([here, there]), 100
    for _ in range(steps):
        for weight in (here, there):
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    factor = (there - here).item() ** (1 / steps)
    assert factor == pytest.approx(1 - 2e-5, abs=1e-9) and 1 / 3 < factor**50_000 < 0.4
