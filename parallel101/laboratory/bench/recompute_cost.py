"""Measures recomputation: activations and seconds of a step, against the step that keeps them all.

One rank trains a GPT. The ways take turns, a step each, so that a disturbance hits all of them. The
activations are counted (`p101.count_activations`) in a step that is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport
from parallel101.laboratory.bench.process import synchronize
from parallel101.laboratory.bench.sides import adamw
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss

SIZES: dict[str, Any] = {"vocabulary": 96, "context": 128, "layers": 8, "heads": 8, "width": 256}
BATCH, ROUNDS = 8, 9
KEPT = "all kept, attention unfused"
WAYS = {  # the attention, recompute=
    KEPT: ("unfused", "none"),
    "selective": ("unfused", "selective"),
    "full": ("unfused", "full"),
    "all kept, attention fused": ("fused", "none"),
    "full, attention fused": ("fused", "full"),
}


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    report.heading(
        f"`recompute=`, on 1 {backend} rank: a GPT of {SIZES['layers']} layers, width "
        f"{SIZES['width']} and {SIZES['heads']} heads, {BATCH} texts of {SIZES['context']} tokens"
    )
    peaks, rounds = p101.launch(
        time_ways, 2 if quick else ROUNDS, world_size=1, backend=backend, timeout=600
    ).results[0]
    report.table(
        ["", "ms a step", "least … most", f"/ {KEPT}", "activations, MB"], rows(peaks, rounds)
    )
    report.sentence(
        "Times are medians, and ratios are taken round by round. Activations: counted, at the peak."
    )


def rows(peaks: dict[str, int], rounds: list[dict[str, float]]) -> Iterator[tuple[str, ...]]:
    for name, peak in peaks.items():
        times = [of_round[name] * 1e3 for of_round in rounds]
        ratio = statistics.median(of_round[name] / of_round[KEPT] for of_round in rounds)
        yield (
            name,
            f"{statistics.median(times):.0f}",
            f"{min(times):.0f} … {max(times):.0f}",
            f"**{ratio:.2f}**",
            f"{peak / 1e6:.1f}",
        )


def time_ways(rounds: int) -> tuple[dict[str, int], list[dict[str, float]]]:
    """Return the peak bytes of activations of each way to train, and its seconds in each round."""
    torch.manual_seed(0)
    text = torch.randint(SIZES["vocabulary"], (BATCH, SIZES["context"] + 1))
    batch = text[:, :-1], text[:, 1:]
    trainers = {
        name: p101.DataParallelTrainer(
            GPT(GPTConfig(**SIZES, attention=attention)),
            next_token_loss,
            adamw,
            recompute=recompute,
            verify=False,
        )
        for name, (attention, recompute) in WAYS.items()
    }
    peaks = {}
    for name, trainer in trainers.items():
        trainer.step(*batch)  # warm up
        with p101.count_activations(trainer) as activations:
            trainer.step(*batch)
        peaks[name] = activations.peak
    return peaks, [
        {name: timed(trainer, batch) for name, trainer in trainers.items()} for _ in range(rounds)
    ]


def timed(trainer: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    synchronize()
    began = time.perf_counter()
    trainer.step(*batch)
    synchronize()
    return time.perf_counter() - began
