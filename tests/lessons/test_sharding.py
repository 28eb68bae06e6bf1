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
from tests.lessons.lesson import answer, definitions, read

LESSON = definitions("05_sharding", "WIDTH", "SMALL")
# by_whole_norm is what the reader changes
CLIPS = {**LESSON, "answer": answer("05_sharding", "break-clip-answer", LESSON)}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def batch(samples=12):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(dim=1, keepdim=True)


def by_one(optimizer, clip_norm=None, steps=5):
    """Plain torch, the whole batch at once."""
    model = MLP([8, 16, 1], dtype=torch.float64)
    update, (x, y) = OPTIMIZERS[optimizer](model.parameters()), batch()
    for _ in range(steps):
        update.zero_grad()
        F.mse_loss(model(x), y).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        update.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(n, optimizer, clip=None):
    call = LESSON["zero_by_hand"], batch(), LESSON[optimizer], clip and CLIPS[clip]
    return p101.launch(*call, world_size=n, backend="sim").results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_by_hand_equals_one_process(n, optimizer):
    for weights in by_hand(n, optimizer):
        assert torch.allclose(weights, by_one(optimizer), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("clip", "right"), [("answer", True), ("by_local_norm", False), ("by_whole_norm", False)]
)
def test_clipping_needs_the_norm_of_all_blocks(clip, right):
    """torch adds 1e-6 to the norm it divides by."""
    for weights in by_hand(4, "sgd", clip):
        assert torch.allclose(weights, by_one("sgd", clip_norm=1.0), rtol=1e-4, atol=1e-6) == right


def reversed_inputs(same):
    """Inputs and the same in reverse; with `same`, four ranks get the same three samples."""
    x, _ = batch()
    x = x[:3].repeat(4, 1) if same else x
    return x, x.flip(1)


@pytest.mark.parametrize(
    ("same", "mistakes"), [(False, "CDE"), (True, "E")], ids=["own samples", "the same samples"]
)
def test_the_mistakes_of_the_design_and_which_of_them_equal_samples_hide(same, mistakes):
    x, y = reversed_inputs(same)
    weight = torch.nn.Parameter(torch.eye(8, dtype=torch.float64))
    update = OPTIMIZERS["adamw"]([weight])
    for _ in range(5):
        update.zero_grad()
        F.mse_loss(x @ weight.T, y).backward()
        update.step()
    for wrong in ("", "C", "D", "E"):
        run = p101.launch(LESSON["one_layer"], (x, y), wrong, world_size=4, backend="sim")
        near = all(torch.allclose(found, weight, atol=1e-12) for found in run.results)
        assert near == (wrong not in mistakes or not wrong), wrong


def test_exercise_1_the_table_of_the_paper():
    stages = {0: 16, 1: 4 + 12 / 64, 2: 2 + 14 / 64, 3: 16 / 64}
    (answers,) = (cell.source for cell in read("05_sharding").cells if cell.id == "exercises")
    for bytes_a_parameter in stages.values():
        assert f"= {round(7.5 * bytes_a_parameter, 1):g}$ GB" in answers


@pytest.mark.parametrize(("stage", "passages"), [(1, 2), (2, 5), (3, 12)])
def test_exercise_3_accumulation(stage, passages):
    def accumulate():
        model, x = MLP([32] * 5), torch.randn(2, 8, 32).unbind()
        trainer = p101.ShardedTrainer(
            model, F.mse_loss, LESSON["adamw"], zero_stage=stage, accumulate=4
        )
        for _ in range(2):
            with p101.span("step"):
                trainer.step(*trainer.share(x))

    trace = p101.launch(accumulate, world_size=2, backend="sim").trace
    step = [s for s in trace.spans("step") if s.rank == 0][-1]
    sends = [
        e.nbytes
        for e in trace.events
        if e.kind == "send" and e.rank == 0 and step.start <= e.start <= step.end and e.nbytes > 500
    ]
    assert math.isclose(sum(sends), passages * 4 * 4 * (32 * 32 + 32) / 2, rel_tol=0.01)
