"""What sharding can't do is said at once and on every rank: which optimizer, which stage, which
weight.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101 import ShardedTrainer
from parallel101.models.gpt import GPT, Block, GPTConfig
from parallel101.models.mlp import MLP
from parallel101.trainers.zero.model_layers import layers_of


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(model=None, optimizer=sgd, **options):
    return ShardedTrainer(
        MLP([4, 4, 4], bias=False) if model is None else model, F.mse_loss, optimizer, **options
    )


def test_options_that_mean_nothing():
    for options, message in (
        ({"zero_stage": 0}, "zero_stage=0: expected 1"),
        ({"zero_stage": "3"}, "zero_stage='3'"),
        ({"optimizer": lambda p: sgd(MLP([4, 4]).parameters())}, "built over other parameters"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(**options)


class Elsewhere(nn.Module):
    """A head that takes the embedding's weight without asking the embedding."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = MLP([4, 4]), MLP([4, 4])

    def forward(self, x):
        return F.linear(self.middle(self.first(x)), self.first.layers[0].weight)


def weights_elsewhere():
    x = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="whole only in the forward of a module that has it"):
        trainer(Elsewhere()).step(x, x)
    # no layer at all: everything is whole while the model runs
    whole = trainer(Elsewhere(), layers=(nn.GELU,))
    whole.step(x, x)
    assert whole.describe().bytes["gathered (peak)"] == [160]


def test_a_weight_that_is_used_outside_of_its_module_is_explained():
    weights_elsewhere()
    with pytest.raises(TypeError, match="sparse"):
        ShardedTrainer(nn.Embedding(5, 4, sparse=True), F.mse_loss, sgd).step(
            torch.arange(3), torch.ones(3, 4)
        )


def nan_on_one_rank():
    x, sharded = torch.ones(4, 4), trainer(zero_stage=3)
    sharded.step(x, x)
    before = sharded.state_dict()
    with pytest.raises(FloatingPointError, match="nan on rank 1"):
        sharded.step(x, x * (float("nan") if sharded.position == 1 else 1))
    after = sharded.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return sharded.step(x, x)


def test_a_nan_changes_no_weight_and_the_next_step_is_as_good_as_ever():
    first, second = p101.launch(nan_on_one_rank, world_size=2).results
    assert first == second > 0


def test_layers_are_found_in_the_model():
    gpt = GPT(GPTConfig(13, layers=2, width=8, heads=2))
    assert [name for name, _ in layers_of(gpt)] == [
        "embedding",
        "blocks.0",
        "blocks.1",
        "norm",
        "head",
    ]
    assert [name for name, _ in layers_of(gpt, (Block,))] == ["blocks.0", "blocks.1"]
    nested = nn.Sequential(
        nn.Linear(2, 2),
        nn.Sequential(nn.GELU(), nn.Linear(2, 2)),
        nn.ParameterList([torch.ones(1)]),
    )
    assert [name for name, _ in layers_of(nested)] == ["0", "1.1"]
