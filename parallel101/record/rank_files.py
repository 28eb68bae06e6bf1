"""One file for each rank of a torchrun job, and how they become one trace.

    rank 0 ──▶ DIR/rank-0.json.gz ──┐
    rank 1 ──▶ DIR/rank-1.json.gz ──┴─▶ join_rank_files(DIR): Trace

Each file is a trace of one rank's events, with the times of its machine's clock. The clocks of
different machines are aligned at the start of the script, which the ranks begin together.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from parallel101.record.events import Event, EventRow, events_of
from parallel101.record.trace import Trace


def rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json.gz"


def write_rank_file(
    directory: Path,
    rank: int,
    world_size: int,
    backend: str,
    events: Iterable[EventRow],
    unfinished: Iterable[EventRow],
) -> None:
    """Write what one rank recorded. Its file appears whole or not at all."""
    path = rank_file(directory, rank)
    written = path.with_name(f"writing-{path.name}")
    Trace(events_of(events), world_size, backend, events_of(unfinished)).save(written)
    written.replace(path)


def join_rank_files(directory: Path) -> tuple[Trace, list[int]]:
    """The trace of a job, and the ranks that have no file.

    A rank that was killed could not write its file.

    Raises:
        ValueError: there are no such files, or they are from different runs.
    """
    paths = sorted(directory.glob("rank-*.json.gz"))
    if not paths:
        raise ValueError(
            f"{directory} has no files of ranks: record them with torchrun … -m parallel101 run "
            f"--record {directory} train.py"
        )
    parts = {path: Trace.load(path) for path in paths}
    kinds = sorted({(part.world_size, part.backend) for part in parts.values()})
    if len(kinds) > 1:
        runs = " and ".join(f"{size} ranks on {backend}" for size, backend in kinds)
        raise ValueError(
            f"the files in {directory} are from different runs, of {runs}: delete those of the "
            "older one"
        )
    ((size, backend),) = kinds
    missing = [rank for rank in range(size) if rank_file(directory, rank) not in parts]
    zeros = _zeros(list(parts.values()))

    def aligned(events: Iterable[Event], zero: float) -> list[EventRow]:
        return [
            e._replace(start=e.start - zero, end=e.end - zero, posted=e.posted - zero)
            for e in events
        ]

    rows = [row for part, zero in zip(parts.values(), zeros) for row in aligned(part.events, zero)]
    unfinished = [
        row for part, zero in zip(parts.values(), zeros) for row in aligned(part.unfinished, zero)
    ]
    return Trace.from_rows(rows, size, backend, unfinished), missing


def _zeros(parts: list[Trace]) -> list[float]:
    """For each rank's part, the start of the script on its machine.

    It is the median over the machine's ranks, or 0 if there is only one machine.
    """
    marks = [
        next((span for span in part.spans() if "host" in (span.args or {})), None) for part in parts
    ]
    starts: dict[str, list[float]] = defaultdict(list)
    for mark in marks:
        if mark is not None and mark.args is not None:
            starts[mark.args["host"]].append(mark.start)
    if len(starts) < 2:
        return [0.0] * len(parts)
    zero = {host: statistics.median(of) for host, of in starts.items()}
    return [0.0 if mark is None or mark.args is None else zero[mark.args["host"]] for mark in marks]
