"""Lesson 04: its loop by hand gives the weights of one process, its mistakes do not, and the
answers to its exercises are right.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.lessons.lesson import answer, definitions

LESSON = definitions("04_data_parallel", "LAYER")
# "weighted" is what the reader changes
COMBINE = {**LESSON, "answer": answer("04_data_parallel", "break-uneven-answer", LESSON)}


def batch(samples):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(dim=1, keepdim=True)


def by_one(samples):
    """Plain torch, the whole batch at once."""
    model = MLP([8, 16, 1], dtype=torch.float64)
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), batch(samples)
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize(
    ("samples", "combine", "right"),
    [
        (12, "mean", True),
        (12, "answer", True),
        (10, "answer", True),
        (12, "summed", False),
        (10, "mean", False),
        (10, "weighted", False),
    ],
)
def test_which_ways_to_combine_gradients_equal_one_process(n, samples, combine, right):
    call = LESSON["by_hand"], batch(samples), COMBINE[combine]
    for weights in p101.launch(*call, world_size=n, backend="sim").results:
        assert torch.allclose(weights, by_one(samples), rtol=1e-11, atol=1e-13) is right


@pytest.mark.parametrize("every", [False, True], ids=["one all-reduce", "one for each microbatch"])
def test_accumulated_gradients_equal_those_of_the_whole_batch(every):
    """The text says that only the bytes differ."""
    model, (x, y) = MLP([8, 16, 1], dtype=torch.float64), batch(12)
    F.mse_loss(model(x), y).backward()
    call = LESSON["accumulate_by_hand"], (x, y), 3, every
    for gradients in p101.launch(*call, world_size=2, backend="sim").results:
        for mine, p in zip(gradients, model.parameters(), strict=True):
            assert torch.allclose(mine, p.grad, rtol=1e-10, atol=1e-14)


def test_exercise_2_other_buckets():
    layer, batch = LESSON["LAYER"], [torch.randn(8, 64) for _ in range(2)]
    variants = {size: {"bucket_bytes": size} for size in (4 * layer, layer, layer // 4, 0)}
    variants = {str(size): options for size, options in variants.items()}
    links = p101.Network(latency=0.1, bandwidth=layer)
    call = LESSON["three_ways"], LESSON["Paced"], batch, variants
    trace = p101.launch(*call, world_size=2, backend="sim", network=links).trace
    took = [trace.spans(name)[0].end - trace.spans(name)[0].start for name in variants]
    assert took == pytest.approx([16.4, 14.0, 14.5, 14.5], abs=0.05)
