"""Measures what the record costs: a small message there and back, and a training step.

The message goes through launch's group, and through torch's backend inside it. The step is one of
DDP in three jobs of torchrun's: torchrun alone, a launch (which watches who waits for whom), and
`parallel101 run --record`.
"""

from __future__ import annotations

import tempfile
import time
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from parallel101.laboratory.bench.comparison import (
    Benchmark,
    BenchmarkReport,
    Work,
    take_turns,
)
from parallel101.laboratory.bench.peer_jobs import ask, peer_jobs
from parallel101.laboratory.bench.timed_training import batch_of_rank, ddp, whole_model

NUMEL, TRIPS = 1024, 500  # 4 KiB of float32
WIDTH = 592  # of the model: a step then takes about 50 ms on a core with AVX2
ALONE, WATCHED, RECORDED = "torchrun alone", "watching", "recording"
PLAIN, OURS = "torch's backend itself", "through our group"


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    if backend == "nccl":
        # on NCCL a call returns before its message is sent, so the time of the calls says nothing
        return
    watched = "not recorded (who waits for whom is known)"
    for trace, name in ((False, watched), (True, "recorded and checked")):
        Benchmark(
            f"What the record costs: 4 KiB there and back {TRIPS} times on {{}}, {name}",
            {PLAIN: partial(round_trips, True), OURS: partial(round_trips, False)},
            {f"/ {PLAIN}": PLAIN},
            ranks=(2,),
            options={"trace": trace},
        )(report, backend=backend, quick=quick)
    steps, rounds = (2, 3) if quick else (10, 60)
    with tempfile.TemporaryDirectory() as folder:
        record = ["-m", "parallel101", "run", "--record", folder]
        jobs = {ALONE: [], WATCHED: ["launch"], RECORDED: record}
        with peer_jobs(jobs) as port:
            clocks = {name: partial(ask, port, name, train, steps) for name in jobs}
            take_turns(clocks, 1)
            times = take_turns(clocks, rounds)
    for k, what in enumerate(("", ": CPU time of rank 0")):
        title = f"What watching and recording cost a step of DDP on 2 ranks{what}"
        seconds = [{name: took[k] for name, took in of.items()} for of in times]
        report.ratios(title, seconds, {f"/ {ALONE}": ALONE})
    report.sentence(
        f"Ratios are medians over {rounds} rounds of {steps} steps. 95 %: where the median would "
        "be if there were more rounds, with that probability."
    )


# ---- on each rank ----


def round_trips(plain: bool) -> Work:
    """Return a ping-pong of two ranks, through launch's group or torch's backend inside it."""
    group: Any = dist.group.WORLD
    through = group.inner if plain else group
    x, other = torch.zeros(NUMEL), 1 - dist.get_rank()

    def work() -> None:
        for turn in range(2 * TRIPS):
            call = through.send if turn % 2 == dist.get_rank() else through.recv
            call([x], other, 0).wait()

    return work


@cache
def step_of_rank() -> Work:
    return partial(ddp(whole_model(WIDTH)), *batch_of_rank(True, WIDTH))


def train(count: int) -> tuple[float, float]:
    """Return the seconds of a step, and those of CPU time, as the mean over `count` steps."""
    step: Any = step_of_rank()
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        dist.all_reduce(step())
    return (time.perf_counter() - began) / count, (time.process_time() - cpu) / count
