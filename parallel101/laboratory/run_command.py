"""`parallel101 run` and `parallel101 merge`: scripts on ranks, and what they recorded."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel101.laboratory.ranks.script import Script
    from parallel101.laboratory.record.rank_files import JoinedFiles
    from parallel101.laboratory.record.trace import Trace
    from parallel101.laboratory.sim.network import Network


def option(
    parser: argparse.ArgumentParser,
    name: str,
    metavar: str | None,
    text: str,
    type: Any = str,
    **more: Any,
) -> None:
    """Add an argument to a command.

    `metavar` stands for its value in the help, and `text` says what it is.
    """
    parser.add_argument(name, metavar=metavar, help=text, type=type, **more)


def add_run_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add both to the command line. `command(example, run, text)` makes one."""
    from parallel101.laboratory.record.last_events import LAST_EVENTS

    run = command(
        "run --world-size 4 train.py",
        _script,
        "Run a script for torchrun on every rank, unchanged, and show who waits for whom.",
    )
    option(run, "--world-size", "N", "number of ranks (default: 4)", int)
    text = "where the ranks run (default: gloo)"
    option(run, "--backend", None, text, choices=("gloo", "sim", "nccl"))
    option(run, "--network", "TEXT", "on sim, the links, e.g. latency=1e-6,bandwidth=1e9", _network)
    text = "on sim, what the program may rely on (default: gloo)"
    option(run, "--rules", None, text, choices=("gloo", "nccl"), default="gloo")
    option(run, "--timeout", "SECONDS", "time limit (default: none)", seconds_of, default=math.inf)
    run.add_argument(
        "--keep-waiting",
        action="store_true",
        help="print a deadlock, and let the script's own time limits end it (default: end the run)",
    )
    text = (
        "without progress for so long, print the stacks of the ranks that others wait for "
        "(default: 30), again after pauses that double; the run goes on"
    )
    option(run, "--stuck-after", "SECONDS", text, seconds_of, default=30.0)
    text = "the folder to which each rank writes what it records, while it runs"
    option(run, "--record", "DIR", text, Path)
    text = (
        "how many events of each rank are kept; of those before them, only sums "
        f"(default: {LAST_EVENTS:,})"
    )
    option(run, "--last-events", "N", text, _whole)
    run.add_argument(
        "-m", dest="as_module", action="store_true", help="run a module, as python -m does"
    )
    option(run, "script", "SCRIPT", "the script, or with -m the module")
    option(run, "arguments", "ARGS", "the script's own arguments", nargs=argparse.REMAINDER)

    merge = command(
        "merge trace --page trace.html",
        _merge,
        "Join what the ranks of a torchrun job recorded with parallel101 run --record DIR.",
    )
    option(merge, "directory", "DIR", "the folder with the ranks' files", Path)
    for sub in (run, merge):
        text = "write a web page with the timeline and the traffic"
        option(sub, "--page", "FILE", text, _output_file)
        text = (
            "training steps that the page of a long run shows, e.g. 100:120 (default: the last "
            "ones)"
        )
        option(sub, "--steps", "FIRST:LAST", text, _range)
        option(sub, "--chrome", "FILE", "write a trace for ui.perfetto.dev", _output_file)


def seconds_of(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text} is not a valid time limit; expected a finite number of seconds greater than 0"
        )
    return seconds


def _output_file(text: str) -> Path:
    """Make the folder of a file now, so that a run isn't lost when the file is written."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't write {text}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; expected the name of a file")
    return path


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(
            f"{text} is not a range of steps; expected FIRST:LAST, such as 100:120"
        )
    return int(first), int(last)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 1 or more")
    return int(text)


def _network(text: str) -> Network:
    from parallel101.laboratory.sim.network_text import parse_network

    try:
        return parse_network(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _script(args: argparse.Namespace, extra: list[str]) -> int:
    """Run a script on ranks.

    Its output comes as it is printed, then the error if there is one, and then the tables.
    """
    from parallel101 import LaunchTimeout
    from parallel101.laboratory.ranks.script import Script
    from parallel101.laboratory.ranks.torchrun import in_a_job

    script = Script(args.script, tuple(args.arguments), args.as_module)
    sys.path.insert(0, script.directory)  # the ranks get this path
    try:
        script.load()
    except (OSError, ImportError) as error:
        args.parser.error(f"can't run {args.script}: {error}")
    except SyntaxError as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return 1
    run = _run_in_job if in_a_job() and args.backend != "sim" else _run_here
    try:
        return run(args, script)
    except TypeError as error:
        raise ValueError(str(error)) from error
    except (RuntimeError, LaunchTimeout) as error:
        print(f"parallel101 run: {error}", file=sys.stderr)
        return 1


def _run_here(args: argparse.Namespace, script: Script) -> int:
    """Start the ranks, and show the record of the run.

    This is also done if the run failed or was stopped with Ctrl-C.
    """
    from parallel101 import launch
    from parallel101.laboratory.ranks.monitor import no_ranks_run
    from parallel101.laboratory.ranks.script import free_port, run_script
    from parallel101.laboratory.record.rank_files import remove_rank_files

    on_sim = args.backend == "sim"
    if on_sim and (args.record is not None or args.last_events is not None):
        option = "--record" if args.record is not None else "--last-events"
        raise ValueError(
            f"{option} can't be used with --backend sim, which keeps all events: use --page FILE "
            "or --chrome FILE there"
        )
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, no_ranks_run)  # while ranks run, it asks for a report
    os.environ["MASTER_PORT"] = str(free_port())
    names = ("world_size", "network", "rules", "timeout", "keep_waiting", "stuck_after")
    options = {name: getattr(args, name) for name in names}
    if args.record is not None:
        args.record = args.record.absolute()
        args.record.mkdir(parents=True, exist_ok=True)
        remove_rank_files(args.record)
    error: BaseException | None = None
    try:
        kept, backend = _kept_record(args), args.backend or "gloo"
        trace = launch(run_script, script, *kept, trace=True, backend=backend, **options).trace
    except BaseException as failed:
        if (trace := getattr(failed, "trace", None)) is None:
            raise
        error = failed
        if isinstance(error, Exception):
            print(f"parallel101 run: {error}", file=sys.stderr)
    assert trace is not None
    if args.record is not None:
        trace.save(args.record / "trace.json.gz")
        if error is None:
            remove_rank_files(args.record)  # all that they have is in the trace
    _report(trace, script.name, args, error)
    if args.record is not None:
        print(f"Wrote {args.record / 'trace.json.gz'}. parallel101.Trace.load reads it.")
    return 0 if error is None else 1 if isinstance(error, Exception) else 130


def _kept_record(args: argparse.Namespace) -> tuple[int, Path | None]:
    from parallel101.laboratory.record.last_events import LAST_EVENTS

    return args.last_events or LAST_EVENTS, args.record


def _run_in_job(args: argparse.Namespace, script: Script) -> int:
    """Run the script in this process, a rank of torchrun's job, and write what it recorded."""
    from parallel101.laboratory.ranks.script import run_script
    from parallel101.laboratory.ranks.torchrun import join_job, rank_and_size
    from parallel101.laboratory.record.rank_files import RankFiles, remove_rank_files

    rank, size = rank_and_size()
    wrong = next(
        (
            f"--{name}"
            for name in ("page", "chrome", "network", "steps")
            if getattr(args, name) is not None
        ),
        None,
    )
    if args.record is None or wrong:
        what = f"{wrong} can't be used" if wrong else "--record DIR is needed"
        raise ValueError(
            f"{what} in a job that torchrun, srun or mpirun started: each rank writes a file to "
            "DIR, and `parallel101 merge DIR` makes the page of all"
        )
    args.record.mkdir(parents=True, exist_ok=True)
    remove_rank_files(args.record, rank)  # of an earlier run
    backend = args.backend or "gloo"
    files = RankFiles(args.record, rank, size, backend)
    try:
        join_job(
            run_script,
            (script, *_kept_record(args)),
            {},
            recording=True,
            backend=backend,
            world_size=args.world_size,
            timeout=min(args.timeout, 1e9),
            keep_waiting=args.keep_waiting,
            stuck_after=args.stuck_after,
            folder=args.record,
            keep_record=lambda record: files.write(
                record.events, record.unfinished, record.earlier
            ),
        )
    except RuntimeError as error:
        # it is raised on every rank; one that has died is reported by the rank that found it
        if getattr(error, "announced_by", getattr(error, "rank", 0)) == rank:
            raise
        return 1
    if rank == 0:
        print(
            f"Each rank wrote its record to {args.record}. To join them: parallel101 merge "
            f"{args.record} --page trace.html",
            file=sys.stderr,
        )
    return 0


def _merge(args: argparse.Namespace, extra: list[str]) -> int:
    """Join the files of a torchrun job's ranks into one trace, and show it."""
    from parallel101.laboratory.record.units import ranks_text
    from parallel101.laboratory.viz.run_table import script_name

    trace, missing, left_out, cut_short = _joined(args.directory)
    if left_out:
        print(
            f"parallel101 merge: the record of {ranks_text(left_out)} is of another start of the "
            "job than rank 0's, and is left out. torchrun has started the ranks again",
            file=sys.stderr,
        )
    if missing:
        print(
            f"parallel101 merge: {ranks_text(missing)} wrote no file, so the record lacks what was "
            "done there",
            file=sys.stderr,
        )
    if cut_short:
        print(
            f"parallel101 merge: {ranks_text(cut_short)} did not end (killed, or still running): "
            "the record may lack the last ten seconds before that",
            file=sys.stderr,
        )
    trace.save(args.directory / "trace.json.gz")
    _report(trace, script_name(trace), args)
    print(f"Wrote {args.directory / 'trace.json.gz'}. parallel101.Trace.load reads it.")
    return 0


def _joined(directory: Path) -> JoinedFiles:
    """Return the trace of a job's ranks, or the one that `parallel101 run --record` has joined."""
    from parallel101.laboratory.record.rank_files import JoinedFiles, join_rank_files
    from parallel101.laboratory.record.trace import Trace

    joined = directory / "trace.json.gz"
    if joined.exists() and not any(directory.glob("rank-*")):
        return JoinedFiles(Trace.load(joined))
    return join_rank_files(directory)


def _report(
    trace: Trace, name: str, args: argparse.Namespace, failed: BaseException | None = None
) -> None:
    """Print the tables of a run, and write the files that were asked for."""
    from parallel101.laboratory.analysis.waiting import with_compute
    from parallel101.laboratory.viz.run_table import as_text, heading, tables

    print(f"\n{name}: {heading(trace)}")
    for table in tables(trace):
        print(f"\n{as_text(table)}")
    print()
    if args.page is not None:
        from parallel101.laboratory.publish.run_page import run_page

        page = run_page(trace, name, failed, args.steps)
        args.page.write_text(page, encoding="utf-8")
        print(f"Wrote {args.page}. It opens in a browser, also offline.")
    if args.chrome is not None:
        with_compute(trace).to_chrome(args.chrome)
        print(f"Wrote {args.chrome}. Open it at ui.perfetto.dev.")
