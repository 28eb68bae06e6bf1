"""Adjoints and trainers give the same results under NCCL's rules.

(The collectives: tests/collectives/test_batches.py.)

A trainer that stands in TRAINERS of tests/trainers/cases.py is tested here too.
"""

from __future__ import annotations

import pytest
import torch

import parallel101 as p101
from tests.autograd.test_collectives import (
    adjoints_of_uneven_shards_and_groups,
    adjoints_on_a_box,
    replicated_gradients,
    there_and_back,
)
from tests.autograd.test_second_derivatives import derivatives_that_differ
from tests.trainers.cases import OPTIMIZERS, TASKS, TRAINERS, differences, one_process, trained


def under(rules, fn, *args, world_size):
    return p101.launch(
        fn, *args, world_size=world_size, backend="sim", rules=rules, timeout=150
    ).results


def all_adjoints():
    return adjoints_of_uneven_shards_and_groups(), derivatives_that_differ(), replicated_gradients()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_adjoints(world_size):
    assert under("nccl", all_adjoints, world_size=world_size) == [({}, [], [True] * 3)] * world_size


def test_adjoints_along_the_axes_of_a_mesh():
    assert [wrong for wrong, _ in under("nccl", adjoints_on_a_box, (2, 3), world_size=6)] == [
        {}
    ] * 6


def test_send_and_receive():
    torch.testing.assert_close(
        under("nccl", there_and_back, world_size=3), under("gloo", there_and_back, world_size=3)
    )


def unlike_one_process(tasks):
    """Every trainer on every task, clipped and accumulated."""
    wrong = []
    for name in tasks:
        task = TASKS[name]
        expected = one_process(task, "adamw", 0.05)
        for kind, trainer in TRAINERS.items():
            found = trained(
                trainer(
                    task.build(), task.loss_fn, OPTIMIZERS["adamw"], clip_norm=0.05, accumulate=2
                ),
                task,
            )
            wrong += [(name, kind, difference) for difference in differences(found, expected)]
    return wrong


@pytest.mark.parametrize(
    ("world_size", "tasks"), [(2, ["mlp", "tied gpt"]), (3, ["mlp", "sometimes"]), (4, ["mlp"])]
)
def test_trainers(world_size, tasks):
    assert under("nccl", unlike_one_process, tasks, world_size=world_size) == [[]] * world_size
