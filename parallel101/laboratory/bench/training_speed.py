"""Measures a training step of each trainer against torch's counterparts.

These are data parallel, tensor parallel and pipeline trainers (sides.py). All sides of a table
train the same model on the same batch, with the same optimizer and on the same ranks, one step each
in turn. Memory is measured in a run of its own for each side, because a process reports only one
peak, the highest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport
from parallel101.laboratory.bench.process import peak_memory, synchronize
from parallel101.laboratory.bench.sides import TABLES, TrainingStep, batch_of_rank, whole_model

WORLDS = [2, 4]
ROUNDS = 9


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    compare(report, "data", backend, quick)


def measure_tensor(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    compare(report, "tensor", backend, quick)


def measure_pipeline(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    compare(report, "pipeline", backend, quick)


def compare(report: BenchmarkReport, table: str, backend: str, quick: bool) -> None:
    """Print a table for each number of ranks."""
    title, sides, peers, _ = TABLES[table]
    for n in WORLDS[:1] if quick else WORLDS:
        report.heading(title.format(f"{n} {backend} ranks"))
        rounds = p101.launch(
            time_rounds, table, 2 if quick else ROUNDS, world_size=n, backend=backend, timeout=600
        ).results[0]
        report.table(
            ["", "ms a step", "least … most", *peers, "peak MB"],
            _rows(table, list(sides), rounds, n, backend),
        )
    report.sentence(
        "Times are medians, and ratios are taken round by round. Peak: the most memory of a rank's "
        "process, minus what it had before the model."
    )


def _rows(
    table: str, names: list[str], rounds: list[list[float]], n: int, backend: str
) -> Iterator[tuple[str, ...]]:
    peers = [names.index(name) for name in TABLES[table].peers.values()]
    for i, name in enumerate(names):
        times = [each[i] * 1e3 for each in rounds]
        peak = max(
            p101.launch(peak_bytes, table, name, world_size=n, backend=backend, timeout=600).results
        )
        yield (
            name,
            f"{statistics.median(times):.0f}",
            f"{min(times):.0f} … {max(times):.0f}",
            *(
                f"**{statistics.median(each[i] / each[peer] for each in rounds):.2f}**"
                for peer in peers
            ),
            f"{peak / 1e6:.0f}",
        )


# ---- on each rank ----


def time_rounds(table: str, rounds: int) -> list[list[float]]:
    """Return the seconds per step of each side, for each round."""
    _, sides, _, cut = TABLES[table]
    batch = batch_of_rank(cut)
    steps = [side(whole_model()) for side in sides.values()]
    for step in steps:
        for _ in range(3):  # warm up
            step(*batch)
    return [[_timed(step, batch) for step in steps] for _ in range(rounds)]


def peak_bytes(table: str, name: str) -> int:
    """Return the bytes by which the steps of a side raise the peak memory of this process.

    On GPUs it is the peak of what torch has allocated.
    """
    before = _peak()
    step = TABLES[table].sides[name](whole_model())
    batch = batch_of_rank(TABLES[table].cut)
    for _ in range(4):
        step(*batch)
    return _peak() - before


def _timed(step: TrainingStep, batch: tuple[Tensor, Tensor]) -> float:
    synchronize()
    began = time.perf_counter()
    step(*batch)
    synchronize()
    return time.perf_counter() - began


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if dist.get_backend() == "nccl" else peak_memory()
