"""Measures a training step: DataParallelTrainer against DistributedDataParallel, and ShardedTrainer against fully_shard (FSDP2).

All train the same model on the same batch, with the same optimizer and on the same ranks, one step each in turn. The model is
8 × Linear(1024) + GELU with AdamW, and the whole batch has 256 samples. Memory is measured in a run of its own for each trainer, because
a process reports only one peak, the highest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import parallel101 as p101
from parallel101.bench.process import peak_memory, synchronize
from parallel101.bench.report import Report
from parallel101.mesh import split_sizes

WIDTH, DEPTH, BATCH = 1024, 8, 256
WORLDS = [2, 4]
ROUNDS = 9

Step = Callable[[Tensor, Tensor], Any]


def measure(report: Report, *, backend: str, quick: bool) -> None:
    names = list(TRAINERS)
    for n in WORLDS[:1] if quick else WORLDS:
        report.heading(f"A training step on {n} {backend} ranks: {DEPTH} × Linear({WIDTH}) + GELU, batch {BATCH}, AdamW")
        rounds = p101.launch(time_rounds, names, 2 if quick else ROUNDS, world_size=n, backend=backend, timeout=600).results[0]
        report.table(["", "ms a step", "least … most", "/ DDP", "/ FSDP2", "peak MB"], _rows(names, rounds, n, backend))
    report.sentence(
        "Times are medians, and ratios are taken round by round. "
        "Peak: the most memory of a rank's process, minus what it had before the model."
    )


def _rows(names: list[str], rounds: list[list[float]], n: int, backend: str) -> Iterator[tuple[str, ...]]:
    ddp, fsdp = names.index("torch DDP"), names.index("torch FSDP2")
    for i, name in enumerate(names):
        times = [each[i] * 1e3 for each in rounds]
        peak = max(p101.launch(peak_bytes, name, world_size=n, backend=backend, timeout=600).results)
        yield (
            name,
            f"{statistics.median(times):.0f}",
            f"{min(times):.0f} … {max(times):.0f}",
            f"**{statistics.median(each[i] / each[ddp] for each in rounds):.2f}**",
            f"**{statistics.median(each[i] / each[fsdp] for each in rounds):.2f}**",
            f"{peak / 1e6:.0f}",
        )


# ---- on each rank ----


def time_rounds(names: list[str], rounds: int) -> list[list[float]]:
    """Seconds per step of each trainer, for each round."""
    batch = _share()
    steps = [TRAINERS[name](_model()) for name in names]
    for step in steps:
        for _ in range(3):  # warm up
            step(*batch)
    return [[_timed(step, batch) for step in steps] for _ in range(rounds)]


def peak_bytes(name: str) -> int:
    """Bytes by which a trainer's steps raise the peak memory of this process. On GPUs it is the peak of what torch has allocated."""
    before = _peak()
    step = TRAINERS[name](_model())
    batch = _share()
    for _ in range(4):
        step(*batch)
    return _peak() - before


def _timed(step: Step, batch: tuple[Tensor, Tensor]) -> float:
    synchronize()
    began = time.perf_counter()
    step(*batch)
    synchronize()
    return time.perf_counter() - began


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if dist.get_backend() == "nccl" else peak_memory()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def _share() -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    sizes = split_sizes(BATCH, dist.get_world_size())
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=generator).split(sizes)[dist.get_rank()].clone() for _ in range(2))
    return inputs, targets


def _adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _alone(model: nn.Module) -> Step:
    """Train on this rank's share alone, without communication: the rest of the step."""
    optimizer = _adamw(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _ddp(model: nn.Module) -> Step:
    return _alone(nn.parallel.DistributedDataParallel(model))


def _fsdp(model: nn.Module) -> Step:
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return _alone(model)


def _data_parallel(model: nn.Module) -> Step:
    return p101.DataParallelTrainer(model, mse_loss, _adamw).step


def _sharded(zero_stage: int) -> Callable[[nn.Module], Step]:
    return lambda model: p101.ShardedTrainer(model, mse_loss, _adamw, zero_stage=zero_stage).step


TRAINERS: dict[str, Callable[[nn.Module], Step]] = {
    "no communication": _alone,
    "torch DDP": _ddp,
    "DataParallelTrainer": _data_parallel,
    "torch FSDP2": _fsdp,
    "ShardedTrainer, ZeRO stage 1": _sharded(1),
    "ShardedTrainer, ZeRO stage 2": _sharded(2),
    "ShardedTrainer, ZeRO stage 3": _sharded(3),
}
