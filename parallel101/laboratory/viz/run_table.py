"""The tables at the end of `parallel101 run`: the time of each rank, the slowest links and calls.

    rank  messages   sent  collectives  their data  computing   waiting  of that, for late ranks
       0         6   24 B            3        96 B      1.2 s  0.3 s 20%  rank 1 0.2 s

`tables` gives the rows, which the page (run_page.py) shows as HTML; `as_text` lines them up for a
terminal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parallel101.laboratory.analysis.run_window import recorded_from, run_times, script_marks
from parallel101.laboratory.analysis.slower_ranks import slower_ranks
from parallel101.laboratory.analysis.traffic import collective_totals, slowest_links
from parallel101.laboratory.analysis.waiting import (
    CallTimes,
    RankTimes,
    Wait,
    rank_times,
    slowest_calls,
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
    clock = " of virtual time, in which only communication and p101.compute take time"
    clock *= trace.backend == "sim"
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


def _table(
    title: str,
    rows: Sequence[Any],
    columns: dict[str, Callable[[Any], str]],
    numbers: int,
    most: int = MOST_CALLS,
    what: str = "row",
    notes: Sequence[str] = (),
) -> TextTable:
    """Return a table of the first rows. `columns`: by their heads, a row's text."""
    more, cells = len(rows) - most, [[of(row) for of in columns.values()] for row in rows[:most]]
    told = [f"and {more} more {what}{'s' * (more > 1)}."] * (more > 0) + [n for n in notes if n]
    return TextTable(title, list(columns), cells, numbers, " ".join(told))


def _of_kept(trace: Trace, what: str) -> str:
    """Return a note for a column that covers only the record's events; "" if it has them all."""
    return f"{what}: in {trace.kept_text}." if trace.earlier else ""


def _ranks(trace: Trace, waited: Sequence[Wait]) -> TextTable:
    rows, title = rank_times(trace, waited), "Time of each rank"
    lost = [row.rank for row in rows if not row.recorded]
    late = any(row.waited_for for row in rows)
    columns: dict[str, Callable[[RankTimes], str]] = {}
    if any(row.messages for row in rows):
        columns["messages"] = lambda row: str(row.messages)
        columns["sent"] = lambda row: human_bytes(row.nbytes)
    if any(row.collectives for row in rows):
        columns["collectives"] = lambda row: str(row.collectives)
        columns["their data"] = lambda row: human_bytes(row.collective_bytes)
    columns["computing"] = lambda row: _with_share(row, row.computing)
    columns["waiting"] = lambda row: _with_share(row, row.waiting)
    if late:
        columns["of that, until others called"] = _waited_for
    known = {
        head: (lambda row, of=of: of(row) if row.recorded else "–") for head, of in columns.items()
    }
    columns = {"rank": lambda row: str(row.rank)} | known
    if len(rows) > MOST_RANKS:
        rows = sorted(rows, key=lambda row: -row.waiting)[:MOST_RANKS]
        title = f"Time of the {MOST_RANKS} ranks that waited longest"
    notes = [_of_kept(trace, "Until others called")] * late
    notes += [f"–: the record of {ranks_text(lost)} is lost."] * bool(lost)
    return _table(title, rows, columns, len(columns) - late, MOST_RANKS, notes=notes)


def _with_share(row: RankTimes, seconds: float) -> str:
    """Return some of a rank's time, with its share of the whole."""
    return f"{human_seconds(seconds)} {seconds / ((row.computing + row.waiting) or 1.0):4.0%}"


def _waited_for(row: RankTimes) -> str:
    longest = sorted(row.waited_for.items(), key=lambda entry: -entry[1])[:3]
    return ", ".join(f"{human_seconds(late)} for rank {rank}" for rank, late in longest)


def _slower(trace: Trace) -> TextTable:
    """Return a table of the ranks that others wait for: what takes longer, how much, and where."""
    rows = [(row, cause) for row in slower_ranks(trace)[:MOST_RANKS] for cause in row.causes]
    columns: dict[str, Callable[[Any], str]] = {
        "rank": lambda of: str(of[0].rank),
        "more per step": lambda of: human_seconds(of[1].seconds),
        "what": lambda of: of[1].what,
        "in steps": lambda of: (
            f"{of[0].slower} of {of[0].steps}, from {of[0].first}" if of[0].first else "one run"
        ),
        "line": lambda of: (
            _place(of[1].where) + " and other lines" * (of[1].seconds_there < 0.5 * of[1].seconds)
            if of[1].where
            else "–"
        ),
    }
    title = "Slower ranks, compared with the median of the others"
    return _table(title, rows, columns, 2, len(rows), notes=[_of_kept(trace, "In steps")])


def _links(trace: Trace) -> TextTable:
    columns: dict[str, Callable[[Any], str]] = {
        "link": lambda link: f"{link.src} → {link.dst}",
        "messages": lambda link: str(link.messages),
        "bytes": lambda link: human_bytes(link.nbytes),
        "in flight": lambda link: human_seconds(link.seconds),
        "longest": lambda link: human_seconds(link.slowest),
        "rate": lambda link: (
            f"{human_bytes(link.timed_bytes / link.seconds)}/s" if link.seconds else "–"
        ),
    }
    notes = [_of_kept(trace, "In flight, longest and rate")]
    return _table("Slowest links", slowest_links(trace), columns, 6, MOST_LINKS, "link", notes)


def _collectives(trace: Trace) -> TextTable:
    everyone = range(trace.world_size)
    columns: dict[str, Callable[[Any], str]] = {
        "calls": lambda row: str(row.calls),
        "data": lambda row: human_bytes(row.nbytes),
        "per call": lambda row: human_bytes(row.nbytes / row.calls),
        "operation": lambda row: row.kind,
        "among": lambda row: (
            ranks_text(row.ranks, everyone) + (f", axis {row.axis}" if row.axis else "")
        ),
    }
    return _table("Collectives, as each rank called them", collective_totals(trace), columns, 3)


def _calls(trace: Trace, waited: Sequence[Wait]) -> TextTable:
    columns: dict[str, Callable[[Any], str]] = {
        "waited": lambda call: human_seconds(call.seconds),
        "times": lambda call: str(call.waits),
        "longest": lambda call: f"{human_seconds(call.longest)} on rank {call.longest_on}",
        "called last": _last,
        "call": lambda call: call.kind,
        "line": lambda call: _place(call.where),
    }
    calls, notes = slowest_calls(waited, trace.earlier), [_of_kept(trace, "Called last")]
    return _table("Slowest calls, all ranks together", calls, columns, 2, what="line", notes=notes)


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
