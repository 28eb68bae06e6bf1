"""Measures how long it takes to start four ranks and get their first result.

launch is compared with torch.multiprocessing.spawn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport
from parallel101.laboratory.bench.process import configure_spawned_rank
from parallel101.laboratory.doctor import sum_of_ranks
from parallel101.laboratory.ranks.processes import stop_server

RANKS = 4


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    stop_server()
    cold = _time_launch(backend)
    pairs = [(_time_launch(backend), time_spawn(backend)) for _ in range(2 if quick else 5)]
    warm = [ours for ours, _ in pairs] + [_time_launch(backend) for _ in range(10)]
    spawned = [theirs for _, theirs in pairs]
    report.heading(f"Launch of {RANKS} {backend} ranks, up to the result of their first all_reduce")
    rows = [
        _row("`launch`, the first of a process", [cold], ""),
        _row(
            "`launch`, warm",
            warm,
            f"{statistics.median(theirs / ours for ours, theirs in pairs):.1f} times faster",
        ),
        _row("`torch.multiprocessing.spawn`", spawned, ""),
    ]
    report.table(["seconds", "least", "median", "most", "pair by pair (median)"], rows)


def _row(name: str, seconds: list[float], ratio: str) -> tuple[str, ...]:
    return (
        name,
        f"{min(seconds):.3f}",
        f"{statistics.median(seconds):.3f}",
        f"{max(seconds):.3f}",
        ratio,
    )


def _time_launch(backend: str) -> float:
    began = time.perf_counter()
    results = p101.launch(sum_of_ranks, world_size=RANKS, backend=backend).results
    seconds = time.perf_counter() - began
    assert results == [sum(range(RANKS))] * RANKS
    return seconds


def time_spawn(backend: str) -> float:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_spawned_rank, (backend, str(Path(folder) / "store"), queue), nprocs=RANKS)
        results = [queue.get() for _ in range(RANKS)]
    seconds = time.perf_counter() - began
    assert results == [sum(range(RANKS))] * RANKS
    return seconds


def _spawned_rank(rank: int, backend: str, store: str, queue) -> None:
    configure_spawned_rank(rank, backend)
    dist.init_process_group(
        backend, store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS
    )
    queue.put(sum_of_ranks())
    dist.destroy_process_group()
