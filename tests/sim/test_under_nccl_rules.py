"""Trainers give the same results under NCCL's rules.

(The collectives: tests/collectives/test_batches.py. Their adjoints: tests/autograd.)

A trainer in TRAINERS of tests/trainers/cases.py is tested here too.
"""

from __future__ import annotations

import pytest

import parallel101 as p101
from tests.trainers.cases import OPTIMIZERS, TASKS, TRAINERS, differences, one_process, trained


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


@pytest.mark.parametrize(("world_size", "tasks"), [(2, ["tied gpt"]), (3, ["sometimes"])])
def test_trainers(world_size, tasks):
    run = p101.launch(
        unlike_one_process, tasks, world_size=world_size, backend="sim", rules="nccl", timeout=150
    )
    assert run.results == [[]] * world_size
