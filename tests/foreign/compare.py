"""Run one program under torchrun and under `parallel101 run`, and compare the losses it prints.

    python -m tests.foreign --ranks 2 -- train.py config/train_shakespeare_char.py

    train.py      losses  same as torchrun's  seconds
    torchrun          12  –                       9.1
    gloo              12  yes                     8.4
    sim               12  yes                     7.7
    NCCL's rules      12  yes                     7.9

The program must run on CPUs. Only text that it prints itself is compared: every number behind a
word that contains "loss", or what --numbers matches. Ranks print in any order, so the numbers
are sorted first.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOSS = r"(?i)loss\w*['\"]?\s*[:=,]?\s*['\"]?(?:tensor\()?(-?\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)"
TOLERANCE = 1e-4  # relative
PARALLEL101 = [sys.executable, "-m", "parallel101", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
STARTERS = {  # name → the command that comes before the program, and before the number of ranks
    # --tee: else torchrun's ranks write into each other's lines
    "torchrun": [*TORCHRUN, "--tee=3", "--nproc-per-node"],
    "gloo": [*PARALLEL101, "--world-size"],
    "sim": [*PARALLEL101, "--backend=sim", "--world-size"],
    "NCCL's rules": [*PARALLEL101, "--backend=sim", "--rules=nccl", "--world-size"],
}


@dataclass(frozen=True)
class Outcome:
    """What one run of the program printed, how it ended, and how long it took (seconds)."""

    starter: str
    status: int | None  # None: ended by the time limit
    text: str
    seconds: float

    def numbers(self, pattern: str = LOSS) -> list[float]:
        """The numbers that `pattern` matches in the lines of the program itself, sorted."""
        # parallel101 run marks each line with its rank, and its own tables have no such mark
        lines = self.text.splitlines()
        if self.starter != "torchrun":
            lines = [line for line in lines if line.startswith("[rank ")]
        found = [float(found) for line in lines for found in re.findall(pattern, line)]
        return sorted(found, key=lambda number: (math.isnan(number), number))

    def ending(self) -> str:
        """One line that says how the run ended, empty if the program succeeded."""
        if self.status == 0:
            return ""
        errors = [line for line in self.text.splitlines() if re.search(r"Error\b", line)]
        last = (errors or self.text.strip().splitlines() or [""])[0 if errors else -1]
        how = "time limit" if self.status is None else f"exit status {self.status}"
        return f"{how}: {last.strip()[:160]}"


def ended(process: subprocess.Popen[str]) -> str:
    """End a run with its ranks. Returns what it printed."""
    process.terminate()  # torchrun and parallel101 run then end their ranks themselves
    try:
        return process.communicate(timeout=40)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def run_program(starter: str, program: list[str], ranks: int, seconds: float, folder: Path):
    """Run `program` (a script, or -m and a module, then arguments) in `folder`.

    At most `seconds` long: then the whole process group is ended.
    """
    command = [*STARTERS[starter], str(ranks), *program]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            text, status = ended(process), None
        except BaseException:  # Ctrl-C reaches this process only
            ended(process)
            raise
    return Outcome(starter, status, text, time.monotonic() - began)


def same_numbers(found: list[float], expected: list[float]) -> str:
    """ "yes", or in which way `found` differs from `expected`."""
    if len(found) != len(expected):
        return f"no: {len(found)} numbers"
    # a program may print nan; the sorting has put those last
    pairs = [(a, b) for a, b in zip(found, expected) if not (math.isnan(a) and math.isnan(b))]
    if all(a == b for a, b in pairs):
        return "yes"
    off = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return f"{'yes' if off <= TOLERANCE else 'no'}: within {off:.0e}"


def compare(
    program: list[str],
    ranks: int = 2,
    pattern: str = LOSS,
    seconds: float = 300.0,
    folder: Path | None = None,
) -> tuple[list[tuple[str, ...]], list[Outcome]]:
    """Run the program with each starter, one after the other.

    Returns a row for each (starter, number of losses, same as torchrun's, seconds, remark) and
    the outcomes.
    """
    outcomes = [
        run_program(starter, program, ranks, seconds, folder or Path.cwd()) for starter in STARTERS
    ]
    expected = outcomes[0].numbers(pattern)
    rows = []
    for outcome in outcomes:
        found = outcome.numbers(pattern)
        same = "–" if outcome is outcomes[0] else same_numbers(found, expected)
        if not expected and outcome.status == outcomes[0].status:
            same = "prints none"
        rows.append(
            (outcome.starter, str(len(found)), same, f"{outcome.seconds:.1f}", outcome.ending())
        )
    return rows, outcomes


def print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    table = [(title, "losses", "same as torchrun's", "seconds", ""), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for row in table:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths)), row[4], flush=True)
