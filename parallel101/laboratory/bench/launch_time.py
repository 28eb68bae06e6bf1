"""Measures how long it takes to start four ranks and get their first result.

launch is compared with torch.multiprocessing.spawn.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport
from parallel101.laboratory.bench.comparison import ratio_table, take_turns
from parallel101.laboratory.doctor import sum_of_ranks
from parallel101.laboratory.ranks.processes import stop_server

RANKS = 4
WARM, SPAWN = "`launch`, warm", "`torch.multiprocessing.spawn`"


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    stop_server()
    cold = time_launch(backend)
    clocks = {WARM: partial(time_launch, backend), SPAWN: partial(time_spawn, backend)}
    rounds = take_turns(clocks, 2 if quick else 9)
    report.heading(f"Launch of {RANKS} {backend} ranks, up to the result of their first all_reduce")
    report.table(*ratio_table(rounds, {"/ spawn": SPAWN}))
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
    torch.set_num_threads(1)  # as launch does, and on NCCL one GPU each
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    dist.init_process_group(
        backend, store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS
    )
    queue.put(sum_of_ranks())
    dist.destroy_process_group()
