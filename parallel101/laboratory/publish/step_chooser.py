"""The part of a long run's page in which a reader chooses steps, and sees their timeline.

    time of each step  ▁▁▂▁▁▁▁▁▇▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁      click, or drag over some
    steps [ 120 ] to [ 124 ]  ‹ › slowest               rank 0  ▇▇▇▇▇▇░░▇▇▇▇▇▇░░
                                                        rank 1  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇

The page holds the events as compressed numbers, and chooser.js draws those of the chosen steps with
the looks of viz/timeline.py. So the page opens at once, however long the run was: the browser
unpacks at most MOST_EVENTS, and draws no more than a screen can show.
"""

from __future__ import annotations

import base64
import gzip
from array import array
from html import escape
from importlib.resources import files

from parallel101.laboratory.analysis.run_window import window
from parallel101.laboratory.analysis.training_steps import TrainingSteps
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_seconds
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
from parallel101.laboratory.viz.scene import HATCHING, script_json

MOST_EVENTS = 200_000  # in a page
PARTS = 200  # of a run in which no steps are found
MESSAGES = MOST_LANES  # the number of the lane below those of the spans
SCRIPT = files("parallel101.laboratory.publish").joinpath("chooser.js").read_text(encoding="utf-8")


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
    known = steps or _parts(min(e.start for e in events), max(e.end for e in events))
    if chosen is not None:
        known = _only(known, chosen)
        begin, end = known.times[0][0], max(stop for _, stop in known.times)
        events = window(drawn, begin, end).events
        if len(events) > MOST_EVENTS:
            too_many = f"steps {chosen[0]}:{chosen[1]} have {len(events):,} events"
            raise ValueError(f"{too_many}, and a page can hold {MOST_EVENTS:,}: choose fewer steps")
    elif len(events) > MOST_EVENTS:
        after = sorted(e.end for e in events)[-MOST_EVENTS]
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
        f'<script type="text/plain">{data}</script></section><script>{SCRIPT}</script>'
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


def _parts(begin: float, end: float) -> TrainingSteps:
    width = (end - begin) / PARTS
    edges = [begin + k * width for k in range(PARTS + 1)]
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
