"""What the tests of three axes share: a small GPT on meshes of ranks, with every option, beside
one process.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import parallel101 as p101
from parallel101.models.gpt import next_token_loss
from tests.trainers.cases import ALL_OPTIMIZERS, Task, differences, one_process, trained
from tests.trainers.tensor_cases import WITHOUT_HEAD, gpt, seeded


def text(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares and microbatches are uneven, and their shapes change."""
    samples, time = [(11, 6), (11, 6), (10, 6), (12, 5), (11, 6)][step % 5]
    tokens = torch.randint(
        13, (samples, time + 1), generator=torch.Generator().manual_seed(step), device="cpu"
    )
    return tokens[:, :-1], tokens[:, 1:]


TASKS = {
    name: Task(lambda tied=tied: seeded(gpt(tied=tied)), next_token_loss, text)
    for name, tied in (("tied", True), ("untied", False))
}


def mesh_of(shape: str, device: str = "cpu") -> DeviceMesh:
    """ "dp 2, pp 4" """
    named = [axis.split() for axis in shape.split(", ")]
    return init_device_mesh(
        device,
        tuple(int(size) for _, size in named),
        mesh_dim_names=tuple(name for name, _ in named),
    )


def world_size(shape: str) -> int:
    return math.prod(int(axis.split()[1]) for axis in shape.split(", "))


class Case(NamedTuple):
    mesh: str
    options: dict[str, Any] | None = None
    optimizer: str = "adamw"
    clip_norm: float | None = 0.05
    task: str = "tied"
    whole_head: bool = False  # logits that are not cut


def trainer_of(case: Case, device: str = "cpu", **more: Any) -> p101.HybridTrainer:
    task, options = TASKS[case.task], dict(case.options or {})
    options["loss_fn"] = (
        task.loss_fn if case.whole_head or "tp" not in case.mesh else p101.vocabulary_cross_entropy
    )
    if case.whole_head and "tp" in case.mesh:
        options["plan"] = WITHOUT_HEAD
    with torch.device("cpu"):
        model = task.build().to(device)
    return p101.HybridTrainer(
        model,
        optimizer=ALL_OPTIMIZERS[case.optimizer],
        clip_norm=case.clip_norm,
        mesh=mesh_of(case.mesh, device),
        **{"verify": False, **options, **more},
    )


def unlike_one_process(cases: list[Case], device: str = "cpu") -> list[tuple[Case, list[str]]]:
    """The cases in which losses, gradients or weights differ from one process, and where."""
    found = []
    for case in cases:
        task = TASKS[case.task]
        have = trained(trainer_of(case, device), task)
        have = have._replace(
            gradients=[on_cpu(of_step) for of_step in have.gradients], weights=on_cpu(have.weights)
        )
        with torch.device("cpu"):
            if different := differences(have, one_process(task, case.optimizer, case.clip_norm)):
                found.append((case, different))
    return found


def on_cpu(tensors: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    return {name: None if t is None else t.cpu() for name, t in tensors.items()}
