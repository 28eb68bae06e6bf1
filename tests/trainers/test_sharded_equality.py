"""Sharded on n ranks is one process, to ten digits: loss, gradients, weights; on every stage,
whatever n divides, whoever uses what.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101 import ShardedTrainer
from parallel101.models.gpt import GPT, Block, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    ALL_OPTIMIZERS,
    OPTIMIZERS,
    TASKS,
    Task,
    adamw_by_shape,
    differences,
    one_process,
    randn,
    setting,
    trained,
)

STAGES = (1, 2, 3)


def unlike_one_process(cases):
    """A case: task, stage, setting.

    Without overlap where gradients are clipped and not accumulated.
    """
    wrong = []
    for name, zero_stage, (optimizer, clip_norm, accumulate) in cases:
        expected = one_process(TASKS[name], optimizer, clip_norm)
        options = {
            "clip_norm": clip_norm,
            "accumulate": accumulate,
            "overlap": clip_norm is None or accumulate > 1,
        }
        different = unlike(expected, TASKS[name], OPTIMIZERS[optimizer], zero_stage, **options)
        wrong += [(name, optimizer, zero_stage, options, w) for w in different]
    return wrong


def of_each_task_and_stage(world_size):
    return [
        (name, stage, setting(i, stage, world_size))
        for (i, name), stage in itertools.product(enumerate(TASKS), STAGES)
    ]


def unlike(expected, task, optimizer, zero_stage, **options):
    buckets = {} if zero_stage == 3 else {"bucket_bytes": 300}
    return differences(
        trained(
            ShardedTrainer(
                task.build(), task.loss_fn, optimizer, zero_stage=zero_stage, **buckets, **options
            ),
            task,
        ),
        expected,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_process_in_float64(world_size):
    """Each task on each stage, and each stage with each setting."""
    cases = of_each_task_and_stage(world_size)
    assert (
        p101.launch(
            unlike_one_process, cases, world_size=world_size, backend="sim", timeout=150
        ).results
        == [[]] * world_size
    )


@pytest.mark.parametrize(("world_size", "task"), [(2, "tied gpt"), (3, "sometimes"), (4, "mlp")])
def test_equal_to_one_process_on_real_ranks(world_size, task):
    """With accumulation and clipping at once, with one of them, or with none."""
    cases = [
        (task, stage, setting(stage, world_size, more))
        for stage, more in itertools.product(STAGES, (0, 1))
    ]
    assert (
        p101.launch(unlike_one_process, cases, world_size=world_size, timeout=150).results
        == [[]] * world_size
    )


def test_without_a_process_group_it_is_one_process():
    assert unlike_one_process(of_each_task_and_stage(1)) == []


class Unusual(nn.Module):
    """Layers that run in another order than they stand, one of them twice, one computed again
    in backward; a weight beside them all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        self.last, self.twice, self.first = (
            MLP([4, 4], seed=s, dtype=torch.float64) for s in (1, 2, 3)
        )
        self.frozen = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)
        nn.init.eye_(self.frozen.weight), nn.init.ones_(self.frozen.bias)

    def forward(self, x):
        x = torch.tanh(self.twice(torch.tanh(self.first(x * self.scale))))
        x = checkpoint(lambda x: torch.tanh(self.twice(x)), self.frozen(x), use_reentrant=False)
        return self.last(x)


UNUSUAL = Task(Unusual, F.mse_loss, lambda step: (randn(step, 11, 4), randn(100 + step, 11, 4)))

# for 3 ranks
TINY = Task(
    lambda: MLP([1, 1], dtype=torch.float64),
    F.mse_loss,
    lambda step: (randn(step, 11, 1), randn(9 + step, 11, 1)),
)


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
    for task, (way, optimizer) in [
        (UNUSUAL, adamw),
        (TINY, adamw),
        *((TASKS["mlp"], way) for way in WAYS.items()),
    ]:
        ALL_OPTIMIZERS[way] = optimizer
        expected = one_process(task, way, 0.05)
        trained_names = [name for name, p in task.build().named_parameters() if p.requires_grad]
        expected = expected._replace(
            gradients=[
                {name: of_step[name] for name in trained_names} for of_step in expected.gradients
            ]
        )
        for zero_stage in (1, 2, 3):
            wrong += [
                (way, zero_stage, w)
                for w in unlike(expected, task, optimizer, zero_stage, clip_norm=0.05, accumulate=2)
            ]
    return wrong


def test_layers_in_another_order_and_optimizers_with_groups_and_state_of_their_own():
    assert p101.launch(unusual_ways, world_size=3, backend="sim").results == [[]] * 3
    assert unusual_ways() == []


def some_steps(zero_stage, autocast=None, steps=8, **options):
    model = GPT(GPTConfig(13, context=8, layers=2, heads=2, width=16))
    trainer = ShardedTrainer(
        model,
        next_token_loss,
        lambda p: torch.optim.AdamW(p, lr=3e-3),
        zero_stage=zero_stage,
        autocast=autocast,
        **options,
    )
    tokens = [
        torch.randint(13, (6, 9), generator=torch.Generator().manual_seed(s)) for s in range(2)
    ]
    batches = [(t[:, :-1], t[:, 1:]) for t in tokens]
    history = trainer.fit([batches[s % 2] for s in range(steps)], progress=False)
    return history.losses, trainer.evaluate(batches), trainer.state_dict()


def each_stage(autocast):
    clipped = [some_steps(zero_stage, autocast, clip_norm=1.0) for zero_stage in STAGES]
    return [*clipped, some_steps(3, autocast, clip_norm=1.0, layers=(Block,))], some_steps(
        3, autocast
    )


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_gpt_in_float32_and_in_bfloat16_autocast_is_one_process_within_rounding(autocast):
    losses, held_out, weights = some_steps(1, autocast)
    assert losses[-1] < losses[0]
    rtol, atol = (1e-5, 1e-6) if autocast is None else (0.02, 0.02)
    for (first, *others), not_clipped in p101.launch(each_stage, autocast, world_size=2).results:
        for other in others:
            torch.testing.assert_close(other[0], first[0], rtol=rtol, atol=0)
            torch.testing.assert_close(other[1], first[1], rtol=rtol, atol=0)
            torch.testing.assert_close(other[2], first[2], rtol=rtol, atol=atol)
        torch.testing.assert_close(not_clipped[0], losses, rtol=rtol, atol=0)
        torch.testing.assert_close(not_clipped[1], held_out, rtol=rtol, atol=0)
        torch.testing.assert_close(
            not_clipped[2], weights, rtol=max(rtol, 1e-3), atol=max(atol, 2e-4)
        )


def compiled(how):
    model, (x, y) = (
        nn.Sequential(*(MLP([4, 4], seed=s, dtype=torch.float64) for s in range(2))),
        (randn(1, 4, 4), randn(2, 4, 4)),
    )
    if how == "in place":
        model.compile(backend="aot_eager")
    elif how == "wrapped":
        model = torch.compile(model, backend="aot_eager")
    trainer = ShardedTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], zero_stage=3)
    return [trainer.step(*trainer.share((x, y))) for _ in range(3)]


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_model_gathers_its_layers(how):
    expected, found = (
        p101.launch(compiled, one, world_size=2, backend="sim").results[0]
        for one in ("as it is", how)
    )
    assert found == pytest.approx(expected, rel=1e-12)
