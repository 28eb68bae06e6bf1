"""`parallel101 bench`: every figure this project claims, measured here and now, each beside a peer in the same run.

launch        four ranks to their first result        against torch.multiprocessing.spawn
collectives   time, algbw, busbw by size              against torch's own, on the same group
record        what recording costs a small message    against torch's backend, called past it
training      a step, and its memory                  against DDP and FSDP2
sim           messages a second, ranks, memory        (no peer: the promise is a number)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel101.bench import collectives, launching, recording, simulation, training
from parallel101.bench.report import Report

SECTIONS = {
    "launch": launching.measure,
    "collectives": collectives.measure,
    "record": recording.measure,
    "training": training.measure,
    "sim": simulation.measure,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print as it goes, and write the report where asked. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="parallel101 bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"which: {', '.join(SECTIONS)}; all of them if none is named")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="of the real ranks")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions: to see that it works, not to quote")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the report there as Markdown (the project's is BENCHMARKS.md)")
    options = parser.parse_args(argv)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section is called {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    report = Report(sys.stdout)
    report.machine(options)
    for name in options.sections or SECTIONS:
        SECTIONS[name](report, backend=options.backend, quick=options.quick)
    if options.write:
        options.write.write_text(report.markdown())
        print(f"\nwritten to {options.write}")
    return 0
