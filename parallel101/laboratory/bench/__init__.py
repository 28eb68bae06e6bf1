"""`parallel101 bench`: measures this machine.

Each figure is shown with that of a peer, measured in the same run.

section       what is measured                        compared with
launch        four ranks up to their first result     torch.multiprocessing.spawn
collectives   time and bandwidth for several sizes    torch's own collectives
record        the cost of recording a message, and    torch's backend without the record,
              of watching and recording a step        torchrun without parallel101
training      time and memory of a training step      DDP and FSDP2
tensor        the same with tensor parallelism        DTensor
pipeline      the same in a pipeline                  torch.distributed.pipelining
verify        the comparison before the first step    a step of one process
attention     ring attention and Ulysses              torch's attention and context parallel
recompute     time and activations of a step          keeping all activations
sim           messages per second, ranks, memory      nothing
pictures      pictures, pages and a first notebook    matplotlib, a page without scripts, spawn

`parallel101 bench published FILE.csv` measures nothing here: it compares the planner's quick model
with training runs that others have published. See `parallel101 bench published --help`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from parallel101.laboratory.bench.benchmark_report import BenchmarkReport
from parallel101.laboratory.option_types import output_file, reader

# name of a section → its comparisons, or the function that measures it; imported when it runs,
# because some need NumPy
SECTIONS = {
    "launch": "launch_time.measure",
    "collectives": "collective_speed.measure",
    "record": "recording_cost.measure",
    "training": "timed_training.TRAINING",
    "tensor": "timed_training.TENSORS",
    "pipeline": "timed_training.PIPELINES",
    "verify": "gpt_steps.VERIFY",
    "attention": "attention_speed.ATTENTION",
    "recompute": "gpt_steps.RECOMPUTE",
    "sim": "simulator_speed.measure",
    "pictures": "pictures.measure",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen sections and print each result as soon as it is known.

    Returns the exit status.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["published"]:
        from parallel101.laboratory.bench import published_runs

        return published_runs.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="parallel101 bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = f"{', '.join(SECTIONS)} (default: all)"
    parser.add_argument("sections", nargs="*", metavar="section", help=words)
    words = "backend of the real ranks (default: gloo)"
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help=words)
    words = "fewer sizes and repetitions, to see that it works; don't quote these results"
    parser.add_argument("--quick", action="store_true", help=words)
    words = "also write the results to FILE, as Markdown (as in BENCHMARKS.md)"
    parser.add_argument("--write", type=reader(output_file), metavar="FILE", help=words)
    options = parser.parse_args(argv)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a section; the sections are: {', '.join(SECTIONS)}")
    report = BenchmarkReport(sys.stdout)
    report.machine()
    for name in options.sections or SECTIONS:
        module, within = SECTIONS[name].split(".")
        found = getattr(import_module(f"{__name__}.{module}"), within)
        for measure in [found] if callable(found) else [one.measure for one in found]:
            measure(report, backend=options.backend, quick=options.quick)
    if options.write:
        options.write.write_text("\n".join(report.lines).rstrip() + "\n")
        print(f"\nWrote {options.write}")
    return 0
