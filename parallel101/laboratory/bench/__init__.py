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
with training runs that others have published (published_runs.py).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Literal

from parallel101.laboratory.option_types import OutputFile

# name of a section → what measures it; imported when it runs, because some need NumPy
SECTIONS = {
    "launch": "launch_time.measure",
    "collectives": "collective_speed.measure",
    "record": "recording_cost.measure",
    "training": "timed_training.TRAINING",
    "tensor": "timed_training.TENSORS",
    "pipeline": "timed_training.PIPELINES",
    "verify": "timed_training.VERIFY",
    "attention": "attention_speed.ATTENTION",
    "recompute": "timed_training.RECOMPUTE",
    "sim": "simulator_speed.measure",
    "pictures": "pictures.measure",
}


def bench(
    *names: str,
    backend: Literal["gloo", "nccl"] = "gloo",
    quick: bool = False,
    write: OutputFile | None = None,
    picture: OutputFile | None = None,
) -> int:
    """Measure parallel101 on this machine, and compare it with torch.

    Args:
        names: sections (default: all), each compared with a peer: launch (torch's spawn),
            collectives (torch's own), record (no record), training (DDP, FSDP2), tensor (DTensor),
            pipeline (torch's pipelining), verify (a step), attention (torch's), recompute (keeping
            all activations), sim, pictures; or the word published and FILE.csv …: the planner's
            quick model against training runs that others have published, in tables whose columns
            parallel101/laboratory/planner/published.py describes
        backend: backend of the real ranks
        quick: fewer sizes and repetitions, to see that it works; don't quote these results
        write: also write the results to this file, as Markdown (as in BENCHMARKS.md)
        picture: of published only: predicted against measured, as SVG or PNG (default:
            published.svg)

    Returns 0. Raises ValueError for an unknown section and for a table that can't be read.
    """
    from parallel101.laboratory.bench.comparison import BenchmarkReport

    report, published = BenchmarkReport(), names[:1] == ("published",)
    if published and (quick or backend != "gloo"):
        raise ValueError("published measures nothing: leave out --quick and --backend")
    if picture and not published:
        raise ValueError("--picture belongs to published: parallel101 bench published FILE.csv")
    if published:
        from parallel101.laboratory.bench.published_runs import compare

        compare(report, names[1:], picture or Path("published.svg"))
    elif unknown := [name for name in names if name not in SECTIONS]:
        expected = ", ".join(SECTIONS)
        raise ValueError(f"{unknown[0]!r} is not a section; the sections are: {expected}")
    else:
        report.machine()
        for name in names or SECTIONS:
            module, within = SECTIONS[name].split(".")
            found = getattr(import_module(f"{__name__}.{module}"), within)
            for measure in found if isinstance(found, list) else [found]:
                measure(report, backend=backend, quick=quick)
    if write:
        write.write_text("\n".join(report.lines).rstrip() + "\n")
        print(f"\nWrote {write}")
    return 0
