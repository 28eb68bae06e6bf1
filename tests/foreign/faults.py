"""Every fault of programs/faulty.py, on gloo and under torchrun: after how many seconds which
rank and line are reported.

    python -m tests.foreign.faults                    every fault: about ten minutes
    python -m tests.foreign.faults lock full_disk     some of them
    python -m tests.foreign.faults --starters torchrun-alone

Seconds count from the fault to the first output that names the line. A run that goes on after its
report, as it does if a rank may only be computing for long, is then ended.
"""

from __future__ import annotations

import argparse
import inspect
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from .compare import PARALLEL101, ROOT, TORCHRUN, exit_on_sigterm
from .programs import faulty

PROGRAM = Path(faulty.__file__)
RANKS = 2
SETTLE = 3.0  # seconds after the line was named in which the report ends


def command(starter: str, stuck_after: float, folder: str) -> list[str]:
    """The command that comes before the program."""
    stuck = f"--stuck-after={stuck_after:g}"
    if starter == "gloo":
        return [*PARALLEL101, f"--world-size={RANKS}", stuck]
    alone = [*TORCHRUN, f"--nproc-per-node={RANKS}"]
    if starter == "torchrun-alone":
        return alone
    return [*alone, "-m", "parallel101", "run", stuck, f"--record={folder}"]


def lines_to_name(fault) -> list[int]:
    """The numbers of the fault's lines that end with `# here`."""
    lines, first = inspect.getsourcelines(fault)
    return [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]


def names_line(text: str, lines: list[int]) -> bool:
    wanted = "|".join(map(str, lines))
    return bool(re.search(rf'{PROGRAM.name}(:|", line )({wanted})\b', text))


def names_rank(text: str, rank: int) -> bool:
    return bool(re.search(rf"\branks? ?:? *([\d, ]|and|or)*\b{rank}\b|\[rank{rank}\]", text))


def timed_output(process: subprocess.Popen[str]) -> Iterator[tuple[float, str] | None]:
    """(time, line) of each line that is printed; None after half a second without one."""
    lines: queue.Queue[tuple[float, str] | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put((time.time(), line))
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while True:
        try:
            item = lines.get(timeout=0.5)
        except queue.Empty:
            yield None
            continue
        if item is None:
            return
        yield item


def end(process: subprocess.Popen[str]) -> None:
    """End the run and whatever it has started, also ranks that torchrun leaves behind."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in reversed(family):
        try:
            one.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()


def first_sentence(lines: list[str]) -> str:
    """The first line of a report, without folders."""
    for pattern in (r"parallel101( run)?: ", r"Error\b", r"\w"):
        for line in lines:
            if re.search(pattern, line):
                return re.sub(r"[\w/.-]*/|parallel101( run)?: ", "", line.strip())[:110]
    return ""


def stage(fault, starter: str, stuck_after: float, limit: float) -> tuple[tuple[str, ...], str]:
    """Run one fault. Returns (seconds, rank, line, first sentence of the report) and all output."""
    lines, ranks = lines_to_name(fault), faulty.FAULTS[fault]
    staged = named = None
    after: list[str] = []  # what was printed since the fault
    everything: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*command(starter, stuck_after, folder), str(PROGRAM), fault.__name__],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            began = time.time()
            for item in timed_output(process):
                now = time.time()
                if item is not None:
                    everything.append(item[1])
                    if found := re.search(r"staged \w+ at ([\d.]+)", item[1]):
                        staged = max(staged or 0.0, float(found[1]))
                    elif staged is not None:
                        after.append(item[1])
                        if named is None and names_line(item[1], lines):
                            named = item[0]
                if named is not None and now > named + SETTLE:
                    break
                if now > (staged or began + 60) + limit:
                    break
        finally:
            end(process)
    report = "".join(after)
    return (
        f"{max(0.0, named - staged):.1f}" if named and staged else "–",
        "yes" if all(names_rank(report, rank) for rank in ranks) else "no",
        "yes" if named else "no",
        first_sentence(after) or f"nothing in {limit:g} s",
    ), "".join(everything)


def main() -> None:
    exit_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("faults", nargs="*", help="default: all of them")
    parser.add_argument("--starters", default="gloo,torchrun", help="also: torchrun-alone")
    parser.add_argument("--stuck-after", type=float, default=5.0, help="seconds")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds after the fault")
    parser.add_argument("--output", type=Path, help="a folder for what each run printed")
    asked = parser.parse_args()
    known = {fault.__name__: fault for fault in faulty.FAULTS}
    if unknown := set(asked.faults) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    print("| fault | started by | seconds | rank | line | report |\n|---|---|---|---|---|---|")
    missed = 0
    for name in asked.faults or known:
        for starter in asked.starters.split(","):
            row, output = stage(known[name], starter, asked.stuck_after, asked.limit)
            missed += row[1] == "no" or row[2] == "no"
            print(f"| {name} | {starter} | {' | '.join(row)} |", flush=True)
            if asked.output:
                asked.output.mkdir(parents=True, exist_ok=True)
                (asked.output / f"{name}.{starter}.txt").write_text(output)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
