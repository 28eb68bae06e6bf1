"""Measures `trainer.verify`, against training steps of one process on the whole batch.

Trainers call it once before their first step. On real ranks one process takes its steps on the
first rank, while the others wait. On the sim all virtual ranks share one core, and the seconds are
real ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport
from parallel101.laboratory.bench.process import synchronize
from parallel101.laboratory.bench.sides import adamw, alone
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(vocabulary=96, context=64, layers=4, heads=4, width=128)
BATCH, ROUNDS = 32, 5
LAYOUTS: dict[str, Callable[..., Any]] = {
    "data parallel": p101.DataParallelTrainer,
    "ZeRO-3": p101.ShardedTrainer,
    "tensor parallel": p101.TensorParallelTrainer,
    "pipeline, 4 microbatches": lambda *args: p101.PipelineTrainer(*args, microbatches=4),
}


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    rounds = 2 if quick else ROUNDS
    report.heading(
        f"`verify`, once, on 2 {backend} ranks and on 8 virtual ones: a GPT of 4 layers and width "
        f"128, {BATCH} texts"
    )
    report.table(
        [
            "",
            "verify, ms",
            "least … most",
            "one process's step, ms",
            "verify / step",
            "least … most",
        ],
        rows(backend, rounds),
    )
    report.sentence("Times are medians, and ratios are taken round by round.")


def rows(backend: str, rounds: int) -> Iterator[tuple[str, ...]]:
    for name in LAYOUTS:
        yield row(
            name,
            p101.launch(
                time_rounds, name, rounds, world_size=2, backend=backend, timeout=600
            ).results[0],
        )
    yield row(
        "dp 2 × tp 2 × pp 2, on the sim",
        p101.launch(time_hybrid, rounds, world_size=8, backend="sim", timeout=600).results[0],
    )


def row(name: str, times: list[tuple[float, float]]) -> tuple[str, ...]:
    milliseconds = [verify * 1e3 for verify, _ in times]
    ratios = [verify / step for verify, step in times]
    return (
        name,
        f"{statistics.median(milliseconds):.0f}",
        f"{min(milliseconds):.0f} … {max(milliseconds):.0f}",
        f"{statistics.median(step for _, step in times) * 1e3:.0f}",
        f"**{statistics.median(ratios):.2f}**",
        f"{min(ratios):.2f} … {max(ratios):.2f}",
    )


# ---- on each rank ----


def time_rounds(name: str, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of a verification, and of one process's step, for each round."""
    return time_both(LAYOUTS[name](GPT(CONFIG), next_token_loss, adamw), rounds)


def time_hybrid(rounds: int) -> list[tuple[float, float]]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))
    return time_both(
        p101.HybridTrainer(GPT(CONFIG), next_token_loss, adamw, mesh=mesh, microbatches=4), rounds
    )


def time_both(trainer: p101.HybridTrainer, rounds: int) -> list[tuple[float, float]]:
    text = torch.randint(
        CONFIG.vocabulary,
        (BATCH, CONFIG.context + 1),
        generator=torch.Generator("cpu").manual_seed(0),
        device="cpu",
    )
    batch = text[:, :-1].to(trainer.device), text[:, 1:].to(trainer.device)
    share, step = trainer.share(batch), alone(GPT(CONFIG), next_token_loss)
    trainer.verify(*share)  # warm up
    return [
        (timed(lambda: trainer.verify(*share)), timed(lambda: step_of_first(step, batch)))
        for _ in range(rounds)
    ]


def step_of_first(step: Callable[..., Any], batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        step(*batch)


def timed(work: Callable[[], object]) -> float:
    dist.barrier()
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    dist.barrier()
    return time.perf_counter() - began
