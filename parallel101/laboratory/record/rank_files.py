"""Writes the files of each rank of a torchrun job, and joins them into one trace.

    rank 0 ──▶ DIR/rank-0.json.gz ──┐
    rank 1 ──▶ DIR/rank-1.json.gz ──┴─▶ join_rank_files(DIR): Trace

Each file is a trace of one rank's events, with the times of its machine's clock. The clocks of
different machines are aligned at the start of the script, which the ranks begin together.

A rank writes its file when it ends. While it runs, a long record is in DIR/rank-0.7.json.gz,
DIR/rank-0.8.json.gz, …: a batch of events each, of which the newest grows (see last_events.py).
A rank that was killed leaves these.

If torchrun has started the job again, files of its earlier ranks may remain. Those of another
attempt, or with another number of ranks, than the lowest rank's are left out.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.laboratory.record.events import EventRow, events_of
from parallel101.laboratory.record.trace import LISTS, Trace, shifted

NAME = re.compile(r"rank-(\d+)(?:\.(\d+))?\.json\.gz")


def rank_file(directory: Path, rank: int, number: int = 0) -> Path:
    """Return the path of a rank's file, or of the file of one of its batches."""
    return directory / f"rank-{rank}{f'.{number}' if number else ''}.json.gz"


def _files(directory: Path, rank: int | None = None) -> dict[int, dict[int, Path]]:
    """Return the files of all ranks, or of one: by rank and by number, in order.

    The number of a rank's own file is 0.
    """
    paths = directory.glob(f"rank-{'*' if rank is None else rank}.*")
    names = [(NAME.fullmatch(path.name), path) for path in paths]
    files: dict[int, dict[int, Path]] = defaultdict(dict)
    for of_rank, number, path in sorted(
        (int(name[1]), int(name[2] or 0), path) for name, path in names if name
    ):
        files[of_rank][number] = path
    return files


class RankFiles:
    """The files that one rank writes: its own, and while it runs those of its batches."""

    def __init__(self, directory: Path, rank: int, world_size: int, backend: str):
        self.directory, self.rank = directory, rank
        self.world_size, self.backend = world_size, backend
        self.failed = False  # the folder can't be written to: the program goes on

    def write(
        self,
        events: Iterable[EventRow],
        unfinished: Iterable[EventRow] = (),
        earlier: Iterable[EventRow] = (),
        number: int = 0,
    ) -> None:
        """Write the record of the rank, or one batch of it.

        The file appears whole or not at all. A rank's own file replaces those of its batches. A
        batch is written again if it has grown; if that fails, the program goes on.
        """
        path = rank_file(self.directory, self.rank, number)
        written = path.with_name(f"writing-{path.name}")
        kept, *others = (events_of(rows) for rows in (events, unfinished, earlier))
        try:
            Trace(kept, self.world_size, self.backend, *others).save(written)
            written.replace(path)
        except OSError as error:
            if not number:
                raise
            if not self.failed:
                print(
                    f"parallel101: rank {self.rank} can't write its record: {error}. The script "
                    "goes on, and what a file lacks is lost if the job is killed",
                    flush=True,
                )
            self.failed = True
        if not number:
            for batch in _files(self.directory, self.rank)[self.rank].keys() - {0}:
                self.delete(batch)

    def delete(self, number: int) -> None:
        rank_file(self.directory, self.rank, number).unlink(missing_ok=True)


def remove_rank_files(directory: Path, rank: int | None = None) -> None:
    """Delete the files that a rank of an earlier run wrote, or those of all its ranks."""
    number = "*" if rank is None else rank
    for path in [*directory.glob(f"rank-{number}.*"), *directory.glob(f"writing-rank-{number}.*")]:
        if NAME.fullmatch(path.name.removeprefix("writing-")):
            path.unlink(missing_ok=True)


class JoinedFiles(NamedTuple):
    """The contents of a folder's files.

    Attributes:
        trace: of the job.
        missing: ranks that have no file. One that was killed soon after its start could not write
            it.
        left_out: ranks whose files are of another start of the job than the lowest rank's.
        cut_short: ranks that were killed, or still run: they have files of batches only.
    """

    trace: Trace
    missing: Sequence[int] = ()
    left_out: Sequence[int] = ()
    cut_short: Sequence[int] = ()


def join_rank_files(directory: Path) -> JoinedFiles:
    """Return the trace of a job, and what it lacks.

    Raises:
        ValueError: there are no such files.
    """
    files = _files(directory)
    if not files:
        raise ValueError(
            f"{directory} has no files of ranks: record them with torchrun … -m parallel101 run "
            f"--record {directory} train.py"
        )
    every = {rank: _record_of(of_rank) for rank, of_rank in files.items()}
    marks = {rank: _start_mark(part) for rank, part in every.items()}
    starts = {
        rank: (part.world_size, part.backend, marks[rank].get("attempt", ""))
        for rank, part in every.items()
    }
    start = size, backend, _ = starts[min(every)]
    parts = {rank: part for rank, part in every.items() if starts[rank] == start}
    # the start of the script on each machine's clock
    on_host: dict[str, list[float]] = defaultdict(list)
    for rank in parts:
        if marks[rank]:
            on_host[marks[rank]["host"]].append(marks[rank]["start"])
    zeros = {host: statistics.median(times) for host, times in on_host.items()}
    some = next(iter(zeros.values()), 0.0)
    zero = {rank: zeros.get(marks[rank].get("host", ""), some) for rank in parts}
    rows, unfinished, earlier = (
        [e for rank, part in parts.items() for e in shifted(getattr(part, name), zero[rank])]
        for name in LISTS
    )
    return JoinedFiles(
        Trace.from_rows(rows, size, backend, unfinished, earlier),
        missing=[rank for rank in range(size) if rank not in parts],
        left_out=[rank for rank in every if rank not in parts],
        cut_short=[rank for rank in parts if 0 not in files[rank]],
    )


def _start_mark(part: Trace) -> dict[str, Any]:
    """Return the labels of the start of the script, with its time as `start`; {} if it has none."""
    for event in [*part.earlier, *part.spans()]:
        if event.args and "host" in event.args:
            return {**event.args, "start": event.start}
    return {}


def _record_of(files: Mapping[int, Path]) -> Trace:
    """Return the record of a rank: its own file, or if it was killed, those of its batches."""
    if 0 in files:
        return Trace.load(files[0])
    parts = [Trace.load(path) for path in files.values()]
    events = [event for part in parts for event in part.events]
    newest = parts[-1]
    return Trace(events, newest.world_size, newest.backend, newest.unfinished, parts[0].earlier)
