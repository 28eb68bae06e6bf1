"""The command line: `parallel101 doctor | lab | lessons | run | bench`.

A command imports what it needs only when it runs, so that `doctor` still works where torch or Jupyter is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel101 import __version__

if TYPE_CHECKING:
    from parallel101.record.trace import Trace
    from parallel101.sim.network import Network


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 for success, 1 for failure. Wrong arguments exit with status 2."""
    _escape_unsupported_characters()
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, so that a write error is handled below and not while Python exits
    except BrokenPipeError:  # the reader has closed the pipe (`| head`), which is not an error
        _discard_further_output()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_further_output()
        print(f"parallel101: cannot write {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return 1


def _run(argv: Sequence[str] | None) -> int:
    args, extra = _parser().parse_known_args(argv)
    if extra and not args.takes_extra:
        args.parser.error(f"unrecognized arguments: {' '.join(extra)}")
    try:
        return args.run(args, extra)
    except KeyboardInterrupt:
        print(f"parallel101 {args.command}: stopped", file=sys.stderr)
        return 130


def _discard_further_output() -> None:
    """Redirect stdout to nowhere: Python flushes it once more when it exits, and would report the same error again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout may be an object without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape_unsupported_characters() -> None:
    r"""If the output's encoding lacks a character (with LC_ALL=C it lacks ✓), print its escape, such as \u2713."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not None, as in a daemon, and not a notebook's stream
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parallel101", description="Learn how neural networks are trained on many GPUs and machines.")
    parser.add_argument("--version", action="version", version=f"parallel101 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, run, text, takes_extra=False):
        sub = commands.add_parser(name, help=text, description=text, add_help=name != "bench")  # bench has a --help of its own
        sub.set_defaults(run=run, takes_extra=takes_extra, parser=sub)
        return sub

    doctor = command("doctor", _doctor, "Check what works on this machine, and say how to fix what does not.")
    doctor.add_argument("--json", action="store_true", help="print the table as JSON, for programs")

    lab = command("lab", _lab, "Open the lessons in JupyterLab. Other options go to JupyterLab (e.g. --no-browser).", takes_extra=True)
    lessons = command("lessons", _lessons, "Run the lessons on real ranks and write them as web pages that work offline.")
    for sub in (lab, lessons):
        sub.add_argument("--lessons", metavar="FOLDER", help="folder with the notebooks (default: lessons/ in this clone)")
    lessons.add_argument("names", nargs="*", metavar="NAME", help="lessons to run, e.g. 01 or 01_collectives (default: all)")
    lessons.add_argument("--out", metavar="FOLDER", type=Path, default=Path("site"), help="folder for the pages (default: site)")
    lessons.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=600.0, help="time limit for each cell (default: 600)")

    run = command("run", _script, "Run a script for torchrun on every rank, unchanged, and show who waits for whom.")
    run.add_argument("--world-size", metavar="N", type=int, help="number of ranks (default: 4)")
    run.add_argument("--backend", choices=("gloo", "sim", "nccl"), help="where the ranks run (default: gloo)")
    run.add_argument("--network", metavar="TEXT", type=_network, help="on sim, the links, e.g. latency=1e-6,bandwidth=1e9")
    run.add_argument("--rules", choices=("gloo", "nccl"), default="gloo", help="on sim, what the program may rely on (default: gloo)")
    run.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=math.inf, help="time limit (default: none)")
    run.add_argument("--page", metavar="FILE", type=Path, help="write a web page with the timeline and the traffic")
    run.add_argument("--chrome", metavar="FILE", type=Path, help="write a trace for ui.perfetto.dev")
    run.add_argument("-m", dest="as_module", action="store_true", help="run a module, as python -m does")
    run.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")

    command("bench", _bench, "Measure parallel101 on this machine, and compare it with torch.", takes_extra=True)
    commands.metavar = " | ".join(commands.choices)
    return parser


def _doctor(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101 import doctor

    return doctor.main(as_json=args.json)


def _lab(args: argparse.Namespace, extra: list[str]) -> int:
    from jupyterlab.labapp import LabApp

    LabApp.launch_instance(argv=[str(_lessons_folder(args)), *(option for option in extra if option != "--")])
    return 0


def _lessons(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101.publish import make_output_folder, publish, select_lessons

    try:
        notebooks = select_lessons(_lessons_folder(args), args.names)
        make_output_folder(args.out)
    except ValueError as error:
        args.parser.error(str(error))
    print(f"Running {len(notebooks)} lesson{'s' * (len(notebooks) > 1)}: {', '.join(n.stem for n in notebooks)}", flush=True)
    done = publish(notebooks, args.out, timeout=args.timeout)
    print("Wrote", *(f"  {page}  {page.stat().st_size / 1000:,.0f} kB" for page in done.written), sep="\n")
    for failure in done.failed:
        print(f"\n✗ {failure}", file=sys.stderr)
    if done.failed:
        return 1
    print(f"Open {done.written[-1]} in a browser. The pages work offline.")
    return 0


def _lessons_folder(args: argparse.Namespace) -> Path:
    from parallel101.publish import find_lessons

    try:
        return find_lessons(args.lessons)
    except FileNotFoundError as error:
        return args.parser.error(str(error))  # exits


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a valid time limit; expected a finite number of seconds greater than 0")
    return seconds


def _script(args: argparse.Namespace, extra: list[str]) -> int:
    """Run a script on ranks. Its output comes as it is printed, then the error if there is one, and then the tables."""
    from parallel101 import LaunchTimeout, launch
    from parallel101.ranks.script import Script, free_port, run_script

    script = Script(args.script, tuple(args.arguments), args.as_module, free_port())
    try:
        script.check()
    except (OSError, ImportError) as error:
        args.parser.error(f"can't run {args.script}: {error}")
    except SyntaxError as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return 1
    options = {name: getattr(args, name) for name in ("world_size", "backend", "network", "rules", "timeout")}
    options["backend"] = options["backend"] or "gloo"
    status, trace = 0, None
    try:
        trace = launch(run_script, script, trace=True, **options).trace
    except (ValueError, TypeError) as error:
        args.parser.error(str(error))
    except (RuntimeError, LaunchTimeout) as error:
        status, trace = 1, getattr(error, "trace", None)
        print(f"parallel101 run: {error}", file=sys.stderr)
    if trace is not None:
        _report(trace, script.name, args)
    return status


def _report(trace: Trace, name: str, args: argparse.Namespace) -> None:
    """Print the tables of a run, and write the files that were asked for."""
    from parallel101.record.units import human_seconds
    from parallel101.viz.run_table import as_text, tables

    print(f"\n{name} on {trace.world_size} ranks, {trace.backend}: {human_seconds(trace.makespan)}")
    for table in tables(trace):
        print(f"\n{as_text(table)}")
    if args.chrome is not None:
        trace.to_chrome(args.chrome)


def _network(text: str) -> Network:
    from parallel101.sim.network_text import parse_network

    try:
        return parse_network(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bench(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101.bench import main as bench

    return bench(extra)


if __name__ == "__main__":
    sys.exit(main())
