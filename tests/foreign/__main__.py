"""Run the programs of others that are installed here, and compare what they print under torchrun
and under `parallel101 run`. Nothing is fetched, and what isn't installed is skipped.

    python -m tests.foreign              all of them: about ten minutes
    python -m tests.foreign lightning    one

README.md says how to install them, and how to repeat the other programs with compare.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from .compare import STARTERS, compare, exit_on_sigterm, failed, print_table

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Foreign:
    """A program: the modules that it needs, what to run, and with how many ranks."""

    needs: tuple[str, ...]
    program: tuple[str, ...]
    ranks: int = 2


ACCELERATE_TESTS = "accelerate.test_utils.scripts"
FOREIGN = {
    "accelerate": Foreign(("accelerate",), ("accelerate_loop.py",)),
    **{  # accelerate's own tests: they print no losses, and fail with an error
        f"accelerate-{name}": Foreign(("accelerate",), ("-m", f"{ACCELERATE_TESTS}.{name}"))
        for name in ("test_script", "test_sync")
    },
    "transformers": Foreign(("transformers", "accelerate"), ("transformers_trainer.py",)),
    "lightning": Foreign(("lightning",), ("lightning_trainer.py",)),
    "ring-flash-attention": Foreign(("ring_flash_attn",), ("ring_flash_attention.py",)),
    "mingpt": Foreign(("model", "trainer", "char_dataset"), ("mingpt_ddp.py",)),
    "muon": Foreign(("muon",), ("muon_steps.py",)),
    "cs336": Foreign(("lecture_08", "lecture_08_utils"), ("cs336_lecture.py",)),
    **{
        f"picotron-{'-'.join(axes)}": Foreign(
            ("picotron",),
            ("picotron_steps.py", *(f"--{axis}=2" for axis in axes)),
            ranks=2 ** len(axes),
        )
        for axes in (("dp", "tp"), ("pp", "cp"), ("dp", "pp"))
    },
}
OTHER_NUMBERS = {  # the lecture also prints memory that was never written
    "cs336": r"(?:loss = |x64\[|after.*output = tensor\(\[)(-?\d+\.\d*)"
}


def missing(needs: tuple[str, ...]) -> list[str]:
    return [module for module in needs if importlib.util.find_spec(module) is None]


def main() -> None:
    exit_on_sigterm()
    os.environ["ACCELERATE_USE_CPU"] = "1"  # else each rank of its test_sync is alone
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(FOREIGN)}")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of each run")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(FOREIGN):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FOREIGN)}")
    wrong = []
    for name in asked.names or FOREIGN:
        foreign = FOREIGN[name]
        if absent := missing(foreign.needs):
            print(f"{name}: skipped, because {' and '.join(absent)} cannot be imported\n")
            continue
        options = {"pattern": OTHER_NUMBERS[name]} if name in OTHER_NUMBERS else {}
        rows, outcomes = compare(
            *(list(foreign.program), foreign.ranks, tuple(STARTERS)),
            seconds=asked.seconds,
            folder=PROGRAMS,
            **options,
        )
        print_table(name, rows)
        if failed(rows):
            wrong.append(name)
            for outcome in outcomes:
                print(f"───── {outcome.starter}\n{outcome.text[-3000:]}")
        print()
    sys.exit(f"not as under torchrun: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
