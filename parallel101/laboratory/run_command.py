"""`parallel101 run` and `parallel101 merge`: scripts on ranks, and what they recorded."""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from parallel101.laboratory.option_types import Folder, OutputFile, Seconds, Steps, Whole
from parallel101.laboratory.record.last_events import LAST_EVENTS

if TYPE_CHECKING:
    from parallel101.laboratory.ranks.script import Script
    from parallel101.laboratory.ranks.wire import RankRecord
    from parallel101.laboratory.record.trace import Trace


def links(text: str) -> Any:
    from parallel101.laboratory.sim.network_text import parse_network

    return parse_network(text)


# ── The commands


def run(
    script: str,
    *arguments: str,
    m: bool = False,
    world_size: int | None = None,
    backend: Literal["gloo", "sim", "nccl"] | None = None,
    network: Annotated[Any, links, "LINKS"] | None = None,
    rules: Literal["gloo", "nccl"] = "gloo",
    timeout: Seconds = math.inf,
    keep_waiting: bool = False,
    stuck_after: Seconds = 30.0,
    record: Folder | None = None,
    last_events: Whole = LAST_EVENTS,
    page: OutputFile | None = None,
    steps: Steps | None = None,
    chrome: OutputFile | None = None,
) -> int:
    """Run a script for torchrun on every rank, unchanged, and show who waits for whom.

    Its output comes as it is printed, then the error if there is one, and then the tables.

    Args:
        script: the script, or with -m the module
        arguments: the script's own arguments
        m: run a module, as python -m does
        world_size: number of ranks (default: 4)
        backend: where the ranks run (default: gloo)
        network: on sim, the links, e.g. latency=1e-6,bandwidth=1e9
        rules: on sim, what the program may rely on
        timeout: the time limit (default: none)
        keep_waiting: print a deadlock, and let the script's own time limits end it (default: end
            the run)
        stuck_after: without progress for so long, print the stacks of the ranks that others
            wait for, again after pauses that double; the run goes on
        record: the folder to which each rank writes what it records, while it runs
        last_events: how many events of each rank are kept; of those before them, only sums
        page: write a web page with the timeline and the traffic
        steps: the training steps that the page of a long run shows, e.g. 100:120
            (default: the last ones)
        chrome: write a trace for ui.perfetto.dev
    """
    from parallel101 import LaunchTimeout
    from parallel101.laboratory.ranks.script import Script
    from parallel101.laboratory.ranks.torchrun import in_a_job

    loaded, in_job = Script(script, arguments, m), in_a_job() and backend != "sim"
    only_here = {"page": page, "chrome": chrome, "network": network, "steps": steps}
    wrong = [f"--{name} can't be used" for name, value in only_here.items() if value is not None]
    if in_job and (record is None or wrong):
        raise ValueError(
            f"{[*wrong, '--record DIR is needed'][0]} in a job that torchrun, srun or mpirun "
            "started: each rank writes a file to DIR, and `parallel101 merge DIR` makes the page "
            "of all"
        )
    if backend == "sim" and (record is not None or last_events != LAST_EVENTS):
        raise ValueError(
            f"{'--last-events' if record is None else '--record'} can't be used with --backend "
            "sim, which keeps all events: use --page FILE or --chrome FILE there"
        )
    sys.path.insert(0, loaded.directory)  # the ranks get this path
    try:
        loaded.load()
    except (OSError, ImportError) as error:
        raise ValueError(f"can't run {script}: {error}") from error
    except SyntaxError as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return 1
    options: dict[str, Any] = {"backend": backend or "gloo", "world_size": world_size}
    options |= {"keep_waiting": keep_waiting, "stuck_after": stuck_after}
    try:
        if in_job and record is not None:
            job = options | {"timeout": min(timeout, 1e9)}
            return _run_in_job(loaded, last_events, record, job)
        options |= {"network": network, "rules": rules, "timeout": timeout}
        record = record and record.absolute()
        report = partial(_report, loaded.name, record, page, steps, chrome)
        return _run_here(loaded, last_events, record, options, report)
    except TypeError as error:
        raise ValueError(str(error)) from error
    except (RuntimeError, LaunchTimeout) as error:
        print(f"parallel101 run: {error}", file=sys.stderr)
        return 1


def _run_here(
    script: Script, last_events: int, record: Path | None, options: dict, report: Callable
) -> int:
    """Start the ranks, and show the record of the run.

    This is also done if the run failed or was stopped with Ctrl-C.
    """
    from parallel101 import launch
    from parallel101.laboratory.ranks.monitor import no_ranks_run
    from parallel101.laboratory.ranks.script import free_port, run_script
    from parallel101.laboratory.record.rank_files import remove_rank_files

    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, no_ranks_run)  # while ranks run, it asks for a report
    os.environ["MASTER_PORT"] = str(free_port())
    if record is not None:
        record.mkdir(parents=True, exist_ok=True)
        remove_rank_files(record)
    error: BaseException | None = None
    try:
        trace = launch(run_script, script, last_events, record, trace=True, **options).trace
    except BaseException as failed:
        if (trace := getattr(failed, "trace", None)) is None:
            raise
        error = failed
        if isinstance(error, Exception):
            print(f"parallel101 run: {error}", file=sys.stderr)
    report(trace, failed=error)
    if record is not None and error is None:
        remove_rank_files(record)  # all that they have is in the trace
    return 0 if error is None else 1 if isinstance(error, Exception) else 130


def _run_in_job(script: Script, last_events: int, record: Path, options: dict) -> int:
    """Run the script in this process, a rank of torchrun's job, and write what it recorded."""
    from parallel101.laboratory.ranks.script import run_script
    from parallel101.laboratory.ranks.torchrun import join_job, rank_and_size
    from parallel101.laboratory.ranks.wire import Job
    from parallel101.laboratory.record.rank_files import RankFiles, remove_rank_files

    rank, size = rank_and_size()
    record.mkdir(parents=True, exist_ok=True)
    remove_rank_files(record, rank)  # of an earlier run
    files = RankFiles(record, rank, size, options["backend"])
    job = Job(recording=True, **options | {"world_size": size})

    def keep(kept: RankRecord) -> None:
        files.write(kept.events, kept.unfinished, kept.earlier)

    try:
        args = script, last_events, record
        join_job(run_script, args, {}, job, options["world_size"], keep, record)
    except RuntimeError as error:
        # it is raised on every rank; one that has died is reported by the rank that found it
        if getattr(error, "announced_by", getattr(error, "rank", 0)) == rank:
            raise
        return 1
    if rank == 0:
        print(
            f"Each rank wrote its record to {record}. To join them: parallel101 merge {record} "
            "--page trace.html",
            file=sys.stderr,
        )
    return 0


def merge(
    directory: Folder,
    *,
    page: OutputFile | None = None,
    steps: Steps | None = None,
    chrome: OutputFile | None = None,
) -> int:
    """Join what the ranks of a torchrun job recorded with parallel101 run --record DIR.

    Args:
        directory: the folder with the ranks' files
        page: write a web page with the timeline and the traffic
        steps: the training steps that the page of a long run shows, e.g. 100:120
            (default: the last ones)
        chrome: write a trace for ui.perfetto.dev
    """
    from parallel101.laboratory.record.rank_files import JoinedFiles, join_rank_files
    from parallel101.laboratory.record.trace import Trace
    from parallel101.laboratory.record.units import ranks_text
    from parallel101.laboratory.viz.run_table import script_name

    joined = directory / "trace.json.gz"
    if joined.exists() and not any(directory.glob("rank-*")):  # by `parallel101 run` itself
        found = JoinedFiles(Trace.load(joined))
    else:
        found = join_rank_files(directory)
    lacks = {
        "the record of {} is of another start of the job than rank 0's, and is left out. torchrun "
        "has started the ranks again": found.left_out,
        "{} wrote no file, so the record lacks what was done there": found.missing,
        "{} did not end (killed, or still running): the record may lack the last ten seconds "
        "before that": found.cut_short,
    }
    for text, ranks in lacks.items():
        if ranks:
            print(f"parallel101 merge: {text.format(ranks_text(ranks))}", file=sys.stderr)
    _report(script_name(found.trace), directory, page, steps, chrome, found.trace)
    return 0


def _report(
    name: str,
    folder: Path | None,
    page: Path | None,
    steps: tuple[int, int] | None,
    chrome: Path | None,
    trace: Trace,
    failed: BaseException | None = None,
) -> None:
    """Print the tables of a run, and write its trace and the files that were asked for."""
    from parallel101.laboratory.analysis.waiting import with_compute
    from parallel101.laboratory.viz.run_table import as_text, heading, tables

    if folder is not None:
        trace.save(folder / "trace.json.gz")
    print(f"\n{name}: {heading(trace)}")
    for table in tables(trace):
        print(f"\n{as_text(table)}")
    print()
    if page is not None:
        from parallel101.laboratory.publish.run_page import run_page

        page.write_text(run_page(trace, name, failed, steps), encoding="utf-8")
        print(f"Wrote {page}. It opens in a browser, also offline.")
    if chrome is not None:
        with_compute(trace).to_chrome(chrome)
        print(f"Wrote {chrome}. Open it at ui.perfetto.dev.")
    if folder is not None:
        print(f"Wrote {folder / 'trace.json.gz'}. parallel101.Trace.load reads it.")
