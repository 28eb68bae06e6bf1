"""How fast virtual ranks are: a ring in plain isend and irecv, every message recorded and checked."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.bench.ranks import peak_memory
from parallel101.bench.report import Report


def measure(report: Report, *, backend: str, quick: bool) -> None:
    report.heading("The sim backend: a ring in plain isend and irecv, every message recorded and checked")
    rows = []
    runs = [(2, 64), (2, 256), (2, 256), (2, 256), (1, 1024)]
    for rounds, ranks in runs[:2] if quick else runs:
        began = time.perf_counter()
        run = p101.launch(round_the_ring, rounds, world_size=ranks, backend="sim", timeout=600)
        took = time.perf_counter() - began
        assert run.trace is not None
        messages = sum(run.trace.messages_sent)
        assert messages == rounds * ranks * (ranks - 1)
        peak = max(run.results) / 2**30
        rows.append(
            (
                f"{ranks} ranks, {rounds} × round",
                f"{messages:,}",
                f"{took:.2f}",
                f"{messages / took:,.0f}",
                f"{peak:.2f}",
                f"{peak_memory() / 2**30:.2f}",
            )
        )
        del run
    head = [
        "",
        "messages",
        "seconds, launch to result",
        "messages a second",
        "GiB at most, the ranks' process",
        "GiB, the launching one",
    ]
    report.table(head, rows)


def round_the_ring(rounds: int) -> int:
    """Every rank's chunk all the way round, as in an all-gather (1 round) or an all-reduce (2). Returns the most memory used, in bytes."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(torch.full((n,), float(rank)).chunk(n))
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(rounds * (n - 1)):
        sent: Any = dist.isend(chunks[(rank - step) % n], right)
        dist.irecv(chunks[(rank - step - 1) % n], left).wait()  # type: ignore[union-attr]
        sent.wait()
    return peak_memory()
