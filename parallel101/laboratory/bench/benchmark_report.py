"""Prints the results as they are measured, and keeps them as Markdown.

The Markdown begins with the date, the machine and the versions.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch


class BenchmarkReport:
    """Headings, sentences and tables, in order. Each line is printed at once."""

    def __init__(self, screen: TextIO):
        self.screen = screen
        self.lines: list[str] = []

    def machine(self) -> None:
        """Add the title, and a table of the date, the machine and the versions."""
        info, load = Path("/proc/cpuinfo"), "unknown"
        names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
        if hasattr(os, "getloadavg"):
            load = f"{os.getloadavg()[0]:.2f}, a minute's mean"
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        system = f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"
        self._print("# Benchmarks\n")
        self._print(f"Written by `parallel101 bench {' '.join(sys.argv[2:])}`".rstrip() + ".\n")
        rows = {
            "date": datetime.date.today().isoformat(),
            "processor": f"{[*names, platform.machine()][0]}, {os.cpu_count()} cores",
            "load before": load,
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

    def _print(self, line: str) -> None:
        self.lines.append(line)
        print(line, file=self.screen, flush=True)


def median_and_interval(values: Sequence[float]) -> tuple[str, str]:
    """Return two cells of a table: the median in bold, and its 95 % confidence interval.

    The number of n values below the true median is binomial, with a standard deviation of √n / 2
    (sign test). With few values, the interval covers them all.
    """
    values, n = sorted(values), len(values)
    below = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    low, high = values[below], values[n - 1 - below]
    return f"**{statistics.median(values):.3f}**", f"{low:.3f} … {high:.3f}"
