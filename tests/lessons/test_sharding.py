"""Lesson 05: ZeRO by hand gives the weights of one process, its mistakes do not, and the
answers to its exercises are right.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.lessons.lesson import answer, definitions, source

LESSON = definitions("05_sharding", "WIDTH", "SMALL")
# by_whole_norm is what the reader changes
CLIPS = {**LESSON, "answer": answer("05_sharding", "break-clip-answer", LESSON)}


def batch(samples=12):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(dim=1, keepdim=True)


def by_one(model, optimizer, batch, clip=None):
    """Five steps of plain torch, the whole batch at once."""
    update, (x, y) = LESSON[optimizer](model.parameters()), batch
    for _ in range(5):
        update.zero_grad()
        F.mse_loss(model(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [("adamw", None), ("sgd", "answer"), ("sgd", "by_local_norm"), ("sgd", "by_whole_norm")],
)
def test_by_hand_equals_one_process_if_it_clips_by_the_norm_of_all_blocks(n, optimizer, clip):
    """torch adds 1e-6 to the norm it divides by."""
    expected = by_one(MLP([8, 16, 1], dtype=torch.float64), optimizer, batch(), clip)
    call = LESSON["zero_by_hand"], batch(), LESSON[optimizer], clip and CLIPS[clip]
    for weights in p101.launch(*call, world_size=n, backend="sim").results:
        near = torch.allclose(weights, expected, rtol=1e-4 if clip else 1e-10, atol=1e-12)
        assert near is (clip in (None, "answer") or n == 1)


@pytest.mark.parametrize(
    ("same", "mistakes"), [(False, "CDE"), (True, "E")], ids=["own samples", "the same samples"]
)
def test_the_mistakes_of_the_design_and_which_of_them_equal_samples_hide(same, mistakes):
    x = batch()[0][:3].repeat(4, 1) if same else batch()[0]
    model = torch.nn.Linear(8, 8, bias=False, dtype=torch.float64)
    torch.nn.init.eye_(model.weight)
    expected = by_one(model, "adamw", (x, x.flip(1))).view(8, 8)
    for wrong in ("", "C", "D", "E"):
        call = LESSON["one_layer"], (x, x.flip(1)), wrong
        for found in p101.launch(*call, world_size=4, backend="sim").results:
            near = torch.allclose(found, expected, atol=1e-12)
            assert near is (wrong not in mistakes or not wrong), wrong


def test_exercise_1_the_table_of_the_paper():
    stages = {0: 16, 1: 4 + 12 / 64, 2: 2 + 14 / 64, 3: 16 / 64}
    for bytes_a_parameter in stages.values():
        gigabytes = round(7.5 * bytes_a_parameter, 1)
        assert f"= {gigabytes:g}$ GB" in source("05_sharding", "exercises")


@pytest.mark.parametrize(("stage", "collectives"), [(1, 2), (2, 5), (3, 12)])
def test_exercise_3_accumulation(stage, collectives):
    def accumulate():
        model, x = MLP([32] * 5), torch.randn(2, 8, 32).unbind()
        options = {"zero_stage": stage, "accumulate": 4}
        trainer = p101.ShardedTrainer(model, F.mse_loss, LESSON["adamw"], **options)
        for _ in range(2):
            with p101.span("step"):
                trainer.step(*trainer.share(x))

    trace = p101.launch(accumulate, world_size=2, backend="sim").trace
    step = [s for s in trace.spans("step") if s.rank == 0][-1]
    sends = [e for e in trace.events if e.kind == "send" and e.rank == 0 and e.nbytes > 500]
    sent = sum(e.nbytes for e in sends if step.start <= e.start <= step.end)
    assert math.isclose(sent, collectives * 4 * 4 * (32 * 32 + 32) / 2, rel_tol=0.01)
