"""Three axes at once are one process, to ten digits: losses, gradients of every step, and weights
after five steps.

All cases of a test run in one launch, on a small GPT, with uneven shares and microbatches.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
from tests.trainers.cases import ALL_OPTIMIZERS, Task, differences, one_process, randn, trained
from tests.trainers.hybrid_cases import (
    TASKS,
    Case,
    mesh_of,
    text,
    trainer_of,
    unlike_one_process,
    world_size,
)
from tests.trainers.tensor_cases import WITHOUT_HEAD, seeded

BY_SHAPE = "adamw by shape"
V_SHAPED = p101.Schedule.from_csv(
    "0F0,3F0,3B0,0F1,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1"
)
ON_FEW = [
    Case("pp 1"),
    Case("dp 1, tp 1, pp 1", {"microbatches": 3}),
    Case("tp 2", {"accumulate": 2}, BY_SHAPE),
    Case("pp 2", {"microbatches": 4, "layers_per_stage": [1, 4]}),
    Case("pp 2", {"schedule": V_SHAPED}, "sgd"),
    Case("dp 2", {"accumulate": 3}),
    Case("pp 3", {"microbatches": 5, "schedule": "zb-h1"}),
    Case("tp 3", whole_head=True),
    Case("dp 2, pp 2", {"microbatches": 5}, clip_norm=None),
    Case("pp 2, dp 2", {"microbatches": 3, "zero_stage": 3}),
    Case("pp 2, dp 2", {"schedule": V_SHAPED, "zero_stage": 2}),
    Case("tp 2, pp 2", {"microbatches": 3, "schedule": "gpipe"}),
    Case("pp 4", {"microbatches": 4}, BY_SHAPE),
    Case("tp 4, dp 1"),
    Case("tp 2, dp 2", {"accumulate": 2, "zero_stage": 3}, BY_SHAPE),
]
ON_EIGHT = [
    Case("dp 2, tp 2, pp 2", {"microbatches": 3}),
    Case("dp 2, tp 2, pp 2", {"microbatches": 4, "schedule": "zb-h1", "zero_stage": 2}, "sgd"),
    Case("pp 2, tp 2, dp 2", {"microbatches": 5, "schedule": "gpipe", "zero_stage": 1}, BY_SHAPE),
    Case(
        "tp 2, pp 2, dp 2",
        {"microbatches": 4, "schedule": "interleaved", "chunks": 2, "zero_stage": 2},
        BY_SHAPE,
    ),
    Case("tp 2, dp 2, pp 2", {"microbatches": 2, "sequence_parallel": True, "zero_stage": 3}),
    Case("dp 1, tp 2, pp 4", {"microbatches": 4, "sequence_parallel": True}, whole_head=True),
    Case(
        "tp 4, pp 2",
        {"microbatches": 4, "schedule": "interleaved", "chunks": 2},
        "sgd",
        task="untied",
    ),
    Case(
        "dp 2, tp 2, pp 2",
        {"microbatches": 4, "schedule": "zb-h1", "zero_stage": 3, "sequence_parallel": True},
        BY_SHAPE,
    ),
]
ON_FOUR = [
    Case("dp 2, pp 2", {"microbatches": 3, "schedule": "zb-h1", "zero_stage": 3}),
    Case("pp 2, tp 2", {"microbatches": 4, "sequence_parallel": True}, BY_SHAPE),
    Case("tp 2, dp 2", {"accumulate": 2, "zero_stage": 2}, "sgd"),
]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_one_two_and_three_axes(n):
    cases = [case for case in ON_FEW if world_size(case.mesh) == n]
    assert p101.launch(unlike_one_process, cases, world_size=n, backend="sim").results == [[]] * n


@pytest.mark.parametrize("rules", ["gloo", "nccl"])
def test_three_axes_on_eight_ranks(rules):
    cases = [ON_EIGHT[i] for i in ((0, 2, 3, 5, 7) if rules == "gloo" else (1, 4, 6))]
    assert (
        p101.launch(unlike_one_process, cases, world_size=8, backend="sim", rules=rules).results
        == [[]] * 8
    )


def test_on_gloo():
    assert (
        p101.launch(unlike_one_process, ON_FOUR, world_size=4, backend="gloo").results == [[]] * 4
    )


@pytest.mark.nccl
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="NCCL needs one GPU a rank, 4 here")
def test_on_nccl():
    assert (
        p101.launch(unlike_one_process, ON_FOUR, "cuda", world_size=4, backend="nccl").results
        == [[]] * 4
    )


def on_ranks_in_any_order(axes, options):
    """Rank 4 of the world does not train."""
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=axes)
    if mesh.get_coordinate() is None:
        return []
    task = TASKS["tied"]
    trainer = p101.HybridTrainer(
        task.build(), task.loss_fn, ALL_OPTIMIZERS["adamw"], mesh=mesh, clip_norm=0.05, **options
    )
    return differences(trained(trainer, task), one_process(task, "adamw", 0.05))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (("pp", "tp"), {"microbatches": 3, "plan": WITHOUT_HEAD}),
        (("dp", "pp"), {"microbatches": 3, "zero_stage": 3}),
    ],
    ids=["pp and tp", "dp and pp"],
)
def test_a_mesh_of_some_ranks_in_another_order(axes, options):
    assert (
        p101.launch(on_ranks_in_any_order, axes, options, world_size=5, backend="sim").results
        == [[]] * 5
    )


def linears(frozen):
    model = seeded(
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    )
    model[frozen].requires_grad_(False)
    return model


def with_an_untrained_stage(frozen, zero_stage):
    task = Task(
        lambda: linears(frozen), F.mse_loss, lambda step: (randn(step, 8, 4), randn(9 + step, 8, 3))
    )
    trainer = p101.HybridTrainer(
        task.build(),
        F.mse_loss,
        ALL_OPTIMIZERS["adamw"],
        mesh=mesh_of("pp 3, dp 2"),
        microbatches=2,
        clip_norm=0.1,
        zero_stage=zero_stage,
    )
    expected = one_process(task, "adamw", 0.1)
    gradients = [
        {name: g for name, g in of_step.items() if g is not None} for of_step in expected.gradients
    ]
    different = differences(trained(trainer, task), expected._replace(gradients=gradients))
    return different, trainer.describe().bytes["gradients"]


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_without_trained_weights(stage, zero_stage):
    for different, gradients in p101.launch(
        with_an_untrained_stage, 2 * stage, zero_stage, world_size=6, backend="sim"
    ).results:
        assert different == []
        assert [nbytes > 0 for nbytes in gradients] == [rank // 2 != stage for rank in range(6)]


def evaluated(case):
    trainer, batches = trainer_of(case), [text(0), text(3)]
    return trainer.fit(batches, progress=False).losses, trainer.evaluate(batches)


def test_an_evaluation_is_that_of_one_process():
    ((losses, alone),) = p101.launch(evaluated, Case("dp 1"), world_size=1, backend="sim").results
    case = Case("pp 2, dp 2, tp 2", {"microbatches": 2, "schedule": "interleaved", "chunks": 2})
    for found, loss in p101.launch(evaluated, case, world_size=8, backend="sim").results:
        assert found == pytest.approx(losses, rel=1e-10)
        assert loss == pytest.approx(alone, rel=1e-10)
