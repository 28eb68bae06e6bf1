"""A benchmark as data: the sides that take turns, the peers, and the ratios.

    sides    DataParallelTrainer, torch DDP, …     each runs once in every round
    peers    "/ DDP": torch DDP                    a column of ratios, taken round by round

The sides of a comparison do the same work on the same ranks. They take turns, so that whatever else
slows the machine down slows all of them.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport, median_and_interval

Work = Callable[[], object]
Side = Callable[[], Work | None]  # prepares the work on a rank; None: it doesn't run here
Rounds = Sequence[Mapping[str, float]]  # the seconds of each side in each round
ROUNDS = 9


class Benchmark(NamedTuple):
    """Sides that take turns.

    Attributes:
        title: with {} where the ranks are named.
        sides: by name; every rank prepares all of them.
        peers: head of a column of ratios → the side that it divides by.
        ranks: the numbers of ranks; each has a table.
        extra: the head of another column and what each rank returns for it, given a side's name, in
            a launch for each side. The largest number is shown, in millions.
        note: what a reader of the tables must know besides.
        options: of the launch.
    """

    title: str
    sides: Mapping[str, Side]
    peers: Mapping[str, str]
    ranks: Sequence[int] = (2, 4)
    extra: tuple[str, Callable[[str], float]] | None = None
    note: str = ""
    options: Mapping[str, Any] = {}

    def measure(self, report: BenchmarkReport, *, backend: str, quick: bool) -> None:
        """Print a table for each number of ranks; if `quick`, for the first one."""
        for n in self.ranks[:1] if quick else self.ranks:
            options = {"world_size": n, "backend": backend, "timeout": 600, **self.options}
            report.heading(self.title.format(f"{n} {options['backend']} rank{'s' * (n > 1)}"))
            launch: Callable[..., Any] = partial(p101.launch, **options)
            rounds = launch(time_rounds, self.sides, 2 if quick else ROUNDS).results[0]
            columns = {}
            if self.extra is not None:
                head, count = self.extra
                most = {side: max(launch(count, side).results) / 1e6 for side in rounds[0]}
                columns[head] = {side: f"{number:.1f}" for side, number in most.items()}
            report.table(*ratio_table(rounds, self.peers, columns))
        if self.note:
            report.sentence(self.note)


def ratio_table(
    rounds: Rounds, peers: Mapping[str, str], extra: Mapping[str, Mapping[str, str]] = {}
) -> tuple[list[str], Iterator[list[str]]]:
    """Return the head and the rows of a table: for each side the median time and its ratios."""
    head = ["", "ms", *(cell for peer in peers for cell in (peer, "95 %")), *extra]
    rows = (
        [
            side,
            f"{statistics.median(of[side] for of in rounds) * 1e3:,.1f}",
            *(cell for peer in peers.values() for cell in ratio(rounds, side, peer)),
            *(column[side] for column in extra.values()),
        ]
        for side in rounds[0]
    )
    return head, rows


def ratio(rounds: Rounds, side: str, peer: str) -> tuple[str, str]:
    """Return the median of a side's time over its peer's, taken round by round, and its range."""
    return median_and_interval([of[side] / of[peer] for of in rounds])


def take_turns(clocks: Mapping[str, Callable[[], Any]], rounds: int) -> list[dict[str, Any]]:
    """Call each clock once in each round, and return what they say. Each is first equally often."""
    names = list(clocks)
    turns = [names[k % len(names) :] + names[: k % len(names)] for k in range(rounds)]
    return [{name: clocks[name]() for name in turn} for turn in turns]


# ---- on each rank ----


def time_rounds(sides: Mapping[str, Side], rounds: int) -> list[dict[str, float]]:
    """Return the seconds of each side in each round."""
    works = {side: work for side, prepare in sides.items() if (work := prepare()) is not None}
    for work in works.values():
        for _ in range(3):  # warm up
            work()
    return take_turns({side: partial(seconds_of, work) for side, work in works.items()}, rounds)


def seconds_of(work: Work, calls: int = 1) -> float:
    """Return the seconds of a call, measured between two barriers."""
    synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return (time.perf_counter() - began) / calls


def synchronize() -> None:
    """Wait until every rank is here and, on NCCL, until its GPU is idle."""
    if dist.is_initialized():
        dist.barrier()
        if dist.get_backend() == "nccl":
            torch.cuda.synchronize()


def peak_memory() -> int:
    """Return the most memory that this process has had so far, in bytes.

    (The system counts it in KiB on Linux and in bytes on macOS.)
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
