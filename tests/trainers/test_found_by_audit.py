"""Models that a trainer took before and trained wrongly, or could not train: what the structure
does not tell must not be guessed.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from tests.trainers.cases import OPTIMIZERS, Task, differences, one_process, randn, trained


class Squashed(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


class Doubled(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x)


def seeded(*modules):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for module in (
            m for top in modules for m in top.modules() if hasattr(m, "reset_parameters")
        ):
            module.reset_parameters()
    return nn.Sequential(*modules).double()


def twice():
    shared = nn.Linear(6, 6)
    return seeded(nn.Linear(6, 6), shared, nn.Tanh(), shared, nn.Linear(6, 6))


def hooked():
    model = seeded(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, 6)
    )
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def batch(step):
    return randn(step, 6, 3, 6), randn(100 + step, 6, 3, 6)


TENSOR = {
    "a linear layer with a forward of its own": lambda: seeded(
        Squashed(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)
    ),
    "a layer that is used twice": twice,
    "a hook": hooked,
}
PIPELINE = {
    "an operation in place": lambda: seeded(
        nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True)
    ),
}


def unlike_one_process(trainer_class, build, **options):
    task = Task(build, F.mse_loss, batch)
    trainer = trainer_class(task.build(), task.loss_fn, OPTIMIZERS["sgd"], **options)
    return differences(trained(trainer, task), one_process(task, "sgd", None))


@pytest.mark.parametrize("name", TENSOR)
def test_what_auto_does_not_recognise_stays_whole(name):
    assert (
        p101.launch(
            unlike_one_process,
            p101.TensorParallelTrainer,
            TENSOR[name],
            world_size=2,
            backend="sim",
        ).results
        == [[]] * 2
    )


@pytest.mark.parametrize("name", PIPELINE)
def test_zero_bubble_runs(name):
    options = {"schedule": "zb-h1", "microbatches": 3}
    assert (
        p101.launch(
            unlike_one_process,
            p101.PipelineTrainer,
            PIPELINE[name],
            **options,
            world_size=2,
            backend="sim",
        ).results
        == [[]] * 2
    )


def test_a_dropout_does_not_stand_between_a_column_and_its_row():
    def plan():
        model = seeded(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 6))
        return str(p101.TensorParallelTrainer(model, F.mse_loss, OPTIMIZERS["sgd"]).describe())

    described = p101.launch(plan, world_size=2, backend="sim").results[0]
    assert "0: column_gather" in described and "3: column_gather" in described


def test_a_sequential_with_a_forward_of_its_own_is_not_cut_into_stages():
    def build():
        p101.PipelineTrainer(
            Doubled(nn.Linear(2, 2), nn.Linear(2, 2)), F.mse_loss, OPTIMIZERS["sgd"]
        )

    with pytest.raises(
        p101.RankFailed,
        match=(
            r"a Doubled can't be cut into pipeline stages: expected an nn.Sequential without a "
            r"forward"
        ),
    ):
        p101.launch(build, world_size=2, backend="sim")
