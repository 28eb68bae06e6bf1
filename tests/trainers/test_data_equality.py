"""Data parallel on n ranks is one process, to ten digits: losses, gradients and weights;
whatever the variant, however shares differ.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import DataParallelTrainer, ShardedTrainer
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.text import CharTokenizer, TextBatches, read_text
from tests.trainers.cases import (
    EVERY_SETTING,
    OPTIMIZERS,
    STEPS,
    TASKS,
    Setting,
    differences,
    one_process,
    setting,
    trained,
)

VARIANTS = {
    "naive": {"overlap": False, "bucket_bytes": 0},
    "bucketed": {"overlap": False, "bucket_bytes": 1000},
    "overlapped": {"overlap": True, "bucket_bytes": 1000},
}


def unlike_one_process(cases):
    """A case: task, options of the trainer, setting."""
    wrong = []
    for name, options, (optimizer, clip_norm, accumulate) in cases:
        task = TASKS[name]
        trainer = DataParallelTrainer(
            task.build(),
            task.loss_fn,
            OPTIMIZERS[optimizer],
            clip_norm=clip_norm,
            accumulate=accumulate,
            **options,
        )
        if different := differences(
            trained(trainer, task), one_process(task, optimizer, clip_norm)
        ):
            wrong.append((name, options, optimizer, clip_norm, accumulate, different))
    return wrong


def of_each_task_and_variant(world_size):
    of_each = itertools.product(enumerate(TASKS), enumerate(VARIANTS.values()))
    return [(name, options, setting(i, k, world_size)) for (i, name), (k, options) in of_each]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_process_in_float64(world_size):
    """Each task in each variant, and each variant with each optimizer, clipped or not,
    accumulated or not.
    """
    run = p101.launch(
        unlike_one_process,
        of_each_task_and_variant(world_size),
        world_size=world_size,
        backend="gloo",
    )
    assert run.results == [[]] * world_size


@pytest.mark.parametrize(("world_size", "task"), [(2, "mlp"), (3, "sometimes")])
def test_with_every_setting_on_the_virtual_clock(world_size, task):
    cases = [(task, *rest) for rest in itertools.product(VARIANTS.values(), EVERY_SETTING)]
    assert (
        p101.launch(unlike_one_process, cases, world_size=world_size, backend="sim").results
        == [[]] * world_size
    )


def test_a_bucket_may_be_one_gradient_or_all_of_them():
    sizes = (0, 1, 10**9, None)
    cases = [
        ("sometimes", {"bucket_bytes": size}, Setting(optimizer, None, 2))
        for size, optimizer in itertools.product(sizes, OPTIMIZERS)
    ]
    assert p101.launch(unlike_one_process, cases, world_size=3, backend="sim").results == [[]] * 3


def test_without_a_process_group_it_is_one_process():
    assert unlike_one_process(of_each_task_and_variant(1)) == []


def very_uneven():
    """Shares of 5, 1 and 5 samples: a mean over ranks would be wrong, a mean over samples is
    right.
    """
    task, rank = TASKS["mlp"], dist.get_rank()
    trainer = DataParallelTrainer(task.build(), task.loss_fn, OPTIMIZERS["sgd"])
    expected = one_process(task, "sgd", None)
    losses = [
        trainer.step(*(t.split([5, 1, 5])[rank] for t in task.batch(step))) for step in range(STEPS)
    ]
    return differences(expected._replace(losses=losses, weights=trainer.state_dict()), expected)


def test_shares_of_any_size_weigh_by_their_samples():
    assert p101.launch(very_uneven, world_size=3).results == [[]] * 3


def on_some_ranks_only():
    """Two groups of a world of four train on their own; ranks in another order; the rest is
    told so.
    """
    task, rank = TASKS["mlp"], dist.get_rank()
    group = [3, 1] if rank in (1, 3) else [0, 2]
    trainer = DataParallelTrainer(task.build(), task.loss_fn, OPTIMIZERS["adamw"], group=group)
    with pytest.raises(ValueError, match="not in group"):
        DataParallelTrainer(task.build(), task.loss_fn, OPTIMIZERS["adamw"], group=[(rank + 1) % 4])
    return differences(trained(trainer, task), one_process(task, "adamw", None))


def test_a_group_of_the_world_trains_on_its_own():
    assert p101.launch(on_some_ranks_only, world_size=4).results == [[]] * 4


def fifty_steps(autocast=None, trainer_class=DataParallelTrainer, **options):
    tokenizer = CharTokenizer(text := read_text())
    batches = TextBatches(tokenizer.encode(text), batch=6, context=16)
    model = GPT(GPTConfig(tokenizer.vocabulary, context=16, layers=1, heads=2, width=32))
    trainer = trainer_class(
        model,
        next_token_loss,
        lambda p: torch.optim.AdamW(p, lr=3e-3),
        clip_norm=1.0,
        autocast=autocast,
        **options,
    )
    history = trainer.fit(batches, until=50, progress=False)
    held_out = trainer.evaluate([batches(step) for step in range(1000, 1004)])
    return history.losses, held_out, trainer.state_dict()


def every_trainer():
    return [
        fifty_steps(),
        *(
            fifty_steps(trainer_class=ShardedTrainer, zero_stage=zero_stage)
            for zero_stage in (1, 2, 3)
        ),
    ]


def test_a_gpt_in_float32_for_fifty_steps_is_one_process_within_rounding():
    losses, held_out, weights = fifty_steps()
    assert losses[0] > 4.0 > 3.5 > losses[-1], "it learns"
    for other_losses, other_held_out, other_weights in sum(
        p101.launch(every_trainer, world_size=2).results, []
    ):
        torch.testing.assert_close(other_losses, losses, rtol=1e-4, atol=0)
        assert other_held_out == pytest.approx(held_out, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(other_weights[name], weight, rtol=1e-3, atol=2e-4)


def test_a_gpt_in_bfloat16_autocast_learns_as_well():
    alone, _, _ = fifty_steps(torch.bfloat16)
    (first, _, weights), (second, _, _) = p101.launch(
        fifty_steps, torch.bfloat16, world_size=2
    ).results
    assert first == second
    torch.testing.assert_close(first, alone, rtol=0.02, atol=0)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
