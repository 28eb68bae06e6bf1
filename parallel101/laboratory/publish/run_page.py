"""The page of a run, in one HTML file that works offline.

It has the run's timeline, who waited for whom, its traffic and its tables.

parallel101 run --page trace.html train.py          parallel101 merge DIR --page trace.html
"""

from __future__ import annotations

from html import escape

from parallel101.laboratory.analysis.run_window import window
from parallel101.laboratory.analysis.traffic import traffic
from parallel101.laboratory.analysis.training_steps import training_steps
from parallel101.laboratory.analysis.waiting import (
    Wait,
    late_for,
    rank_times,
    waits,
    with_compute,
)
from parallel101.laboratory.publish.offline_page import offline_html
from parallel101.laboratory.publish.step_chooser import step_chooser
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds
from parallel101.laboratory.viz import between_ranks, timeline
from parallel101.laboratory.viz.between_ranks import Square, between_ranks_scene
from parallel101.laboratory.viz.run_table import TextTable, heading, tables
from parallel101.laboratory.viz.scene import Scene
from parallel101.laboratory.viz.timeline import timeline_scene

MOST_EVENTS = 4000  # in a timeline


def run_page(
    trace: Trace,
    name: str,
    error: BaseException | None = None,
    steps: tuple[int, int] | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        trace: the record of `parallel101 run`, or of one of a failed run.
        name: of the script.
        error: what the run failed with.
        steps: the first and the last of the steps that a reader can choose; None: the last ones.

    Raises ValueError if the record lacks these steps.
    """
    waited = waits(trace)
    parts = [f"<h1>{escape(name)}</h1>", f"<p>{escape(heading(trace))}</p>"]
    if error is not None:
        parts.append(f'<div class="output_area output_error"><pre>{escape(str(error))}</pre></div>')
    if isinstance(error, DeadlockError):
        parts.append(error.picture().html())
    parts += _timelines(trace, waited, steps)
    squares = _squares(trace, waited)
    if squares and trace.world_size <= between_ranks.MOST_RANKS:
        parts.append(between_ranks_scene("Between the ranks", squares).html())
    parts += [table_html(table) for table in tables(trace, waited)]
    return offline_html(name, f'<main class="run">{"".join(parts)}</main>')


def _timelines(trace: Trace, waited: list[Wait], steps: tuple[int, int] | None) -> list[str]:
    """Return pictures of the whole run, or of a long run's steps and its longest wait.

    A wait that can be seen in the whole run is left out, and so are those of the run's first half.
    """
    if trace.world_size > timeline.MOST_RANKS or not trace.events:
        return []
    drawn = with_compute(trace)
    if len(drawn.events) <= MOST_EVENTS and not trace.earlier and steps is None:
        shown = [timeline_scene(drawn).html()]
    else:
        shown = [step_chooser(drawn, training_steps(trace), steps)]
    if (longest := _around_longest_wait(drawn, waited)) is not None:
        shown.append(longest.html())
    return shown


def _around_longest_wait(drawn: Trace, waited: list[Wait]) -> Scene | None:
    """Return a timeline around the longest wait in the later half of all waits."""
    longest = max(waited[len(waited) // 2 :], key=lambda wait: wait.end - wait.start, default=None)
    if longest is None:
        return None
    took, middle = longest.end - longest.start, (longest.start + longest.end) / 2
    for times in (8.0, 4.0, 2.0, 1.5):
        part = window(drawn, middle - times * took / 2, middle + times * took / 2)
        if len(part.events) <= MOST_EVENTS:
            break
    if times * took > drawn.makespan / 2 or len(part.events) > MOST_EVENTS:
        return None
    since = human_seconds(longest.start - min(event.start for event in drawn.events))
    title = f"The longest wait of the later half: rank {longest.rank} in {longest.kind}, "
    title += f"{human_seconds(took)}, from {since} on"
    return timeline_scene(part, title=title)


def _squares(trace: Trace, waited: list[Wait]) -> list[Square]:
    late, sent = late_for(rank_times(trace, waited)), traffic(trace).nbytes
    kept = ", last events" if trace.earlier else ""
    squares = [
        Square(f"Waiting until others call{kept}", "rank \\ for", late, human_seconds),
        Square("Messages, in bytes", "from \\ to", sent, human_bytes),
    ]
    return [square for square in squares if any(map(any, square.values))]


def table_html(table: TextTable) -> str:
    """Return the table with its title as HTML."""

    def row(cells: list[str], tag: str) -> str:
        kinds = [' class="number"' * (k < table.numbers) for k in range(len(cells))]
        html = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds))
        return f"<tr>{''.join(html)}</tr>"

    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    body = "".join(row(cells, "td") for cells in table.rows)
    head = row(table.head, "th")
    html = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    return f"<h2>{escape(table.title)}</h2>{html}{note}"
