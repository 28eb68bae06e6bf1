"""The command line: `parallel101 doctor | lab | lessons | bench`.

Each command is a few lines around the part of the house that does the work, imported only when it is asked for, so that
`doctor` can still speak where something else is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel101 import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 when all went well, 1 when not, 2 when it was asked wrongly."""
    _write_any_character()
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  #  what can't be written is known here, not as Python ends
    except BrokenPipeError:  #  nobody reads on (`| head`): no error of ours
        _write_nothing_more()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _write_nothing_more()
        print(f"parallel101: {error.filename or 'the output'} can't be written: {error.strerror}", file=sys.stderr)
        return 1


def _run(argv: Sequence[str] | None) -> int:
    args, rest = _parser().parse_known_args(argv)
    if rest and not args.passes_on:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.run(args, rest)
    except KeyboardInterrupt:
        print(f"parallel101 {args.command}: stopped", file=sys.stderr)
        return 130


def _write_nothing_more() -> None:
    """Let stdout lead nowhere: Python flushes it once more as it ends, and would tell of the same error again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  #  a stdout that is no file of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_any_character() -> None:
    """Where the output knows few characters (LC_ALL=C), write the others as \\u2713: a row of doctor's is no reason to crash."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  #  not None (a daemon's), and not a notebook's
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parallel101", description="Learn how neural networks are trained on many machines.")
    parser.add_argument("--version", action="version", version=f"parallel101 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="doctor | lab | lessons | bench")

    def command(name, run, text, passes_on=False):
        sub = commands.add_parser(name, help=text, description=text, add_help=name != "bench")
        sub.set_defaults(run=run, passes_on=passes_on, parser=sub)
        return sub

    doctor = command("doctor", _doctor, "Say what works on this machine, and what to do about what does not.")
    doctor.add_argument("--json", action="store_true", help="for programs: the same rows as JSON")

    lab = command("lab", _lab, "Open the lessons in JupyterLab; further options go to it (e.g. --no-browser).", passes_on=True)
    lab.add_argument("--lessons", metavar="FOLDER", help="where the notebooks are (default: the lessons/ of this clone)")

    lessons = command("lessons", _lessons, "Run the lessons on real ranks and write them as HTML that plays offline.")
    lessons.add_argument("names", nargs="*", metavar="NAME", help="which ones: 01, or 01_collectives (default: all)")
    lessons.add_argument("--lessons", metavar="FOLDER", help="where the notebooks are (default: the lessons/ of this clone)")
    lessons.add_argument("--out", metavar="FOLDER", type=Path, default=Path("site"), help="where the pages go (default: site)")
    lessons.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=600.0, help="for one cell (default: 600)")

    command("bench", _bench, "Measure this machine: ranks, collectives against torch's own, the sim.", passes_on=True)
    return parser


def _doctor(args: argparse.Namespace, rest: list[str]) -> int:
    from parallel101 import doctor

    return doctor.main(as_json=args.json)


def _lab(args: argparse.Namespace, rest: list[str]) -> int:
    from jupyterlab.labapp import LabApp

    LabApp.launch_instance(argv=[str(_folder(args)), *(a for a in rest if a != "--")])
    return 0


def _lessons(args: argparse.Namespace, rest: list[str]) -> int:
    from parallel101.publish import make_folder, publish, select

    try:
        notebooks = select(_folder(args), args.names)
        make_folder(args.out)
    except ValueError as error:
        args.parser.error(str(error))
    print(f"Running {len(notebooks)} lesson{'s' * (len(notebooks) > 1)}: {', '.join(n.stem for n in notebooks)}", flush=True)
    done = publish(notebooks, args.out, timeout=args.timeout)
    print("Wrote", *(f"  {page}  {page.stat().st_size / 1000:,.0f} kB" for page in done.written), sep="\n")
    for failure in done.failed:
        print(f"\n✗ {failure}", file=sys.stderr)
    if done.failed:
        return 1
    print(f"Open {done.written[-1]} in a browser: it needs no network.")
    return 0


def _folder(args: argparse.Namespace) -> Path:
    from parallel101.publish import find_lessons

    try:
        return find_lessons(args.lessons)
    except FileNotFoundError as error:
        return args.parser.error(str(error))  #  which ends the program


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time; give a finite number of seconds, more than 0")
    return seconds


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    from parallel101.bench import main as bench

    return bench(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
