"""Measures what the record costs: a small message there and back.

It goes through launch's group, and through torch's backend inside it, in turn.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.bench.benchmark_report import BenchmarkReport, median_and_range

NUMEL = 1024  # 4 KiB of float32


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    if backend == "nccl":
        # on NCCL a call returns before its message is sent, so the time of the calls says nothing
        return
    report.heading(f"What the record costs: 4 KiB there and back on {backend}, microseconds")
    rows = []
    for trace, name in (
        (False, "not recorded (who waits for whom is known)"),
        (True, "recorded and checked"),
    ):
        pairs = p101.launch(
            round_trips,
            200 if quick else 500,
            3 if quick else 9,
            world_size=2,
            backend=backend,
            trace=trace,
        ).results[0]
        recorded, plain = (statistics.median(side) * 1e6 for side in zip(*pairs))
        rows.append(
            (name, f"{recorded:.0f}", f"{plain:.0f}", *median_and_range([a / b for a, b in pairs]))
        )
    report.table(["", "through our group", "torch's backend itself", "ratio", "least … most"], rows)


def round_trips(count: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds per round trip, for each round.

    Each is (through launch's group, through torch's backend inside it).
    """
    group = dist.group.WORLD
    x, other = torch.zeros(NUMEL), 1 - dist.get_rank()

    def trip(through) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            if other:
                through.send([x], other, 0).wait()
                through.recv([x], other, 0).wait()
            else:
                through.recv([x], other, 0).wait()
                through.send([x], other, 0).wait()
        return (time.perf_counter() - began) / count

    trip(group), trip(group.inner)  # type: ignore[union-attr]
    return [(trip(group), trip(group.inner)) for _ in range(rounds)]  # type: ignore[union-attr]
