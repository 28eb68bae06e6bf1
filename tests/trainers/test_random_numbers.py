"""Dropout's masks: other ones for other samples, the same on ranks that share samples, and
nobody else's random numbers used up.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.mesh import group_of
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from tests.trainers.cases import (
    OPTIMIZERS,
    TRAINERS,
    WITHOUT_HEAD,
    mesh_of,
    on_mesh,
    on_ranks,
    randn,
)
from tests.trainers.cases import world_size as ranks_of


class Masks(nn.Module):
    """Keeps the masks that it drew in forward and in backward."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        self.draw()
        if x.requires_grad:
            x.register_hook(lambda gradient: self.draw())
        return x

    def draw(self):
        self.drawn.append(F.dropout(torch.ones(32)).int().tolist())


def model(stages=1):
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(stages) for layer in (nn.Linear(4, 4), Masks()))
    ).double()


def masks_of(trainer, steps=2):
    """On this rank: of the one module that has drawn any."""
    for _ in range(steps):
        trainer.step(*trainer.share((randn(1, 8, 4), randn(2, 8, 4))))
    found = [module for module in trainer.model.modules() if isinstance(module, Masks)]
    (drawn,) = (masks.drawn for masks in found if masks.drawn)
    return drawn


def on_a_mesh(mesh, seed):
    """The masks of this rank.

    Every rank has another seed, and changes it before the step.
    """
    stages = 2 if "pp" in mesh else 1
    options = {"microbatches": 1, "layers_per_stage": [2, 2]} if stages > 1 else {}
    built = model(stages)
    torch.manual_seed(seed + group_of().position)
    trainer = on_mesh(mesh)(built, F.mse_loss, OPTIMIZERS["sgd"], **options)
    torch.manual_seed(seed + 100 + group_of().position)
    return masks_of(trainer)


def with_each_seed(mesh, seeds):
    """This rank's place along dp, and its masks."""
    found = [on_a_mesh(mesh, seed) for seed in seeds]
    return mesh_of(mesh)["dp"].get_local_rank(), found


@pytest.mark.parametrize(
    ("mesh", "backend"),
    [("dp 2, tp 2", "sim"), ("dp 2, pp 2", "sim"), ("tp 2, dp 2", "gloo")],
)
def test_they_differ_along_dp_and_agree_along_tp_and_pp(mesh, backend):
    where, by_place = {"world_size": ranks_of(mesh), "backend": backend}, {}
    for place, masks in p101.launch(with_each_seed, mesh, (5, 5, 6), **where).results:
        assert by_place.setdefault(place, masks) == masks
    (first, again, other), (second, *_) = by_place[0], by_place[1]
    assert len({str(mask) for mask in first + second}) == len(first) + len(second) >= 4, (
        "also from step to step"
    )
    assert again == first, "a run is the same again"
    assert other != first, "with another seed it is another one"


def global_numbers(trainer):
    """What a program draws around a step, which may fail, and what it would draw without one."""
    built = TRAINERS[trainer](model(), F.mse_loss, OPTIMIZERS["sgd"])
    torch.manual_seed(group_of().position)
    expected = torch.rand(2).tolist()
    torch.manual_seed(group_of().position)
    found = [torch.rand(()).item()]
    x = randn(1, 8, 4)
    with pytest.raises(RuntimeError):
        built.step(*built.share((x[:, :3], x)))
    built.step(*built.share((x, x)))
    return expected, [*found, torch.rand(()).item()]


@pytest.mark.parametrize("trainer", ["overlapped", "ZeRO-3"])
def test_a_step_uses_up_none_of_the_programs_random_numbers(trainer):
    results = on_ranks(2, global_numbers, trainer)
    assert [found for _, found in results] == [expected for expected, _ in results]
    assert results[0] != results[1]


def test_one_rank_alone_draws_from_the_global_ones():
    trainer = TRAINERS["naive"](model(), F.mse_loss, OPTIMIZERS["sgd"])
    torch.manual_seed(3)
    found = masks_of(trainer)
    torch.manual_seed(3)
    masks = Masks()
    for _ in found:
        masks.draw()
    assert found == masks.drawn


def of_the_embedding(recompute):
    config = GPTConfig(13, context=7, layers=2, heads=2, width=16, dropout=0.1)
    trainer = p101.TensorParallelTrainer(
        GPT(config, dtype=torch.float64),
        next_token_loss,
        OPTIMIZERS["sgd"],
        plan=WITHOUT_HEAD,
        sequence_parallel=True,
        accumulate=2,
        recompute=recompute,
        verify=False,
    )
    trainer.step(*trainer.share((torch.arange(56).view(8, 7) % 13, torch.ones(8, 7).long())))
    gradients = [p.grad for name, p in trainer.model.named_parameters() if "embedding" in name]
    state = torch.get_rng_state()
    trainer.evaluate([(torch.zeros(2, 7).long(), torch.zeros(2, 7).long())])
    assert torch.equal(torch.get_rng_state(), state), "an evaluation uses none up"
    return gradients


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_unequal_parts_of_the_time_draw_the_same_masks_where_activations_are_whole(recompute):
    """The embedding is computed whole on each rank, and what follows on 4 and on 3 times."""
    first, second = on_ranks(2, of_the_embedding, recompute)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
