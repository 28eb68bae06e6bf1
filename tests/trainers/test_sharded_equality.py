"""Sharded on n ranks is one process, to ten digits: loss, gradients, weights; on every stage, whatever n divides, whoever uses what."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.models.gpt import GPT, Block, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.trainers.sharded import ShardedTrainer
from tests.trainers.cases import ALL_OPTIMIZERS, OPTIMIZERS, TASKS, Task, adamw_by_shape, differences, one_process, randn, trained

SETTINGS = (
    ("sgd", {"clip_norm": None, "accumulate": 2, "overlap": True}),
    ("sgd", {"clip_norm": 0.05, "accumulate": 1, "overlap": False}),
    ("adamw", {"clip_norm": None, "accumulate": 1, "overlap": True}),
    ("adamw", {"clip_norm": 0.05, "accumulate": 2, "overlap": True}),
)


def unlike_one_process(tasks):
    wrong = []
    for name, (optimizer, options) in itertools.product(tasks, SETTINGS):
        expected = one_process(TASKS[name], optimizer, options["clip_norm"])
        for zero_stage in (1, 2, 3):
            wrong += [
                (name, optimizer, zero_stage, options, w)
                for w in unlike(expected, TASKS[name], OPTIMIZERS[optimizer], zero_stage, **options)
            ]
    return wrong


def unlike(expected, task, optimizer, zero_stage, **options):
    buckets = {} if zero_stage == 3 else {"bucket_bytes": 300}
    return differences(
        trained(ShardedTrainer(task.build(), task.loss_fn, optimizer, zero_stage=zero_stage, **buckets, **options), task), expected
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_process_in_float64(world_size):
    assert p101.launch(unlike_one_process, list(TASKS), world_size=world_size, backend="sim", timeout=150).results == [[]] * world_size


@pytest.mark.parametrize(("world_size", "tasks"), [(2, ["tied gpt"]), (3, ["sometimes"]), (4, ["mlp"])])
def test_equal_to_one_process_on_real_ranks(world_size, tasks):
    assert p101.launch(unlike_one_process, tasks, world_size=world_size, timeout=150).results == [[]] * world_size


def test_without_a_process_group_it_is_one_process():
    assert unlike_one_process(["mlp", "sometimes"]) == []


class Unusual(nn.Module):
    """Layers that run in another order than they stand, one of them twice, one computed again in backward; a weight beside them all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        self.last, self.twice, self.first = (MLP([4, 4], seed=s, dtype=torch.float64) for s in (1, 2, 3))
        self.frozen = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)
        nn.init.eye_(self.frozen.weight), nn.init.ones_(self.frozen.bias)

    def forward(self, x):
        x = torch.tanh(self.twice(torch.tanh(self.first(x * self.scale))))
        x = checkpoint(lambda x: torch.tanh(self.twice(x)), self.frozen(x), use_reentrant=False)
        return self.last(x)


UNUSUAL = Task(Unusual, F.mse_loss, lambda step: (randn(step, 11, 4), randn(100 + step, 11, 4)))

TINY = Task(lambda: MLP([1, 1], dtype=torch.float64), F.mse_loss, lambda step: (randn(step, 11, 1), randn(9 + step, 11, 1)))  # for 3 ranks


WAYS = {
    "groups by shape": adamw_by_shape,
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "state from the start": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def unusual_ways():
    wrong = []
    adamw = ("adamw", OPTIMIZERS["adamw"])
    for task, (way, optimizer) in [(UNUSUAL, adamw), (TINY, adamw), *((TASKS["mlp"], way) for way in WAYS.items())]:
        ALL_OPTIMIZERS[way] = optimizer
        expected = one_process(task, way, 0.05)
        trained_names = [name for name, p in task.build().named_parameters() if p.requires_grad]
        expected = expected._replace(gradients=[{name: of_step[name] for name in trained_names} for of_step in expected.gradients])
        for zero_stage in (1, 2, 3):
            wrong += [(way, zero_stage, w) for w in unlike(expected, task, optimizer, zero_stage, clip_norm=0.05, accumulate=2)]
    return wrong


def test_layers_in_another_order_and_optimizers_with_groups_and_state_of_their_own():
    assert p101.launch(unusual_ways, world_size=3).results == [[]] * 3
    assert unusual_ways() == []


def some_steps(zero_stage, autocast=None, steps=8, **options):
    model = GPT(GPTConfig(13, context=8, layers=2, heads=2, width=16))
    trainer = ShardedTrainer(
        model, next_token_loss, lambda p: torch.optim.AdamW(p, lr=3e-3), zero_stage=zero_stage, autocast=autocast, **options
    )
    tokens = [torch.randint(13, (6, 9), generator=torch.Generator().manual_seed(s)) for s in range(2)]
    batches = [(t[:, :-1], t[:, 1:]) for t in tokens]
    history = trainer.fit([batches[s % 2] for s in range(steps)], progress=False)
    return history.losses, trainer.evaluate(batches), trainer.state_dict()


def stages_agree(autocast, **options):
    return [some_steps(zero_stage, autocast, **options) for zero_stage in (1, 2, 3)] + [some_steps(3, autocast, layers=(Block,), **options)]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_gpt_in_float32_and_in_bfloat16_autocast_is_one_process_within_rounding(autocast):
    losses, held_out, weights = some_steps(1, autocast)
    assert losses[-1] < losses[0]
    rtol, atol = (1e-5, 1e-6) if autocast is None else (0.02, 0.02)
    for of_stages in p101.launch(stages_agree, autocast, clip_norm=1.0, world_size=2).results:
        first = of_stages[0]
        for zero_stage in of_stages:
            torch.testing.assert_close(zero_stage[0], first[0], rtol=rtol, atol=0)
            torch.testing.assert_close(zero_stage[1], first[1], rtol=rtol, atol=0)
            torch.testing.assert_close(zero_stage[2], first[2], rtol=rtol, atol=atol)
    for of_stages in p101.launch(stages_agree, autocast, world_size=2).results:
        torch.testing.assert_close(of_stages[2][0], losses, rtol=rtol, atol=0)
        torch.testing.assert_close(of_stages[2][1], held_out, rtol=rtol, atol=0)
        torch.testing.assert_close(of_stages[2][2], weights, rtol=max(rtol, 1e-3), atol=max(atol, 2e-4))
