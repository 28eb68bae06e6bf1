"""Measures what the record costs: a small message there and back, and a training step.

The message goes through launch's group, and through torch's backend inside it, in turn. The step is
one of DDP in three jobs of torchrun's, in turn: torchrun alone, a launch (which watches who waits
for whom), and `parallel101 run --record`.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import (
    BenchmarkReport,
    median_and_interval,
    median_and_range,
)
from parallel101.laboratory.bench.timed_job import JobTimer, timed_jobs

NUMEL = 1024  # 4 KiB of float32
ALONE, WATCHED, RECORDED = "torchrun alone", "watching", "recording"


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
    with tempfile.TemporaryDirectory() as folder:
        record = ["-m", "parallel101", "run", "--record", folder]
        with timed_jobs({ALONE: [], WATCHED: ["launch"], RECORDED: record}) as timer:
            measure_steps(report, timer, quick)


def measure_steps(report: BenchmarkReport, timer: JobTimer, quick: bool) -> None:
    """Add a table of the time of a step, and of its ratio to torchrun alone in the same round."""
    steps, rounds = (2, 3) if quick else (10, 60)
    names = [ALONE, WATCHED, RECORDED]
    for name in names:
        timer.step(name, steps)
    times = []
    for k in range(rounds):  # each job is the first one equally often
        turn = names[k % 3 :] + names[: k % 3]
        times.append({name: timer.step(name, steps) for name in turn})
    report.heading(f"What watching and recording cost: a step of DDP on 2 ranks, {steps} at a time")
    rows = []
    for name in names:
        wall, cpu = ([of[name][k] for of in times] for k in range(2))
        ratios, of_cpu = ([of[name][k] / of[ALONE][k] for of in times] for k in range(2))
        rows.append(
            (
                name,
                f"{statistics.median(wall) * 1e3:.1f}",
                *median_and_interval(ratios),
                f"{statistics.median(cpu) * 1e3:.1f}",
                *median_and_interval(of_cpu),
            )
        )
    head = ["", "ms", "ratio", "95 %", "CPU ms of rank 0", "ratio of CPU time", "95 %"]
    report.table(head, rows)
    report.sentence(
        f"Ratios are medians over {rounds} rounds. 95 %: where the median would be if there were "
        "more rounds, with that probability."
    )


def round_trips(count: int, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds per round trip, for each round.

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
