"""What `parallel101 merge` says of a folder with dumps of torch's flight recorder.

    parallel101 merge DIR [--page stuck.html]      DIR has nccl_trace_rank_0, nccl_trace_rank_1, …

A dump has no waits and, on gloo, no times of an end, so there is no timeline and no table of
waiting times.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from parallel101.laboratory.analysis.flight_findings import FlightVerdict, called_at, flight_verdict
from parallel101.laboratory.publish.offline_page import offline_html
from parallel101.laboratory.publish.run_page import table_html
from parallel101.laboratory.record.flight_recorder import FlightJob, read_flight_dumps
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.viz.run_table import MOST_RANKS, TextTable, as_text

NOTHING = (
    "Every call in the dumps has finished on every rank. If the job hung, it hung outside of the "
    "collectives."
)
LOST = " (older ones lost)"


def report_flight_job(directory: Path, page: Path | None = None) -> str:
    """The text of the report. With `page`, writes it as a web page, too.

    Raises ValueError if no dump can be read.
    """
    job = read_flight_dumps(directory)
    verdict = flight_verdict(job)
    table, title = _last_calls(job), f"{directory.name}: {_heading(job)}"
    if page is not None:
        page.write_text(_page(title, job, verdict, table), encoding="utf-8")
    return "\n\n".join([title, *_paragraphs(job, verdict), as_text(table)])


def _heading(job: FlightJob) -> str:
    found, size = len(job.dumps), job.world_size
    return f"flight recorder dumps of {found if found < size else 'all'} of {size} ranks"


def _paragraphs(job: FlightJob, verdict: FlightVerdict) -> list[str]:
    lacking = list(job.unreadable.values())
    if job.missing:
        lacking.append(f"{ranks_text(job.missing)} left no dump")
    paragraphs = ["\n".join(lacking), verdict.conclusion, *(f.text for f in verdict.findings)]
    if not verdict.findings:
        paragraphs.append(NOTHING)
    return [text for text in paragraphs if text]


def _last_calls(job: FlightJob) -> TextTable:
    """Where each rank came to; of many ranks, those whose last call is the oldest."""
    last = [dump.calls[-1] for dump in job.dumps.values() if dump.calls]
    chosen = sorted(last, key=lambda call: call.created)[:MOST_RANKS]
    rows = [
        [
            str(call.rank),
            str(len(job.dumps[call.rank].calls)) + LOST * job.dumps[call.rank].wrapped,
            call.operation,
            "yes" if call.finished else "no",
            call.group.label,
            called_at(call),
        ]
        for call in sorted(chosen, key=lambda call: call.rank)
    ]
    title = "Last call of each rank"
    if len(last) > MOST_RANKS:
        title = f"Last call of the {MOST_RANKS} ranks that called least recently"
    return TextTable(title, ["rank", "calls", "last call", "finished", "in", "line"], rows, 1)


def _page(title: str, job: FlightJob, verdict: FlightVerdict, table: TextTable) -> str:
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [
        f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'
        for text in _paragraphs(job, verdict)
    ]
    return offline_html(title, f'<main class="run">{"".join(parts)}{table_html(table)}</main>')
