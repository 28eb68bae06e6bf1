"""Our schedules run in torch.distributed.pipelining, and equal one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

import parallel101 as p101
from tests.trainers.cases import CLOSE, differing

LAYERS, WIDTH, SAMPLES = 8, 5, 16


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return inputs, targets


def one_process() -> tuple[float, dict[str, Tensor | None]]:
    alone, (inputs, targets) = model(), batch()
    loss = mse_loss(alone(inputs), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in alone.named_parameters()}


OURS = {  # name → chunks, microbatches
    "gpipe": (1, 4),
    "1f1b": (1, 4),
    "interleaved": (2, 4),
    "zb-h1": (1, 4),
    "zb-h2": (1, 8),
}


def in_torchs_runtime(schedules: dict[str, p101.Schedule], folder: str) -> dict[str, tuple[float | None, dict[str, Tensor | None]]]:
    """The loss, where it is known, and the gradients of this rank's stages."""
    rank, found = dist.get_rank(), {}
    for name, schedule in schedules.items():
        whole, (inputs, targets), count = model(), batch(), len(schedule.placement)
        each = LAYERS // count
        mine = [stage for stage, of in schedule.placement.items() if of == rank]
        parts = {stage: whole[stage * each : (stage + 1) * each] for stage in mine}
        stages = [PipelineStage(part, stage, count, torch.device("cpu")) for stage, part in parts.items()]
        runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=mse_loss)
        runtime._load_csv(f"{folder}/{name}.csv")
        losses: list[Tensor] = []
        runtime.step(*([inputs] if 0 in mine else []), target=targets if count - 1 in mine else None, losses=losses)
        loss = torch.stack(losses).mean().item() if losses else None
        found[name] = loss, {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    return found


def test_our_schedules_run_in_torchs_runtime(tmp_path):
    ranks = 2
    schedules = {n: p101.schedule(n, stages=ranks, chunks=chunks, microbatches=m) for n, (chunks, m) in OURS.items()}
    for name, schedule in schedules.items():
        (tmp_path / f"{name}.csv").write_text(schedule.to_csv())
    results = p101.launch(in_torchs_runtime, schedules, str(tmp_path), world_size=ranks).results
    expected_loss, expected = one_process()
    for name in schedules:
        (loss,) = [of_rank[name][0] for of_rank in results if of_rank[name][0] is not None]
        assert loss == pytest.approx(expected_loss, rel=CLOSE), name
        gradients = {parameter: g for of_rank in results for parameter, g in of_rank[name][1].items()}
        assert not differing(gradients, expected, CLOSE), name
