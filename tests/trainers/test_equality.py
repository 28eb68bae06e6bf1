"""Data parallel and ZeRO on n ranks are one process, to ten digits: losses, gradients and weights.

The shares are uneven; some ranks use parameters that others don't.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.mesh import split_sizes
from parallel101.models.gpt import GPT, Block, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.trainers import data_parallel
from tests.trainers.cases import (
    OPTIMIZERS,
    STEPS,
    TASKS,
    TRAINERS,
    Case,
    Task,
    differences,
    one_process,
    randn,
    rows,
    setting,
    trained,
    unlike_one_process,
)


def cases(world_size, tasks):
    """Each task with each trainer, and each trainer with each optimizer, clipped or not,
    accumulated or not.
    """
    found = []
    for (i, task), (k, trainer) in itertools.product(enumerate(tasks), enumerate(TRAINERS)):
        optimizer, clip_norm, accumulate = setting(i, k, world_size)
        options = {"accumulate": accumulate}
        found.append(Case(TASKS[task], TRAINERS[trainer], optimizer, clip_norm, options))
    return found


@pytest.mark.parametrize(
    ("world_size", "tasks"),
    [(2, ["mlp", "sometimes"]), (3, ["tied gpt"]), (4, ["mlp", "sometimes"])],
)
def test_equal_to_one_process(world_size, tasks):
    run = p101.launch(
        unlike_one_process, cases(world_size, tasks), world_size=world_size, backend="sim"
    )
    assert run.results == [[]] * world_size


def test_on_gloo():
    run = p101.launch(unlike_one_process, cases(3, ["sometimes"]), world_size=3)
    assert run.results == [[]] * 3


def test_without_a_process_group():
    assert unlike_one_process(cases(1, ["sometimes"])) == []


def test_a_bucket_may_be_one_gradient_or_all_of_them():
    found = [
        Case(TASKS["sometimes"], build, options={"bucket_bytes": size, "accumulate": 2})
        for size in (0, 1, 10**9, None)
        for build in (p101.DataParallelTrainer, TRAINERS["ZeRO-2"])
    ]
    assert p101.launch(unlike_one_process, found, world_size=3, backend="sim").results == [[]] * 3


def some_in_place(least):
    """Gradients of at least so many bytes are sent from the memory that they are in."""
    data_parallel.LARGE = least
    options = ({"bucket_bytes": size, "accumulate": many} for size in (1, 10**9) for many in (1, 2))
    tasks = itertools.product(("mlp", "sometimes", "tied gpt"), options)
    build = TRAINERS["overlapped"]
    return unlike_one_process([Case(TASKS[task], build, options=given) for task, given in tasks])


@pytest.mark.parametrize("least", [0, 300])
@pytest.mark.parametrize("world_size", [2, 3])
def test_large_gradients_are_summed_where_they_are(least, world_size):
    run = p101.launch(some_in_place, least, world_size=world_size, backend="sim")
    assert run.results == [[]] * world_size


def test_each_rank_adds_up_as_much():
    assert data_parallel.even_shares([4, 4, 4, 4], 4) == [
        [4, 0, 0, 0],
        [0, 4, 0, 0],
        [0, 0, 4, 0],
        [0, 0, 0, 4],
    ]
    for ranks in (1, 2, 3, 5):
        shares = data_parallel.even_shares([7, 1, 0, 12], ranks)
        assert [sum(of_tensor) for of_tensor in shares] == [7, 1, 0, 12]
        assert [sum(of_rank) for of_rank in zip(*shares)] == split_sizes(20, ranks)


def very_uneven():
    """Shares of 5, 1 and 5 samples: a mean over ranks would be wrong, a mean over samples is
    right.
    """
    task, rank = TASKS["mlp"], dist.get_rank()
    trainer = TRAINERS["overlapped"](task.build(), task.loss_fn, OPTIMIZERS["sgd"])
    expected = one_process(task, "sgd", None)
    losses = [
        trainer.step(*(t.split([5, 1, 5])[rank] for t in task.batch(step))) for step in range(STEPS)
    ]
    return differences(expected._replace(losses=losses, weights=trainer.state_dict()), expected)


def test_shares_of_any_size_weigh_by_their_samples():
    assert p101.launch(very_uneven, world_size=3, backend="sim").results == [[]] * 3


def on_some_ranks_only():
    """Two groups of a world of four train on their own, one with its ranks in another order."""
    task, rank = TASKS["mlp"], dist.get_rank()
    group = [3, 1] if rank in (1, 3) else [0, 2]
    trainer = TRAINERS["overlapped"](task.build(), task.loss_fn, OPTIMIZERS["adamw"], group=group)
    with pytest.raises(ValueError, match="not in group"):
        TRAINERS["naive"](task.build(), task.loss_fn, OPTIMIZERS["adamw"], group=[(rank + 1) % 4])
    return differences(trained(trainer, task), one_process(task, "adamw", None))


def test_a_group_of_the_world_trains_on_its_own():
    run = p101.launch(on_some_ranks_only, world_size=4, backend="sim")
    assert run.results == [[]] * 4


# ── ZeRO's pieces of weights and of optimizer state ──

WAYS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "state from the start": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
TINY = Task(lambda: MLP([1, 1], dtype=torch.float64), F.mse_loss, rows(1, 1))  # for 3 ranks


def with_other_optimizers():
    OPTIMIZERS.update(WAYS)
    sharded = [TRAINERS[f"ZeRO-{stage}"] for stage in (1, 2, 3)]
    optimizers = (*WAYS, "adamw by shape")
    found = [Case(TASKS["mlp"], sharded[i % 3], way) for i, way in enumerate(optimizers)]
    return unlike_one_process(found + [Case(TINY, build) for build in sharded])


def test_optimizers_with_groups_and_state_of_their_own_and_fewer_weights_than_ranks():
    assert p101.launch(with_other_optimizers, world_size=3, backend="sim").results == [[]] * 3


# ── other precisions ──

VARIANTS = [
    (p101.DataParallelTrainer, {}),
    *((p101.ShardedTrainer, {"zero_stage": stage}) for stage in (1, 2, 3)),
    (p101.ShardedTrainer, {"layers": (Block,)}),
]


def eight_steps(autocast, variants=VARIANTS):
    tokens = [torch.randint(13, (6, 9), generator=torch.Generator().manual_seed(s)) for s in (0, 1)]
    batches, found = [(t[:, :-1], t[:, 1:]) for t in tokens], []
    for build, options in variants:
        trainer = build(
            GPT(GPTConfig(13, context=8, layers=2, heads=2, width=16)),
            next_token_loss,
            lambda p: torch.optim.AdamW(p, lr=3e-3),
            clip_norm=1.0,
            autocast=autocast,
            verify=False,
            **options,
        )
        losses = trainer.fit([batches[s % 2] for s in range(8)], progress=False).losses
        found.append((losses, trainer.evaluate(batches), trainer.state_dict()))
    return found


@pytest.mark.parametrize(
    ("autocast", "close", "of_weights"), [(None, 1e-4, 2e-4), (torch.bfloat16, 0.02, 0.02)]
)
def test_a_gpt_in_float32_and_in_bfloat16_autocast_is_one_process_within_rounding(
    autocast, close, of_weights
):
    ((losses, held_out, weights),) = eight_steps(autocast, VARIANTS[:1])
    assert losses[-1] < losses[0] - 0.05, "it learns"
    for found in p101.launch(eight_steps, autocast, world_size=2, backend="sim").results:
        for other_losses, other_held_out, other_weights in found:
            torch.testing.assert_close(other_losses, losses, rtol=close, atol=0)
            assert other_held_out == pytest.approx(held_out, rel=close)
            torch.testing.assert_close(other_weights, weights, rtol=1e-3, atol=of_weights)
            assert {weight.dtype for weight in other_weights.values()} == {torch.float32}


def compiled(how):
    layers = (MLP([4, 4], seed=s, dtype=torch.float64) for s in range(2))
    model, batch = nn.Sequential(*layers), (randn(1, 4, 4), randn(2, 4, 4))
    if how == "in place":
        model.compile(backend="eager")
    elif how == "wrapped":
        model = torch.compile(model, backend="eager")
    trainer = TRAINERS["ZeRO-3"](model, F.mse_loss, OPTIMIZERS["sgd"])
    return [trainer.step(*trainer.share(batch)) for _ in range(3)]


def test_a_compiled_model_gathers_its_layers():
    expected, *found = (
        p101.launch(compiled, how, world_size=2, backend="sim").results[0]
        for how in ("as it is", "in place", "wrapped")
    )
    assert found == [pytest.approx(expected, rel=1e-12)] * 2
