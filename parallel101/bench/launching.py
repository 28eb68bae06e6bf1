"""How long it takes to have four ranks and their first result: our launch, warm, against torch.multiprocessing.spawn."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import parallel101 as p101
from parallel101.bench.ranks import as_launch_does
from parallel101.bench.report import Report
from parallel101.ranks.processes import stop_server

RANKS = 4


def measure(report: Report, *, backend: str, quick: bool) -> None:
    stop_server()
    cold = _ours(backend)
    pairs = [(_ours(backend), _spawned(backend)) for _ in range(2 if quick else 5)]
    ours = [first for first, _ in pairs] + [_ours(backend) for _ in range(10)]
    theirs = [second for _, second in pairs]
    report.heading(f"Launch of {RANKS} {backend} ranks to the result of their first all_reduce")
    rows = [
        ("`launch`, the first of a process", f"{cold:.3f}", f"{cold:.3f}", f"{cold:.3f}", ""),
        _row("`launch`, warm", ours, f"{statistics.median(b / a for a, b in pairs):.1f} times faster"),
        _row("`torch.multiprocessing.spawn`", theirs, ""),
    ]
    report.table(["seconds", "least", "median", "most", "pair by pair (median)"], rows)


def _row(name: str, seconds: list[float], ratio: str) -> tuple[str, ...]:
    return (name, f"{min(seconds):.3f}", f"{statistics.median(seconds):.3f}", f"{max(seconds):.3f}", ratio)


def _sum_of_ranks() -> float:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def _ours(backend: str) -> float:
    began = time.perf_counter()
    results = p101.launch(_sum_of_ranks, world_size=RANKS, backend=backend).results
    took = time.perf_counter() - began
    assert results == [sum(range(RANKS))] * RANKS
    return took


def _spawned(backend: str) -> float:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_spawned_rank, (backend, str(Path(folder) / "store"), queue), nprocs=RANKS)
        results = [queue.get() for _ in range(RANKS)]
    took = time.perf_counter() - began
    assert results == [sum(range(RANKS))] * RANKS
    return took


def _spawned_rank(rank: int, backend: str, store: str, queue) -> None:
    as_launch_does(rank, backend)
    dist.init_process_group(backend, store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    queue.put(_sum_of_ranks())
    dist.destroy_process_group()
