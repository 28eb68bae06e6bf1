"""Draws a pipeline over time: one row for each rank, the microbatch in each box, bubbles hatched.

    1F1B     makespan 33 · bubble rate 27.3 %
    rank 0  [0][1][2][3]//////////[0  ][4][1  ]...      ■■■■ 4      activations held at most
    rank 1     [0][1][2]///////[0  ][3][1  ]...         ■■■  3

Several pipelines on one time axis can be compared. A schedule is drawn from `schedule(…).time(…)`,
where nothing has run; a run from its record. What the times mean is computed in
`laboratory.analysis.pipeline_times`. Every rank's messages and other spans are in timeline.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from parallel101.laboratory.analysis.overlap import union
from parallel101.laboratory.analysis.pipeline_times import (
    PipelineTimes,
    Planned,
    planned_times,
    recorded_times,
)
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_seconds, round_step
from parallel101.laboratory.viz.palette import CHUNK
from parallel101.laboratory.viz.rows import LEFT, Bar, TimeRows
from parallel101.laboratory.viz.scene import Scene, Stop, check_drawn

RIGHT, TOP = 790.0, 108.0
# where the squares for activations are; their number is at the right of them
HELD, HELD_END = 812.0, 900.0
HEAD, BETWEEN = 26.0, 16.0
# seconds of the animation: before the cursor starts, for the longest panel, and at the end
LEAD, SWEEP, TAIL = 0.3, 11.0, 1.0
# of a number in a box; 9 is almost 5 points on paper, where a picture is 180 mm wide
LARGEST, SMALLEST = 13.0, 9.0
MOST_ROWS, MOST_MESSAGES, MOST_SQUARES = 96, 400, 60
CLASSES = {"F": "f0", "B": "f1 both", "I": "f1", "W": "f2"}
SHADES = (1.0, 0.5, 0.33, 0.2)  # of the boxes of a rank's first stage, second and so on
NAMES = {
    "F": "forward",
    "B": "backward (both gradients)",
    "I": "input gradient",
    "W": "weight gradient",
}
STYLE = (
    ".both{fill:url(#both)}.off{stroke:var(--faint)}.sent{stroke:var(--ink);stroke-width:1;fill:none;opacity:.45}"
    ".most{fill:none;stroke:var(--line)}.veil{fill:var(--bg);fill-opacity:.86;pointer-events:none}"
)
# a whole backward has a stripe at its bottom, in the colour of its weight gradient
BOTH = (
    '<linearGradient id="both" x2="0" y2="1">'
    f'<stop offset=".78" stop-color="{CHUNK[1]}"/><stop offset=".78" stop-color="{CHUNK[2]}"/>'
    "</linearGradient>"
)
Source = Planned | Trace


def pipeline_scene(
    source: Source | Mapping[str, Source], *within: str, title: str = "Pipeline"
) -> Scene:
    """Draw what each rank of a pipeline computes, and when.

    Args:
        source: what `schedule(…).time(…)` returned; or the record of a run that trained with a
            pipeline; or several of these by name, drawn one below the other on one time axis. Times
            of schedules have the unit of the costs, and times of runs are seconds.
        within: with one record: names of spans. Each gives a panel with the last span of that name.
        title: of the picture.

    Returns:
        A Scene: at first and at the end the whole picture; as it plays, a cursor moves through it.
        At the right of each rank are the activations that it holds at most; as it plays, those that
        it holds.

    Raises:
        ValueError: a record has no pipeline, or there are more than 96 rows.
    """
    if isinstance(source, Trace) and within:
        drawn = {name: recorded_times(source, name) for name in within}
    elif within:
        raise ValueError(
            f"within={', '.join(map(repr, within))}: names of spans choose parts of one record; "
            "pass run.trace with them"
        )
    else:
        drawn = {
            name: recorded_times(of) if isinstance(of, Trace) else planned_times(of)
            for name, of in (source if isinstance(source, Mapping) else {"": source}).items()
        }
    if seconds := any(times.recorded for times in drawn.values()):  # one time axis, so one unit
        drawn = {name: times._replace(recorded=True) for name, times in drawn.items()}
    count = sum(len(times.ranks) for times in drawn.values())
    words = f"{len(drawn)} pipelines have {count} ranks together"
    check_drawn(count, MOST_ROWS, words, " rows")
    row = 26.0 if count <= 24 else 20.0 if count <= 48 else 13.0
    longest = max(times.makespan for times in drawn.values())
    high = math.ceil(TOP + count * row + len(drawn) * (HEAD + BETWEEN) + 34)
    scene = Scene(960, high, title, " ".join(panel_text(*panel) for panel in drawn.items()))
    rows = TimeRows(scene, 0.0, longest, right=RIGHT, text=("b", LARGEST, SMALLEST))
    chunks = max(len(times.stages(rank)) for times in drawn.values() for rank in times.ranks)
    scene.definitions.append(BOTH)
    scene.style += STYLE
    scene.style += "".join(f".k{k}{{fill-opacity:{SHADES[min(k, 3)]}}}" for k in range(1, chunks))
    common = {facts(times) for times in drawn.values()}
    _head(scene, drawn, chunks, common.copy().pop() if len(common) == 1 else "")
    y, most = TOP, max(times.peak(rank) for times in drawn.values() for rank in times.ranks)
    for name, times in drawn.items():
        scene.write(name, LEFT, y + 13, 15, "b")
        more = f"{facts(times)} · " * (len(common) > 1)
        scene.write(more + panel_facts(times), RIGHT, y + 13, 13, "m e")
        _panel(rows, times, y + HEAD - 4, row, most)
        _cursor(rows, times.makespan, y + HEAD - 4, len(times.ranks) * row - 2)
        y += HEAD + len(times.ranks) * row + BETWEEN
    rows.axis(y, lambda time: duration(time, seconds), most=10)
    scene.write("time", HELD, y + 19, 11, "m")
    _stops(scene, drawn, longest)
    return scene


def panel_facts(times: PipelineTimes) -> str:
    """Return the facts of a panel: "makespan 33 · bubble rate 27.3 %"."""
    makespan = duration(times.makespan, times.recorded)
    return f"makespan {makespan} · bubble rate {100 * times.bubble_rate:.1f} %"


def panel_text(name: str, times: PipelineTimes) -> str:
    """Return the numbers of a panel, for the picture's alternative text."""
    held = ", ".join(str(times.peak(rank)) for rank in times.ranks)
    told = f"{name or 'Pipeline'}: {facts(times)}, {panel_facts(times)}."
    return f"{told} Activations held at most, by rank: {held}."


def facts(times: PipelineTimes) -> str:
    """Return the size of a pipeline: "4 ranks · 8 stages · 8 microbatches"."""
    ranks, stages = len(times.ranks), len({slot.stage for slot in times.slots})
    parts = [f"{ranks} rank{'s' * (ranks > 1)}"]
    parts += [f"{stages} stage{'s' * (stages > 1)}"] * (stages != ranks)
    parts.append(f"{times.microbatches} microbatch{'es' * (times.microbatches > 1)}")
    return " · ".join(parts)


def duration(time: float, recorded: bool) -> str:
    """Return the seconds of a run with their unit, or the time of a schedule as a number."""
    return human_seconds(time) if recorded else f"{time:.0f}" if time >= 1000 else f"{time:.4g}"


def _head(scene: Scene, panels: Mapping[str, PipelineTimes], chunks: int, common: str) -> None:
    """Draw the title and the legend. `chunks`: the most stages of a rank."""
    sentence = "What each rank computes; the number is the microbatch."
    sentence += " Faded: its second stage." * (chunks == 2)
    sentence += " The more faded, the later its stage." * (chunks > 2)
    if any(times.bubbles(rank) for times in panels.values() for rank in times.ranks):
        sentence += " Hatched: it waits (bubble)."
    scene.head(common, sentence)
    kinds = {slot.kind for times in panels.values() for slot in times.slots}
    messages = any(0 < len(times.messages) <= MOST_MESSAGES for times in panels.values())
    if messages:
        scene.path("M29 79l12 12", "sent")
        scene.write("message", 48, 89, 12.5, "m")
    entries = [(name, CLASSES[kind]) for kind, name in NAMES.items() if kind in kinds]
    scene.legend(entries, x=28.0 + 87 * messages)
    scene.write("activations held at most", 932, 89, 12, "m e")


def _panel(rows: TimeRows, times: PipelineTimes, top: float, row: float, most: int) -> None:
    """Draw a row for each rank, and the messages between them, if they are few enough.

    At its right are the activations that a rank holds at most, as a number and as squares, in as
    few lines as lets them be large. As the picture plays, those held at that time are filled.
    """
    scene, x, tall = rows.scene, rows.x, row - 2
    columns = [-(-max(most, 1) // n) for n in range(1, 6)]  # of n lines
    sizes = (min(11.0, tall / n, (HELD_END - HELD) / c) for n, c in enumerate(columns, 1))
    pitch, across = max(zip(sizes, columns))
    place = {rank: top + i * row for i, rank in enumerate(times.ranks)}
    named = any(times.stages(rank) != [rank] for rank in times.ranks)
    for rank, y in place.items():
        first, last = times.extent(rank)
        middle = f"{y + tall / 2:.1f}H"
        before, after = f"M{LEFT} {middle}{x(first):.1f}", f"M{x(last):.1f} {middle}"
        scene.path(f"{before}{after}{x(times.makespan):.1f}", "off")
        if named and tall >= 20:
            rows.rank(rank, y + tall / 2 - 1, 12)
            text = stages_text(times.stages(rank))
            scene.write(text, LEFT - 10, y + tall / 2 + 10, 10, "m e")
        else:
            rows.rank(rank, y + tall / 2 + 4, min(12.5, tall))
        rows.draw(_bars(times, rank, tall), y)
        peak = times.peak(rank)
        scene.write(peak, 932, y + tall / 2 + 5, min(15, tall), "b e")
        if not 0 < most <= MOST_SQUARES:
            continue
        deep, played = -(-peak // across), (LEAD + SWEEP, LEAD + SWEEP + TAIL + 1)
        steps = [(playing(rows, time), count) for time, count in times.held(rank)]
        ends = [*(t for t, _ in steps[1:]), math.inf]
        for i in range(peak):
            line, column = divmod(i, across)
            corner = HELD + column * pitch, y + tall / 2 + (line - deep / 2) * pitch
            scene.rect(*corner, pitch - 2.2, pitch - 2.2, "most")
            # of the steps in which it is held; the cursor ends before the picture does
            spans = [(t, end) for (t, n), end in zip(steps, ends) if n > i and end > t]
            filled = union((t, min(end, LEAD + SWEEP)) for t, end in spans)
            square = scene.rect(*corner, pitch - 2.2, pitch - 2.2, "f0 held")
            square.show((0.0, LEAD), *filled, played)
    lines = ""
    for src, dst, start, end in times.messages:  # from rim to rim
        low = (tall - 3, 3) if place[dst] > place[src] else (3, tall - 3)
        lines += f"M{x(start):.1f} {place[src] + low[0]:.1f}L{x(end):.1f} {place[dst] + low[1]:.1f}"
    if 0 < len(times.messages) <= MOST_MESSAGES:
        scene.path(lines, "sent").add("title", "messages between stages")


def stages_text(stages: Sequence[int]) -> str:
    """Return the stages of a rank: "stages 0, 4"; "0, 4, 8, 12"; "0, 4, … 28"."""
    listed = ", ".join(map(str, stages))
    if len(listed) <= 6:
        return f"stage{'s' * (len(stages) > 1)} {listed}"
    return listed if len(listed) <= 14 else f"{stages[0]}, {stages[1]}, … {stages[-1]}"


def _bars(times: PipelineTimes, rank: int, tall: float) -> Iterator[Bar]:
    """Yield the bars of a rank's actions, and then its bubbles."""
    stages = times.stages(rank)
    for slot in times.of(rank):
        chunk, high = stages.index(slot.stage), tall / slot.parts
        name = f"{NAMES[slot.kind].partition(' (')[0]} of microbatch {slot.microbatch}"
        together = ", together with another action" * (slot.parts > 1)
        took = duration(slot.end - slot.start, times.recorded)
        title, texts = f"stage {slot.stage}, {name}: {took}{together}", [slot.microbatch]
        class_ = CLASSES[slot.kind] + (f" k{chunk}" if chunk else "")
        yield Bar(slot.start, slot.end, class_, title, high * slot.part, high, texts)
    for start, end in times.bubbles(rank):
        title = f"rank {rank} waits: {duration(end - start, times.recorded)}"
        yield Bar(start, end, "idle", title, 0.0, tall)


def playing(rows: TimeRows, time: float) -> float:
    """Return the second of the animation at which the cursor is at a time."""
    return LEAD + SWEEP * (rows.x(time) - LEFT) / (RIGHT - LEFT)


def _cursor(rows: TimeRows, makespan: float, y: float, tall: float) -> None:
    """Draw a line that moves through a panel, and a veil over what comes after it."""
    scene, end = rows.scene, playing(rows, makespan)
    name = f"panel{len(scene.definitions)}"
    area = f'x="{LEFT - 1}" y="{y - 1:.1f}" width="{rows.x(makespan) - LEFT + 2:.1f}"'
    area = f'<rect {area} height="{tall + 2:.1f}"/>'
    scene.definitions.append(f'<clipPath id="{name}">{area}</clipPath>')
    clipped = scene.add("g", clip_path=f"url(#{name})")
    veil = clipped.rect(0, y - 1, RIGHT - LEFT + 2, tall + 2, "veil")
    veil.key("translate", (LEAD, (LEFT, 0.0)), (end, (rows.x(makespan), 0.0))).show((LEAD, end))
    cursor = rows.cursor(scene, [(LEAD, 0.0), (end, makespan)], y - 3, y + tall + 3)
    cursor.show((LEAD, LEAD + SWEEP))


def _stops(scene: Scene, panels: Mapping[str, PipelineTimes], longest: float) -> None:
    """Add stops at the ticks of the axis. Each says how many ranks compute then."""
    scene.duration, begin, step = LEAD + SWEEP + TAIL, LEAD, round_step(longest, 10)
    scene.intro = f"The whole picture. {scene.intro}"
    for k in range(1, int(longest / step - 1e-9) + 1 if longest else 1):
        time, told = k * step, []
        for name, times in panels.items():
            busy = {slot.rank for slot in times.slots if slot.start < time <= slot.end}
            waits = {r for r, of in times.waits.items() if any(a < time <= b for a, b in of)}
            words = f"{len(busy - waits)} of {len(times.ranks)} ranks compute"
            told.append(f"{name}: {words}" if name else words)
            recorded = times.recorded
        end = LEAD + SWEEP * time / longest
        scene.stops.append(Stop(begin, end, f"At {duration(time, recorded)}: {'; '.join(told)}."))
        begin = end
    scene.stops.append(Stop(begin, scene.duration, "The whole picture."))
