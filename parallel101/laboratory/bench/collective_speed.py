"""Measures each of our collectives against torch's, in the style of nccl-tests.

    ours            our function, on the ranks of a launch
    torch           torch's function, in a job of torchrun's
    in our ranks    torch's function on the ranks of the launch, so that only the algorithms differ

The three are measured in turn. Each measurement is many calls between two barriers, and each call
allocates its result. The columns are size, time, algorithm bandwidth, bus bandwidth and ratio. S is
the size of the whole array: the result of an all-gather, the input of a reduce-scatter. algbw = S /
time, and busbw = algbw × factor (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import parallel101 as p101
from parallel101.laboratory.bench.comparison import BenchmarkReport, ratio, seconds_of, take_turns
from parallel101.laboratory.bench.peer_jobs import ask, peer_jobs
from parallel101.laboratory.record.units import human_bytes

SIZES = [1 << 10, 32 << 10, 1 << 20, 8 << 20, 64 << 20]
RANKS = [2, 4]
ROUNDS = 5
# that each side is measured in each round; this sets the number of calls between two barriers
SECONDS = 0.12
OURS, TORCHS, INSIDE = "ours", "torch", "torch in our ranks"
# by operation: from algorithm bandwidth to bus bandwidth, with n ranks
PARTS = "scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"
BUS = dict.fromkeys(PARTS, lambda n: (n - 1) / n)
BUS |= dict.fromkeys(("broadcast", "reduce"), lambda n: 1.0)
BUS |= {"all_reduce": lambda n: 2 * (n - 1) / n}


# torch's own function for what each rank passes to ours
TORCHS_OWN: dict[str, Callable[..., Any]] = {
    "broadcast": lambda x, n, first: dist.broadcast(x.clone() if first else torch.empty_like(x), 0),
    "scatter": lambda x, n, first: dist.scatter(
        x.new_empty(len(x) // n), list(x.chunk(n)) if first else None, 0
    ),
    "gather": lambda x, n, first: dist.gather(
        x, list(x.new_empty(n * len(x)).chunk(n)) if first else None, 0
    ),
    "reduce": lambda x, n, first: dist.reduce(x.clone(), 0),
    "all_gather": lambda x, n, first: dist.all_gather_single(x.new_empty(n * len(x)), x),
    "reduce_scatter": lambda x, n, first: dist.reduce_scatter_single(x.new_empty(len(x) // n), x),
    "all_reduce": lambda x, n, first: dist.all_reduce(x.clone()),
    "all_to_all": lambda x, n, first: dist.all_to_all_single(torch.empty_like(x), x),
}


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    sizes, rounds = (SIZES[::2], 2) if quick else (SIZES, ROUNDS)
    head = ["operation, size", "ours µs", "algbw GB/s", "busbw GB/s"]
    head += ["torch µs", "torch busbw", "torch / ours", "95 %"]
    head += ["torch in our ranks µs", "/ ours", "95 %"]
    for n in RANKS:
        report.heading(f"Collectives on {n} {backend} ranks, against torch's own")
        with peer_jobs({TORCHS: []}, ranks=n, backend=backend) as port:
            launch = partial(p101.launch, world_size=n, backend=backend, timeout=300)
            report.table(head, _rows(n, partial(launch, time_rounds, port, rounds), sizes))
    report.sentence(
        "torch: torch's own call, in a job that torchrun started. In our ranks: the same call on "
        "ranks of `launch`, which keep freed memory and are scheduled as batch work. Times are "
        "medians of the rounds, and ratios are taken round by round. If a ratio is above 1, ours "
        "is faster."
    )


def _rows(n: int, launch: partial, sizes: list[int]) -> Iterator[tuple[str, ...]]:
    for (operation, factor), nbytes in product(BUS.items(), sizes):
        turns = launch(operation, nbytes).results[0]
        median = {side: statistics.median(of[side] for of in turns) for side in turns[0]}
        speed = {side: nbytes / seconds / 1e9 for side, seconds in median.items()}
        bus = {side: f"{each * factor(n):.3f}" for side, each in speed.items()}
        µs = {side: f"{seconds * 1e6:.0f}" for side, seconds in median.items()}
        yield (
            *(f"{operation}, {human_bytes(nbytes)}", µs[OURS], f"{speed[OURS]:.3f}", bus[OURS]),
            *(µs[TORCHS], bus[TORCHS], *ratio(turns, TORCHS, OURS)),
            *(µs[INSIDE], *ratio(turns, INSIDE, OURS)),
        )


# ---- on each rank ----


def time_rounds(port: int, rounds: int, operation: str, nbytes: int) -> list[dict[str, float]]:
    """Return the seconds per call of each side, for each round; rank 0 alone knows torch's."""
    x, first = _input(operation, nbytes), dist.get_rank() == 0
    asked = partial(ask, port, TORCHS, time_torchs, operation, nbytes)
    sides: dict[str, Callable[[int], float]] = {
        OURS: partial(seconds_of, partial(getattr(p101, operation), x)),
        TORCHS: asked if first else float,  # the others wait in the next side's barrier
        INSIDE: partial(time_torchs, operation, nbytes),
    }
    for side in sides.values():  # warm up: connections are opened and memory is allocated
        side(2)
    counts = torch.tensor([min(2000, int(SECONDS / side(2)) + 1) for side in sides.values()])
    dist.broadcast(counts, 0)  # all ranks make the same number of calls
    calls = zip(sides.items(), counts.tolist())
    return take_turns({name: partial(side, count) for (name, side), count in calls}, rounds)


def time_torchs(operation: str, nbytes: int, calls: int) -> float:
    """Return the seconds per call of torch's own function, on the ranks that call this."""
    x, n, first = _input(operation, nbytes), dist.get_world_size(), dist.get_rank() == 0
    return seconds_of(partial(TORCHS_OWN[operation], x, n, first), calls)


def _input(operation: str, nbytes: int) -> Tensor:
    n = dist.get_world_size()
    return torch.ones(nbytes // 4 // n * (1 if operation in ("gather", "all_gather") else n))
