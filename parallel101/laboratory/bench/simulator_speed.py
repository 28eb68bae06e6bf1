"""Measures the simulator: messages per second and memory.

The program is a ring of plain isend and irecv, with every message recorded and checked.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.bench.comparison import BenchmarkReport, peak_memory


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    report.heading(
        "The sim backend: a ring in plain isend and irecv, every message recorded and checked"
    )
    rows = []
    runs = [(2, 64), (2, 256), (2, 256), (2, 256), (1, 1024)]
    for rounds, ranks in runs[:2] if quick else runs:
        began = time.perf_counter()
        run = p101.launch(round_the_ring, rounds, world_size=ranks, backend="sim", timeout=600)
        seconds = time.perf_counter() - began
        messages = sum(run.trace.messages_sent)  # type: ignore[union-attr]
        assert messages == rounds * ranks * (ranks - 1)
        times = f"{messages:,}", f"{seconds:.2f}", f"{messages / seconds:,.0f}"
        memory = f"{max(run.results) / 2**30:.2f}", f"{peak_memory() / 2**30:.2f}"
        rows.append((f"{ranks} ranks, {rounds} × round", *times, *memory))
        del run  # so that its memory is not counted in the next row
    head = ["", "messages", "seconds, launch to result", "messages a second"]
    head += ["peak GiB, ranks' process", "peak GiB, launching process"]
    report.table(head, rows)


def round_the_ring(rounds: int) -> int:
    """Pass every chunk round the ring, and return the peak memory in bytes.

    Once is an all-gather, and twice an all-reduce.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(torch.full((n,), float(rank)).chunk(n))
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(rounds * (n - 1)):
        sent: Any = dist.isend(chunks[(rank - step) % n], right)
        dist.irecv(chunks[(rank - step - 1) % n], left).wait()  # type: ignore[union-attr]
        sent.wait()
    return peak_memory()
