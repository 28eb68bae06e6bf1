"""Three axes at once are one process, to ten digits: losses, gradients of every step, weights, and
an evaluation.

All cases of a test run in one launch, on a small GPT, with uneven shares and microbatches.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
from tests.trainers.cases import (
    OPTIMIZERS,
    TASKS,
    WITHOUT_HEAD,
    Case,
    Task,
    differences,
    on_mesh,
    one_process,
    rows,
    seeded,
    trained,
    unlike_one_process,
    world_size,
)

BY_SHAPE = "adamw by shape"
V_SHAPED = p101.Schedule.from_csv(
    "0F0,3F0,3B0,0F1,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1"
)
INTERLEAVED = {"schedule": "interleaved", "chunks": 2, "microbatches": 4}
TIME = {"sequence_parallel": True}


def case(mesh, optimizer="adamw", clip_norm=0.05, task="tied gpt", device="cpu", **options):
    if "tp" in mesh and "plan" not in options:
        options["loss_fn"] = p101.vocabulary_cross_entropy
    return mesh, Case(TASKS[task], on_mesh(mesh, device), optimizer, clip_norm, options)


CASES = [
    case("dp 1, tp 1, pp 1", microbatches=3),
    case("tp 2", BY_SHAPE, accumulate=2),
    case("pp 2", microbatches=4, layers_per_stage=[1, 4]),
    case("dp 2", accumulate=3),
    case("pp 3", microbatches=5, schedule="zb-h1"),
    case("tp 3", plan=WITHOUT_HEAD),
    case("dp 2, pp 2", clip_norm=None, microbatches=5),
    case("pp 2, dp 2", microbatches=3, zero_stage=3, schedule="zb-h1"),
    case("pp 2, dp 2", schedule=V_SHAPED, zero_stage=2),
    case("pp 2, tp 2", BY_SHAPE, microbatches=3, schedule="gpipe"),
    case("tp 4, dp 1"),
    case("tp 2, dp 2", BY_SHAPE, accumulate=2, zero_stage=3),
    case("dp 2, tp 2, pp 2", microbatches=4, schedule="zb-h1", zero_stage=2),
    case("pp 2, tp 2, dp 2", BY_SHAPE, **INTERLEAVED, zero_stage=1),
    case("tp 2, dp 2, pp 2", microbatches=2, zero_stage=3, **TIME),
    case("tp 4, pp 2", "sgd", task="untied gpt", **INTERLEAVED),
]
BY_NCCLS_RULES = [
    case("dp 2, tp 2, pp 2", BY_SHAPE, microbatches=4, schedule="zb-h1", zero_stage=3, **TIME),
    case("dp 1, tp 2, pp 4", microbatches=4, plan=WITHOUT_HEAD, **TIME),
]


def on_gloo(device="cpu"):
    found = [
        case("dp 2, pp 2", device=device, microbatches=3, schedule="zb-h1", zero_stage=3),
        case("pp 2, tp 2", BY_SHAPE, device=device, microbatches=4, **TIME),
        case("tp 2, dp 2", "sgd", device=device, accumulate=2, zero_stage=2),
    ]
    return [of_mesh for _, of_mesh in found]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_one_two_and_three_axes(n):
    cases = [of_mesh for mesh, of_mesh in CASES if world_size(mesh) == n]
    program = partial(unlike_one_process, steps=2)  # of different shapes
    assert p101.launch(program, cases, world_size=n, backend="sim").results == [[]] * n


def test_by_the_rules_of_nccl():
    cases = [of_mesh for _, of_mesh in BY_NCCLS_RULES]
    program = partial(unlike_one_process, steps=2)
    run = p101.launch(program, cases, world_size=8, backend="sim", rules="nccl")
    assert run.results == [[]] * 8


def test_on_gloo():
    assert p101.launch(unlike_one_process, on_gloo(), world_size=4).results == [[]] * 4


@pytest.mark.nccl(4)
def test_on_nccl():
    program = partial(unlike_one_process, device="cuda")
    # on one shared GPU, ranks take turns: 60 s weren't enough
    run = p101.launch(program, on_gloo("cuda"), world_size=4, backend="nccl", timeout=170)
    assert run.results == [[]] * 4


def on_ranks_in_any_order(axes, options):
    """Rank 4 of the world does not train."""
    mesh, task = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=axes), TASKS["tied gpt"]
    if mesh.get_coordinate() is None:
        return []
    options = {"mesh": mesh, "clip_norm": 0.05, "microbatches": 3, "verify": False, **options}
    trainer = p101.HybridTrainer(task.build(), task.loss_fn, OPTIMIZERS["adamw"], **options)
    return differences(trained(trainer, task, 2), one_process(task, "adamw", 0.05, 2))


@pytest.mark.parametrize(
    ("axes", "options"),
    [(("pp", "tp"), {"plan": WITHOUT_HEAD}), (("dp", "pp"), {"zero_stage": 3})],
    ids=["pp and tp", "dp and pp"],
)
def test_a_mesh_of_some_ranks_in_another_order(axes, options):
    run = p101.launch(on_ranks_in_any_order, axes, options, world_size=5, backend="sim")
    assert run.results == [[]] * 5


def linears(frozen):
    layers = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)
    model = seeded(nn.Sequential(*layers))
    model[frozen].requires_grad_(False)
    return model


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_stage_without_trained_weights(zero_stage):
    cases = [
        Case(
            Task(partial(linears, frozen), F.mse_loss, rows(4, 3)),
            on_mesh("pp 3, dp 2"),
            options={"microbatches": 2, "zero_stage": zero_stage},
        )
        for frozen in (0, 2, 4)
    ]
    run = p101.launch(unlike_one_process, cases, world_size=6, backend="sim")
    assert run.results == [[]] * 6
