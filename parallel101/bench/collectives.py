"""Each collective by hand against torch's own, in the style of nccl-tests: size, time, algorithm and bus bandwidth, ratio.

    ours            our function, on the ranks of a launch
    torch           torch's function as torch runs it: in processes that torch.multiprocessing.spawn starts
    in our ranks    torch's function in the very ranks of ours, with launch's settings: what is left is the algorithm

Turn by turn, many calls between two barriers, each making its result anew. S is the size of the whole array: of an all-gather's
result, of a reduce-scatter's input. Bandwidths: algbw = S / time, busbw = algbw × factor (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.bench.ranks import settle
from parallel101.bench.report import Report
from parallel101.bench.spawned import ask, spawned_ranks
from parallel101.record.units import human_bytes

SIZES = [1 << 10, 32 << 10, 1 << 20, 8 << 20, 64 << 20]
WORLDS = [2, 4]
ROUNDS = 5
SLICE = 0.12  # seconds a side and round: what decides how many calls stand between two barriers


#  torch 2.13 has renamed them
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Contest(NamedTuple):
    """One operation: what goes in for S bytes, our call, torch's call, and the factor from algbw to busbw."""

    given: Callable[[int, int], torch.Tensor]  # (numel of the whole, ranks) -> x
    ours: Callable[[torch.Tensor], torch.Tensor]
    theirs: Callable[[torch.Tensor, int, int], object]  # (x, rank, ranks)
    factor: Callable[[int], float]


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
    all_gather_single(x.new_empty(n * len(x)), x)


def _reduce_scatter(x: torch.Tensor, rank: int, n: int) -> None:
    reduce_scatter_single(x.new_empty(len(x) // n), x)


def _all_reduce(x: torch.Tensor, rank: int, n: int) -> None:
    dist.all_reduce(x.clone())


def _all_to_all(x: torch.Tensor, rank: int, n: int) -> None:
    dist.all_to_all_single(torch.empty_like(x), x)


def _once(n: int) -> float:
    return 1.0


def _others(n: int) -> float:
    return (n - 1) / n


CONTESTS = {
    "broadcast": Contest(_whole, p101.broadcast, _broadcast, _once),
    "scatter": Contest(_whole, p101.scatter, _scatter, _others),
    "gather": Contest(_shard, p101.gather, _gather, _others),
    "reduce": Contest(_whole, p101.reduce, _reduce, _once),
    "all_gather": Contest(_shard, p101.all_gather, _all_gather, _others),
    "reduce_scatter": Contest(_whole, p101.reduce_scatter, _reduce_scatter, _others),
    "all_reduce": Contest(_whole, p101.all_reduce, _all_reduce, lambda n: 2 * (n - 1) / n),
    "all_to_all": Contest(_whole, p101.all_to_all, _all_to_all, _others),
}


def measure(report: Report, *, backend: str, quick: bool) -> None:
    sizes, rounds = (SIZES[::2], 2) if quick else (SIZES, ROUNDS)
    head = ["operation, size", "ours µs", "algbw GB/s", "busbw GB/s"]
    head += ["torch µs", "torch busbw", "torch / ours", "least … most"]
    head += ["torch in our ranks µs", "/ ours", "least … most"]
    for n in WORLDS:
        report.heading(f"Collectives on {n} {backend} ranks, against torch's own")
        with spawned_ranks(time_torchs, n, backend) as port:
            report.table(head, _rows(n, backend, port, sizes, rounds))
    report.sentence(
        "torch: its own call, in processes that torch.multiprocessing.spawn started. In our ranks: the same call in ranks of `launch`, "
        "which keep freed memory and run as batch work. Medians of the rounds, run turn by turn; ratios are taken round by round, and "
        "above 1 ours is faster."
    )


def _rows(n: int, backend: str, port: int, sizes: list[int], rounds: int) -> Iterator[tuple[str, ...]]:
    for name, contest in CONTESTS.items():
        for nbytes in sizes:
            turns = p101.launch(compete, name, nbytes, rounds, port, world_size=n, backend=backend, timeout=300).results[0]
            ours, torchs, within = (statistics.median(side) for side in zip(*turns))
            algbw, bus = nbytes / ours / 1e9, contest.factor(n)
            yield (
                f"{name}, {human_bytes(nbytes)}",
                f"{ours * 1e6:.0f}",
                f"{algbw:.3f}",
                f"{algbw * bus:.3f}",
                f"{torchs * 1e6:.0f}",
                f"{nbytes / torchs / 1e9 * bus:.3f}",
                *_ratio([b / a for a, b, _ in turns]),
                f"{within * 1e6:.0f}",
                *_ratio([c / a for a, _, c in turns]),
            )


def _ratio(ratios: list[float]) -> tuple[str, str]:
    return f"**{statistics.median(ratios):.2f}**", f"{min(ratios):.2f} … {max(ratios):.2f}"


def compete(name: str, nbytes: int, rounds: int, port: int) -> list[tuple[float, ...]]:
    """On each rank of ours: seconds a call of (ours, torch's in ranks of its own, torch's in ours), for each round."""
    x = _input(name, nbytes)
    sides: tuple[Callable[[int], float], ...] = (
        lambda calls: _timed(lambda: CONTESTS[name].ours(x), calls),
        lambda calls: ask(port, name, nbytes, calls=calls),
        lambda calls: time_torchs(name, nbytes, calls=calls),
    )
    for side in sides:  # connections, memory
        side(2)
    calls = [max(1, min(2000, int(SLICE / _agreed(side(2))))) for side in sides]
    return [tuple(side(count) for side, count in zip(sides, calls)) for _ in range(rounds)]


def time_torchs(name: str, nbytes: int, *, calls: int) -> float:
    """Seconds a call of torch's own function, on the ranks that call this."""
    rank, n, x = dist.get_rank(), dist.get_world_size(), _input(name, nbytes)
    return _timed(lambda: CONTESTS[name].theirs(x, rank, n), calls)


def _input(name: str, nbytes: int) -> torch.Tensor:
    n = dist.get_world_size()
    return CONTESTS[name].given(nbytes // 4 // n * n, n)


def _timed(side: Callable[[], object], calls: int) -> float:
    """Seconds a call, between two barriers."""
    settle()
    began = time.perf_counter()
    for _ in range(calls):
        side()
    settle()
    return (time.perf_counter() - began) / calls


def _agreed(seconds: float) -> float:
    """The slowest rank's figure: all must make the same number of calls."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
