"""Our schedules run in torch.distributed.pipelining, and torch's lists run in PipelineTrainer: both
equal one process, in float64.

torch's lists are made by its own classes: compute only, and with the sends and receives that it
adds. For two ranks with two stages each they are those of its test artefacts
zb1p_2rank_2stagep_compute.csv and zb1p_2rank_2stagep_comms.csv (pytorch,
test/distributed/pipelining).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

import parallel101 as p101
from tests.trainers.cases import (
    CLOSE,
    TASKS,
    Task,
    case,
    differing,
    one_process,
    randn,
    unlike_one_process,
)
from tests.trainers.test_schedules import TORCHS, Mock, csv_of

LAYERS, WIDTH, SAMPLES = 8, 5, 40


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    ).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    return randn(step, SAMPLES, WIDTH), randn(100 + step, SAMPLES, WIDTH)


TASKS["eight layers"] = TASK = Task(model, mse_loss, batch)


OURS = {  # name → chunks, microbatches
    "gpipe": (1, 4),
    "1f1b": (1, 4),
    "interleaved": (2, 4),
    "zb-h1": (1, 4),
    "zb-h2": (1, 8),
}


def in_torchs_runtime(
    schedules: dict[str, p101.Schedule], folder: str
) -> dict[str, tuple[float | None, dict[str, Tensor | None]]]:
    """The loss, where it is known, and the gradients of this rank's stages."""
    rank, found = dist.get_rank(), {}
    for name, schedule in schedules.items():
        whole, (inputs, targets), count = model(), batch(0), len(schedule.placement)
        each = LAYERS // count
        mine = [stage for stage, of in schedule.placement.items() if of == rank]
        parts = {stage: whole[stage * each : (stage + 1) * each] for stage in mine}
        cpu = torch.device("cpu")
        stages = [PipelineStage(part, stage, count, cpu) for stage, part in parts.items()]
        runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=mse_loss)
        runtime._load_csv(f"{folder}/{name}.csv")
        losses: list[Tensor] = []
        last = count - 1 in mine
        runtime.step(*[inputs] * (0 in mine), target=targets if last else None, losses=losses)
        loss = torch.stack(losses).mean().item() if losses else None
        gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        found[name] = loss, gradients
    return found


def test_our_schedules_run_in_torchs_runtime(tmp_path):
    ranks = 2
    schedules = {}
    for name, (chunks, m) in OURS.items():
        schedule = p101.schedule(name, stages=ranks, chunks=chunks, microbatches=m)
        schedules[name] = schedule
        (tmp_path / f"{name}.csv").write_text(schedule.to_csv())
    results = p101.launch(in_torchs_runtime, schedules, str(tmp_path), world_size=ranks).results
    expected = one_process(TASK, "sgd", None, 1)
    for name in schedules:
        (loss,) = [of_rank[name][0] for of_rank in results if of_rank[name][0] is not None]
        assert loss == pytest.approx(expected.losses[0], rel=CLOSE), name
        gradients = results[0][name][1] | results[1][name][1]
        assert not differing(gradients, expected.gradients[0], CLOSE), name


def torchs_lists() -> dict[int, dict[str, str]]:
    """Number of ranks → name → CSV."""
    zero_bubble = torchs.ScheduleInterleavedZeroBubble(
        [Mock(4, 2, stage) for stage in (0, 2)], 8, loss_fn=mse_loss
    )
    order = {rank: [*filter(None, zero_bubble.pipeline_order[rank])] for rank in range(2)}
    # B where W follows I
    merged = {rank: torchs._merge_bw(list(actions)) for rank, actions in order.items()}
    full = torchs._add_send_recv(merged, stage_to_rank=lambda stage: stage % 2, num_stages=4)
    of_two = {
        "zb1p, compute": "\n".join(",".join(map(str, of_rank)) for of_rank in order.values()),
        "zb1p, with messages": "\n".join(",".join(map(str, of_rank)) for of_rank in full.values()),
    }
    of_four = {
        f"{name}, {how}": text
        for name in TORCHS
        for how, text in zip(("compute", "with messages"), csv_of(name))
    }
    return {2: of_two, 4: of_four}


def run_lists(lists: dict[str, str]) -> list[str]:
    """Where the trainer differs from one process."""
    return unlike_one_process(
        [
            case(f"pp {dist.get_world_size()}", "eight layers", "sgd", None, schedule=schedule)
            for schedule in map(p101.Schedule.from_csv, lists.values())
        ],
        steps=1,
    )


@pytest.mark.parametrize(
    ("ranks", "where"),
    [(2, {}), (4, {"backend": "sim", "rules": "nccl"})],
    ids=["2 on gloo", "4 by NCCL's rules"],
)
def test_torchs_lists_run_in_our_trainer(ranks, where):
    lists = torchs_lists()[ranks]
    for found in p101.launch(run_lists, lists, world_size=ranks, **where).results:
        assert found == []
