"""The page of a run, in one HTML file that works offline.

It has the run's timeline, who waited for whom, its traffic and its tables.

    parallel101 run --page trace.html train.py          parallel101 merge DIR --page trace.html

On the page of a long run, a reader chooses steps, and sees their timeline:

    time of each step  ▁▁▂▁▁▁▁▁▇▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁      click, or drag over some
    steps [ 120 ] to [ 124 ]  ‹ › slowest               rank 0  ▇▇▇▇▇▇░░▇▇▇▇▇▇░░
                                                        rank 1  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇

The page holds the events as compressed numbers, and chooser.js draws those of the chosen steps with
the looks of viz/timeline.py. So the page opens at once, however long the run was: the browser
unpacks at most MOST_CHOSEN, and draws no more than a screen can show.
"""

from __future__ import annotations

import base64
import gzip
from array import array
from html import escape

from parallel101.laboratory.analysis.run_window import TrainingSteps, training_steps, window
from parallel101.laboratory.analysis.traffic import traffic
from parallel101.laboratory.analysis.waiting import (
    Wait,
    late_for,
    rank_times,
    waits,
    with_compute,
)
from parallel101.laboratory.publish.offline_page import file_text, offline_html
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds
from parallel101.laboratory.viz import between_ranks, timeline
from parallel101.laboratory.viz.between_ranks import Square, between_ranks_scene
from parallel101.laboratory.viz.palette import STYLE as PALETTE_STYLE
from parallel101.laboratory.viz.palette import variables
from parallel101.laboratory.viz.rows import (
    LEFT,
    MOST_LANES,
    RIGHT,
    STYLE,
    event_class,
    event_text,
    legend_entries,
    span_colours,
    span_lanes,
    span_texts,
)
from parallel101.laboratory.viz.run_table import TextTable, heading, tables
from parallel101.laboratory.viz.scene import HATCHING, Scene, script_json
from parallel101.laboratory.viz.timeline import timeline_scene

MOST_EVENTS = 4000  # in a timeline
MOST_CHOSEN = 200_000  # in all steps that can be chosen
PARTS = 200  # of a run in which no steps are found
MESSAGES = MOST_LANES  # the number of the lane below those of the spans


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


def step_chooser(
    drawn: Trace, steps: TrainingSteps | None, chosen: tuple[int, int] | None = None
) -> str:
    """Return the controls and the data, as HTML.

    Args:
        drawn: a record as pictures show it (see waiting.with_compute).
        steps: of the training loop. None: the run is cut into equal parts.
        chosen: the numbers of the first and the last step that the page has. None: as many of the
            last ones as it can hold.

    Raises ValueError if the record has none of the chosen steps, or if they have too many events.
    """
    events = drawn.events
    known = steps or _parts(drawn)
    if chosen is not None:
        known = _only(known, chosen)
        begin, end = known.times[0][0], max(stop for _, stop in known.times)
        events = window(drawn, begin, end).events
        if len(events) > MOST_CHOSEN:
            too_many = f"steps {chosen[0]}:{chosen[1]} have {len(events):,} events"
            raise ValueError(f"{too_many}, and a page can hold {MOST_CHOSEN:,}: choose fewer steps")
    elif len(events) > MOST_CHOSEN:
        after = sorted(e.end for e in events)[-MOST_CHOSEN]
        events = [e for e in events if e.start >= after]
        inside = [k for k, (start, _) in enumerate(known.times) if start >= after]
        if not inside:
            return ""
        known = known._replace(first=known.first + inside[0], times=known.times[inside[0] :])
    times, first = known.times, known.first
    begin = min([e.start for e in events] + [times[0][0]])
    end = max([e.end for e in events] + [times[-1][1]])
    tick = (end - begin) / (2**32 - 2) or 1.0
    texts: dict[str, int] = {}
    looks: dict[tuple, int] = {}
    lanes = span_lanes([e for e in events if e.kind == "span"])
    colours = span_colours(e for e in events if e.kind == "span" and not e.waiting)
    columns: list[array] = [array(kind) for kind in "IIHHIB"]
    for e in events:
        text = span_texts(e)[0] if e.kind == "span" else ""  # that may be written in a bar
        row = (
            round((e.start - begin) / tick),
            round((e.end - e.start) / tick),
            e.rank,
            looks.setdefault((event_class(e, colours), text), len(looks)),
            texts.setdefault(event_text(e), len(texts)),
            lanes.get(id(e), MESSAGES),
        )
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    columns += [array("d", (start for start, _ in times)), array("d", (stop for _, stop in times))]
    setup = {
        "ranks": drawn.world_size,
        "begin": begin,
        "tick": tick,
        "events": len(events),
        "first": first,
        "count": len(times),
        "unit": "step" if steps else "part",
        "looks": list(looks),
        "texts": list(texts),
        "lanes": 1 + max(lanes.values(), default=-1),
        "messages": MESSAGES,
        "left": LEFT,
        "right": RIGHT,
        "legend": legend_entries(events, colours),
        "hatching": HATCHING,
    }
    # the widest numbers first, so that each column begins at a multiple of its size
    ordered = sorted(columns, key=lambda column: -column.itemsize)
    data = base64.b64encode(gzip.compress(b"".join(c.tobytes() for c in ordered), 6)).decode()
    return (
        f'<style>{_style()}</style><section class="chooser" hidden><h2>Steps</h2>'
        f'<p>{escape(_about(known, len(events), drawn))}</p><div class="drawn"></div>'
        f'<script type="application/json">{script_json(setup)}</script>'
        f'<script type="text/plain">{data}</script></section>'
        f"<script>{file_text('tools/elements.js')}{file_text('chooser.js')}</script>"
    )


def _style() -> str:
    """Return the rules of the pictures for the SVG of the chooser only."""
    rules = [rule for rule in (PALETTE_STYLE + STYLE).split("}") if rule]
    within = "".join(f".chooser svg {rule}}}" for rule in rules)
    light, dark = (f".chooser{{{variables(theme)}}}" for theme in ("light", "dark"))
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}{within}"


def _only(known: TrainingSteps, chosen: tuple[int, int]) -> TrainingSteps:
    last = known.first + len(known.times) - 1
    begin, end = max(chosen[0], known.first), min(chosen[1], last)
    if begin > end:
        there = f"which has steps {known.first} to {last}"
        raise ValueError(f"steps {chosen[0]}:{chosen[1]} are not in the record, {there}")
    times = known.times[begin - known.first : end - known.first + 1]
    return known._replace(first=begin, times=times)


def _parts(drawn: Trace) -> TrainingSteps:
    begin, end = min(e.start for e in drawn.events), max(e.end for e in drawn.events)
    edges = [begin + k * (end - begin) / PARTS for k in range(PARTS + 1)]
    return TrainingSteps("", 1, list(zip(edges, edges[1:])))


def _about(known: TrainingSteps, events: int, drawn: Trace) -> str:
    last = known.first + len(known.times) - 1
    if not known.what:
        each = human_seconds(known.times[0][1] - known.times[0][0])
        return f"No steps were found in this record. It is cut into parts of {each} each."
    if events < len(drawn.events):
        others = "The page can't hold all events of the record. For other steps, use --steps."
    elif drawn.earlier:
        others = f"The record has {drawn.kept_text} only."
    else:
        return f"{last:,} steps ({known.what}). Choose some to see their timeline."
    return f"Steps {known.first:,} to {last:,} can be chosen here ({known.what}). {others}"
