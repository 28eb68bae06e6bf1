"""What was measured, on the screen as it comes and as Markdown in the end, with the machine, the versions and the date."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch


class Report:
    """Headings, sentences and tables, in order."""

    def __init__(self, screen: TextIO):
        self.screen = screen
        self.lines: list[str] = []

    def machine(self, options: argparse.Namespace) -> None:
        """Open with where and when this is."""
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        self._say("# Benchmarks\n")
        self._say(f"Written by `parallel101 bench {' '.join(sys.argv[2:])}`".rstrip() + ".\n")
        rows = [
            ("date", datetime.date.today().isoformat()),
            ("processor", f"{_processor()}, {os.cpu_count()} cores"),
            ("load before", f"{os.getloadavg()[0]:.2f}, a minute's mean" if hasattr(os, "getloadavg") else "unknown"),
            ("memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"),
            ("GPUs", ", ".join(gpus) or "none"),
            ("system", f"{platform.system()} {platform.release()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}".rstrip(", ")),
            ("versions", f"Python {platform.python_version()}, torch {torch.__version__}"),
        ]
        self.table(["", ""], rows)

    def heading(self, text: str) -> None:
        self._say(f"\n## {text}\n")

    def sentence(self, text: str) -> None:
        self._say(f"{text}\n")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A Markdown table; with rows from a generator, each is shown as soon as it is measured."""
        self._say(f"| {' | '.join(head)} |")
        self._say("|" + "|".join(" --- " if i == 0 else " ---: " for i in range(len(head))) + "|")
        for row in rows:
            self._say(f"| {' | '.join(str(cell) for cell in row)} |")
        self._say("")

    def markdown(self) -> str:
        return "\n".join(self.lines).rstrip() + "\n"

    def _say(self, line: str) -> None:
        self.lines.append(line)
        print(line, file=self.screen, flush=True)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
