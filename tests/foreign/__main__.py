"""Run the programs of others that are installed here, and compare what they print under torchrun
and under `parallel101 run`. Nothing is fetched, and what isn't installed is skipped.

    python -m tests.foreign              all of them: about ten minutes
    python -m tests.foreign lightning    one
    python -m tests.foreign -- train.py  any program for torchrun

README.md says how to install them, and how to repeat the other programs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .compare import LOSS, compare, print_table

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


def main() -> None:
    # SIGTERM ends this process as an exception does, so that what it has started ends too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.environ["ACCELERATE_USE_CPU"] = "1"  # else each rank of its test_sync is alone
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(FOREIGN)}")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of each run")
    parser.add_argument("--ranks", type=int, default=2, help="of a program after --")
    parser.add_argument("--numbers", default=LOSS, help="a pattern whose group is a number")
    where = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    asked, program = parser.parse_args(sys.argv[1:where]), tuple(sys.argv[where + 1 :])
    if unknown := set(asked.names) - set(FOREIGN):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FOREIGN)}")
    chosen = {name: FOREIGN[name] for name in asked.names or FOREIGN}
    if program:
        chosen = {" ".join(program)[:60]: Foreign((), program, asked.ranks)}
    wrong = []
    for name, foreign in chosen.items():
        if absent := [module for module in foreign.needs if find_spec(module) is None]:
            print(f"{name}: skipped, because {' and '.join(absent)} cannot be imported\n")
            continue
        numbers = OTHER_NUMBERS.get(name, asked.numbers)
        folder = None if program else PROGRAMS
        rows, outcomes = compare([*foreign.program], foreign.ranks, numbers, asked.seconds, folder)
        if any(row[4] or row[2].startswith("no") for row in rows):
            wrong.append(name)
            for outcome in outcomes:
                print(f"───── {outcome.starter}\n{outcome.text[-6000:]}")
        print_table(name, rows)
        print()
    sys.exit(f"not as under torchrun: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
