"""Measures each of our collectives against torch's, in the style of nccl-tests.

    ours            our function, on the ranks of a launch
    torch           torch's function, in processes that torch.multiprocessing.spawn starts
    in our ranks    torch's function on the ranks of the launch, so that only the algorithms differ

The three are measured in turn. Each measurement is many calls between two barriers, and each call
allocates its result. The columns are size, time, algorithm bandwidth, bus bandwidth and ratio. S is
the size of the whole array: the result of an all-gather, the input of a reduce-scatter. algbw = S /
time, and busbw = algbw × factor (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport, median_and_range
from parallel101.laboratory.bench.process import synchronize
from parallel101.laboratory.bench.spawned import ask, spawned_ranks
from parallel101.laboratory.record.units import human_bytes

SIZES = [1 << 10, 32 << 10, 1 << 20, 8 << 20, 64 << 20]
WORLDS = [2, 4]
ROUNDS = 5
# that each side is measured in each round; this sets the number of calls between two barriers
SECONDS = 0.12


class ComparedCollective(NamedTuple):
    """One operation: its input, our call, torch's call, and the factor from algbw to busbw."""

    make_input: Callable[[int, int], torch.Tensor]  # (numel of the whole array, ranks) → x
    ours: Callable[[torch.Tensor], torch.Tensor]
    torchs: Callable[[torch.Tensor, int, int], object]  # called with x, rank, ranks
    bus_factor: Callable[[int], float]  # of the number of ranks


def _whole(numel: int, n: int) -> torch.Tensor:
    return torch.ones(numel)


def _shard(numel: int, n: int) -> torch.Tensor:
    return torch.ones(numel // n)


def _broadcast(x: torch.Tensor, rank: int, n: int) -> None:
    dist.broadcast(x.clone() if rank == 0 else torch.empty_like(x), 0)


def _scatter(x: torch.Tensor, rank: int, n: int) -> None:
    dist.scatter(x.new_empty(len(x) // n), list(x.chunk(n)) if rank == 0 else None, 0)


def _gather(x: torch.Tensor, rank: int, n: int) -> None:
    dist.gather(x, list(x.new_empty(n * len(x)).chunk(n)) if rank == 0 else None, 0)


def _reduce(x: torch.Tensor, rank: int, n: int) -> None:
    dist.reduce(x.clone(), 0)


def _all_gather(x: torch.Tensor, rank: int, n: int) -> None:
    dist.all_gather_single(x.new_empty(n * len(x)), x)


def _reduce_scatter(x: torch.Tensor, rank: int, n: int) -> None:
    dist.reduce_scatter_single(x.new_empty(len(x) // n), x)


def _all_reduce(x: torch.Tensor, rank: int, n: int) -> None:
    dist.all_reduce(x.clone())


def _all_to_all(x: torch.Tensor, rank: int, n: int) -> None:
    dist.all_to_all_single(torch.empty_like(x), x)


def _one(n: int) -> float:
    return 1.0


def _share_of_others(n: int) -> float:
    return (n - 1) / n


COMPARISONS = {
    "broadcast": ComparedCollective(_whole, p101.broadcast, _broadcast, _one),
    "scatter": ComparedCollective(_whole, p101.scatter, _scatter, _share_of_others),
    "gather": ComparedCollective(_shard, p101.gather, _gather, _share_of_others),
    "reduce": ComparedCollective(_whole, p101.reduce, _reduce, _one),
    "all_gather": ComparedCollective(_shard, p101.all_gather, _all_gather, _share_of_others),
    "reduce_scatter": ComparedCollective(
        _whole, p101.reduce_scatter, _reduce_scatter, _share_of_others
    ),
    "all_reduce": ComparedCollective(
        _whole, p101.all_reduce, _all_reduce, lambda n: 2 * (n - 1) / n
    ),
    "all_to_all": ComparedCollective(_whole, p101.all_to_all, _all_to_all, _share_of_others),
}


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    sizes, rounds = (SIZES[::2], 2) if quick else (SIZES, ROUNDS)
    head = ["operation, size", "ours µs", "algbw GB/s", "busbw GB/s"]
    head += ["torch µs", "torch busbw", "torch / ours", "least … most"]
    head += ["torch in our ranks µs", "/ ours", "least … most"]
    for n in WORLDS:
        report.heading(f"Collectives on {n} {backend} ranks, against torch's own")
        with spawned_ranks(time_torchs, n, backend) as port:
            report.table(head, _rows(n, backend, port, sizes, rounds))
    report.sentence(
        "torch: torch's own call, in processes that torch.multiprocessing.spawn started. In our "
        "ranks: the same call on ranks of `launch`, which keep freed memory and are scheduled as "
        "batch work. Times are medians of the rounds, and ratios are taken round by round. If a "
        "ratio is above 1, ours is faster."
    )


def _rows(
    n: int, backend: str, port: int, sizes: list[int], rounds: int
) -> Iterator[tuple[str, ...]]:
    for name, comparison in COMPARISONS.items():
        for nbytes in sizes:
            turns = p101.launch(
                time_rounds, name, nbytes, rounds, port, world_size=n, backend=backend, timeout=300
            ).results[0]
            ours, torchs, in_our_ranks = (statistics.median(side) for side in zip(*turns))
            algbw, factor = nbytes / ours / 1e9, comparison.bus_factor(n)
            yield (
                f"{name}, {human_bytes(nbytes)}",
                f"{ours * 1e6:.0f}",
                f"{algbw:.3f}",
                f"{algbw * factor:.3f}",
                f"{torchs * 1e6:.0f}",
                f"{nbytes / torchs / 1e9 * factor:.3f}",
                *median_and_range([b / a for a, b, _ in turns]),
                f"{in_our_ranks * 1e6:.0f}",
                *median_and_range([c / a for a, _, c in turns]),
            )


def time_rounds(name: str, nbytes: int, rounds: int, port: int) -> list[tuple[float, ...]]:
    """Return the seconds per call of (ours, torch's spawned, torch's on our ranks), for each round.

    Torch's function is timed twice: on spawned ranks, and on ours.

    Every launched rank calls this.
    """
    x = _input(name, nbytes)
    sides: tuple[Callable[[int], float], ...] = (
        lambda calls: _timed(lambda: COMPARISONS[name].ours(x), calls),
        lambda calls: ask(port, name, nbytes, calls=calls),
        lambda calls: time_torchs(name, nbytes, calls=calls),
    )
    for side in sides:  # warm up: connections are opened and memory is allocated
        side(2)
    calls = [max(1, min(2000, int(SECONDS / _slowest(side(2))))) for side in sides]
    return [tuple(side(count) for side, count in zip(sides, calls)) for _ in range(rounds)]


def time_torchs(name: str, nbytes: int, *, calls: int) -> float:
    """Return the seconds per call of torch's own function, on the ranks that call this."""
    rank, n, x = dist.get_rank(), dist.get_world_size(), _input(name, nbytes)
    return _timed(lambda: COMPARISONS[name].torchs(x, rank, n), calls)


def _input(name: str, nbytes: int) -> torch.Tensor:
    n = dist.get_world_size()
    return COMPARISONS[name].make_input(nbytes // 4 // n * n, n)


def _timed(side: Callable[[], object], calls: int) -> float:
    """Return the seconds per call, measured between two barriers."""
    synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        side()
    synchronize()
    return (time.perf_counter() - began) / calls


def _slowest(seconds: float) -> float:
    """Return the slowest rank's time: all ranks must derive the same number of calls from it."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
