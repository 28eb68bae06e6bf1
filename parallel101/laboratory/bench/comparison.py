"""A benchmark as data: the sides that take turns, the peers, and the ratios; and their report.

    sides    DataParallelTrainer, torch DDP, …     each runs once in every round
    peers    "/ DDP": torch DDP                    a column of ratios, taken round by round

The sides of a comparison do the same work on the same ranks. They take turns, so that whatever else
slows the machine down slows all of them. The report prints results as they are measured, and keeps
them as Markdown, which begins with the date, the machine and the versions.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

import parallel101 as p101

Work = Callable[[], object]
Side = Callable[[], Work | None]  # prepares the work on a rank; None: it doesn't run here
Rounds = Sequence[Mapping[str, float]]  # the seconds of each side in each round
Words = Mapping[str, str]
ROUNDS = 9


class BenchmarkReport:
    """Headings, sentences and tables, in order. Each line is printed at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def machine(self) -> None:
        """Add the title, and a table of the date, the machine and the versions."""
        info = Path("/proc/cpuinfo")
        names = re.findall(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        system = f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"
        written = f"Written by `parallel101 bench {' '.join(sys.argv[2:])}`".rstrip()
        self._print(f"# Benchmarks\n\n{written}.\n")
        rows = {
            "date": datetime.date.today().isoformat(),
            "processor": f"{[*names, platform.machine()][0]}, {os.cpu_count()} cores",
            "load before": f"{psutil.getloadavg()[0]:.2f}, a minute's mean",
            "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
            "GPUs": ", ".join(gpus) or "none",
            "system": system.rstrip(", "),
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        }
        self.table(["", ""], rows.items())

    def heading(self, text: str) -> None:
        self._print(f"\n## {text}\n")

    def sentence(self, text: str) -> None:
        self._print(f"{text}\n")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add a Markdown table.

        `rows` may be a generator: each row is printed as soon as it is measured.
        """
        self._print(f"| {' | '.join(head)} |")
        self._print("|" + "|".join(" --- " if i == 0 else " ---: " for i in range(len(head))) + "|")
        for row in rows:
            self._print(f"| {' | '.join(str(cell) for cell in row)} |")
        self._print("")

    def ratios(self, title: str, rounds: Rounds, peers: Words, **columns: Words) -> None:
        """Add a heading and a table: for each side the median of its time, and its ratios.

        Args: columns: more of them: by head, the cell of each side.
        """
        self.heading(title)
        head = ["", "ms", *(cell for peer in peers for cell in (peer, "95 %")), *columns]
        rows = []
        for side in rounds[0]:
            ms = f"{statistics.median(of[side] for of in rounds) * 1e3:,.1f}"
            cells = [cell for peer in peers.values() for cell in ratio(rounds, side, peer)]
            rows.append([side, ms, *cells, *(column[side] for column in columns.values())])
        self.table(head, rows)

    def _print(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)


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
    peers: Words
    ranks: Sequence[int] = (2, 4)
    extra: tuple[str, Callable[[str], float]] | None = None
    note: str = ""
    options: Mapping[str, Any] = {}

    def __call__(self, report: BenchmarkReport, *, backend: str, quick: bool) -> None:
        """Print a table for each number of ranks; if `quick`, for the first one."""
        for n in self.ranks[:1] if quick else self.ranks:
            options = {"world_size": n, "backend": backend, "timeout": 600, **self.options}
            title = self.title.format(f"{n} {options['backend']} rank{'s' * (n > 1)}")
            launch: Callable[..., Any] = partial(p101.launch, **options)
            rounds = launch(time_rounds, self.sides, 2 if quick else ROUNDS).results[0]
            columns = {}
            if self.extra is not None:
                head, count = self.extra
                columns[head] = {
                    side: f"{max(launch(count, side).results) / 1e6:.1f}" for side in rounds[0]
                }
            report.ratios(title, rounds, self.peers, **columns)
        if self.note:
            report.sentence(self.note)


def ratio(rounds: Rounds, side: str, peer: str) -> tuple[str, str]:
    """Return the median of a side's time over its peer's, taken round by round, and its range.

    These are two cells of a table: the median in bold, and its 95 % confidence interval. The number
    of n values below the true median is binomial, with a standard deviation of √n / 2 (sign test).
    With few values, the interval covers them all.
    """
    values, n = sorted(of[side] / of[peer] for of in rounds), len(rounds)
    below = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    low, high = values[below], values[n - 1 - below]
    return f"**{statistics.median(values):.3f}**", f"{low:.3f} … {high:.3f}"


def take_turns(clocks: Mapping[str, Callable[[], Any]], rounds: int) -> list[dict[str, Any]]:
    """Call each clock once in each round, and return what they say. Each is first equally often."""
    names = list(clocks)
    turns = [names[k % len(names) :] + names[: k % len(names)] for k in range(rounds)]
    return [{name: clocks[name]() for name in turn} for turn in turns]


# ---- on each rank ----


def time_rounds(sides: Mapping[str, Side], rounds: int) -> list[dict[str, float]]:
    """Return the seconds of each side in each round."""
    works = {side: work for side, prepare in sides.items() if (work := prepare()) is not None}
    for work in [*works.values()] * 3:  # warm up
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
    dist.barrier()
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()


def peak_memory() -> int:
    """Return the most memory that this process has had so far, in bytes.

    (The system counts it in KiB on Linux and in bytes on macOS.)
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
