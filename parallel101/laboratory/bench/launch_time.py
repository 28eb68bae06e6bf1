"""Measures how long it takes to start four ranks and get their first result.

launch is compared with torch.multiprocessing.spawn.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

import parallel101 as p101
from parallel101.laboratory.bench.comparison import BenchmarkReport, take_turns
from parallel101.laboratory.bench.peer_jobs import join
from parallel101.laboratory.doctor import sum_of_ranks
from parallel101.laboratory.ranks.processes import stop_server

RANKS = 4
WARM, SPAWN = "`launch`, warm", "`torch.multiprocessing.spawn`"


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    stop_server()
    cold = time_launch(backend)
    clocks = {WARM: partial(time_launch, backend), SPAWN: partial(time_spawn, backend)}
    title = f"Launch of {RANKS} {backend} ranks, up to the result of their first all_reduce"
    report.ratios(title, take_turns(clocks, 2 if quick else 9), {"/ spawn": SPAWN})
    report.sentence(f"The first `launch` of a process also starts its server: {cold * 1e3:.0f} ms.")


def time_launch(backend: str) -> float:
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
    join(backend, rank, store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    queue.put(sum_of_ranks())
    dist.destroy_process_group()
