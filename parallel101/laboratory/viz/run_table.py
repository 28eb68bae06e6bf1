"""The tables at the end of `parallel101 run`: the time of each rank, the slowest links and calls.

    rank  messages   sent  collectives  their data  computing   waiting  of that, for late ranks
       0         6   24 B            3        96 B      1.2 s  0.3 s 20%  rank 1 0.2 s

`tables` gives the rows, which the page (run_page.py) shows as HTML; `as_text` lines them up for a
terminal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.analysis.run_window import recorded_from, run_times, script_marks
from parallel101.laboratory.analysis.slower_ranks import slower_ranks
from parallel101.laboratory.analysis.waiting import (
    CallTimes,
    CollectiveTotals,
    RankTimes,
    Wait,
    collective_totals,
    rank_times,
    slowest_calls,
    slowest_links,
    waits,
)
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds, ranks_text

MOST_RANKS, MOST_LINKS, MOST_CALLS = 32, 8, 10


class TextTable(NamedTuple):
    """A table of text.

    `numbers`: how many of its first columns are right-aligned; the others are words.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    numbers: int
    note: str = ""


def tables(trace: Trace, waited: Sequence[Wait] | None = None) -> list[TextTable]:
    """Return tables of what a run did, by rank, by link and by line, without empty ones.

    Args:
        trace: a record that has waits (see analysis/waiting.py).
        waited: what `waits(trace)` returned, if that is known already.
    """
    waited = waits(trace) if waited is None else waited
    every = [_ranks(trace, waited), _slower(trace), _links(trace), _collectives(trace)]
    return [table for table in [*every, _calls(trace, waited)] if table.rows]


def heading(trace: Trace) -> str:
    """Return the run in one line: how many ranks, where, and how long."""
    clock = (
        " of virtual time, in which only communication and p101.compute take time"
        if trace.backend == "sim"
        else ""
    )
    ranks = f"{trace.world_size} rank{'s' * (trace.world_size != 1)}"
    begin, end = run_times(trace)
    started = min((mark.start for mark in script_marks(trace)), default=begin)
    text = f"{ranks} on {trace.backend}, {human_seconds(end - begin)}{clock}"
    if started < begin:
        text += f" from the first call, {human_seconds(begin - started)} after the script's start"
    return f"{text}. {kept_text(trace)}" if trace.earlier else text


def kept_text(trace: Trace) -> str:
    """Return a sentence that says which events a record has, if it lacks the earlier ones."""
    begin, end = run_times(trace)
    since = recorded_from(trace) - begin
    return (
        f"Kept are {trace.kept_text}, from {human_seconds(since)} to {human_seconds(end - begin)}; "
        "of those before them, the sums in the tables."
    )


def script_name(trace: Trace) -> str:
    """Return the script that `parallel101 run` ran, with its arguments."""
    return next((str(mark.args["script"]) for mark in script_marks(trace) if mark.args), "a run")


def as_text(table: TextTable) -> str:
    """Return the table as lines of text, with its title above them."""
    columns = list(zip(table.head, *table.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [table.title]
    for cells in (table.head, *table.rows):
        pairs = list(zip(cells, widths))
        numbers = [cell.rjust(width) for cell, width in pairs[: table.numbers]]
        words = [cell.ljust(width) for cell, width in pairs[table.numbers :]]
        lines.append(("  " + "  ".join(numbers + words)).rstrip())
    return "\n".join(lines + [f"  {table.note}"] * bool(table.note))


def _ranks(trace: Trace, waited: Sequence[Wait]) -> TextTable:
    every = rank_times(trace, waited)
    shown_rows, title = every, "Time of each rank"
    if len(every) > MOST_RANKS:
        shown_rows = sorted(every, key=lambda row: -row.waiting)[:MOST_RANKS]
        title = f"Time of the {MOST_RANKS} ranks that waited longest"
    messages, collectives = any(r.messages for r in every), any(r.collectives for r in every)
    late = any(row.waited_for for row in every)
    has = [True, messages, messages, collectives, collectives, True, True, late]
    head = ["rank", "messages", "sent", "collectives", "their data", "computing", "waiting"]
    head.append("of that, until others called")
    rows = [[cell for cell, keep in zip(_rank_cells(row), has) if keep] for row in shown_rows]
    head = [cell for cell, keep in zip(head, has) if keep]
    lost = [row.rank for row in every if not row.recorded]
    kept = _of_kept(trace, "Until others called") if late else ""
    note = _notes(kept, f"–: the record of {ranks_text(lost)} is lost." if lost else "")
    return TextTable(title, head, rows, len(head) - late, note)


def _of_kept(trace: Trace, what: str) -> str:
    """Return a note for a column that covers only the record's events; "" if it has them all."""
    return f"{what}: in {trace.kept_text}." if trace.earlier else ""


def _rank_cells(row: RankTimes) -> list[str]:
    if not row.recorded:
        return [str(row.rank), *"–––––––"]
    total = (row.computing + row.waiting) or 1.0
    longest = sorted(row.waited_for.items(), key=lambda entry: -entry[1])[:3]
    return [
        str(row.rank),
        str(row.messages),
        human_bytes(row.nbytes),
        str(row.collectives),
        human_bytes(row.collective_bytes),
        f"{human_seconds(row.computing)} {row.computing / total:4.0%}",
        f"{human_seconds(row.waiting)} {row.waiting / total:4.0%}",
        ", ".join(f"{human_seconds(late)} for rank {rank}" for rank, late in longest),
    ]


def _slower(trace: Trace) -> TextTable:
    """Return a table of the ranks that others wait for: what takes longer, how much, and where."""
    rows = []
    for row in slower_ranks(trace)[:MOST_RANKS]:
        share = f"{row.slower} of {row.steps}"
        steps = f"{share}, from {row.first}" if row.first else "one run"
        for cause in row.causes:
            more = " and other lines" if cause.seconds_there < 0.5 * cause.seconds else ""
            line = _place(cause.where) + more if cause.where else "–"
            rows.append([str(row.rank), human_seconds(cause.seconds), cause.what, steps, line])
    head = ["rank", "more per step", "what", "in steps", "line"]
    title = "Slower ranks, compared with the median of the others"
    return TextTable(title, head, rows, 2, _notes(_of_kept(trace, "In steps")))


def _links(trace: Trace) -> TextTable:
    links = slowest_links(trace)
    rows = [
        [
            f"{link.src} → {link.dst}",
            str(link.messages),
            human_bytes(link.nbytes),
            human_seconds(link.seconds),
            human_seconds(link.slowest),
            f"{human_bytes(link.timed_bytes / link.seconds)}/s" if link.seconds else "–",
        ]
        for link in links[:MOST_LINKS]
    ]
    head = ["link", "messages", "bytes", "in flight", "longest", "rate"]
    kept = _of_kept(trace, "In flight, longest and rate")
    note = _notes(_more(len(links), MOST_LINKS, "link"), kept)
    return TextTable("Slowest links", head, rows, 6, note)


def _notes(*notes: str) -> str:
    return " ".join(note if note.endswith(".") else f"{note}." for note in notes if note)


def _collectives(trace: Trace) -> TextTable:
    totals, everyone = collective_totals(trace), range(trace.world_size)
    rows = [
        [
            str(row.calls),
            human_bytes(row.nbytes),
            human_bytes(row.nbytes / row.calls),
            row.kind,
            _among(row, everyone),
        ]
        for row in totals[:MOST_CALLS]
    ]
    head = ["calls", "data", "per call", "operation", "among"]
    note = _more(len(totals), MOST_CALLS, "row")
    return TextTable("Collectives, as each rank called them", head, rows, 3, note)


def _among(row: CollectiveTotals, everyone: range) -> str:
    ranks = ranks_text(row.ranks, everyone)
    return ranks if row.axis is None else f"{ranks}, axis {row.axis}"


def _calls(trace: Trace, waited: Sequence[Wait]) -> TextTable:
    calls = slowest_calls(waited, trace.earlier)
    rows = [
        [
            human_seconds(call.seconds),
            str(call.waits),
            f"{human_seconds(call.longest)} on rank {call.longest_on}",
            _last(call),
            call.kind,
            _place(call.where),
        ]
        for call in calls[:MOST_CALLS]
    ]
    head = ["waited", "times", "longest", "called last", "call", "line"]
    note = _notes(_more(len(calls), MOST_CALLS, "line"), _of_kept(trace, "Called last"))
    return TextTable("Slowest calls, all ranks together", head, rows, 2, note)


def _last(call: CallTimes) -> str:
    """Return which rank was most often the last to call, and how often: "rank 3, 95%"."""
    if not call.last:
        return "–"
    rank, times = max(call.last.items(), key=lambda entry: (entry[1], -entry[0]))
    return f"rank {rank}, {times / sum(call.last.values()):.0%}"


def _place(where: str) -> str:
    """Return the line of source, with a relative path if it is below the working directory."""
    relative = os.path.relpath(where) if os.path.isabs(where) else where
    return shown(where).replace(where, relative) if not relative.startswith("..") else shown(where)


def _more(count: int, most: int, what: str) -> str:
    return f"and {count - most} more {what}{'s' * (count - most > 1)}" if count > most else ""
