"""Draws the timeline: one row for each rank, with its compute on top and its communication below.

    rank 0  ▇▇forward▇▇        ▇▇backward▇▇      spans
              ▬▬send▬▬ ╲                         sends, receives, collectives
    rank 1             ╲▬▬recv▬▬

Each message has an arrow, if there are few; or the critical path is drawn. The times are those of
the record: on gloo and NCCL, a receive lasts from the call until its data has arrived, so it
includes the wait. How much communication overlaps with compute is in lanes.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from parallel101.laboratory.analysis.critical_path import CriticalPath, Segment
from parallel101.laboratory.analysis.critical_path import critical_path as path_of
from parallel101.laboratory.record.events import P2P, Event
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds
from parallel101.laboratory.viz.rows import (
    LEFT,
    RIGHT,
    TimeRows,
    legend_entries,
    notes_of,
    span_colours,
    span_lanes,
    trace_facts,
    unfinished_text,
)
from parallel101.laboratory.viz.scene import Scene, check_ranks

TOP = 112.0
MOST_RANKS, MOST_ARROWS, MOST_NUMBERS = 128, 160, 32
JUMP = (
    "Dotted: the next message waited for its receiver, or for a link that the message before it "
    "used."
)
PATH_STYLE = (
    ".dim>:not(text,.arrow){opacity:.3}.dim>.arrow{opacity:.15}.dim>text{fill:var(--ink)}"
    ".path{stroke:var(--warn);stroke-width:3;fill:none;stroke-linejoin:round;stroke-linecap:round}"
    ".under{stroke:var(--bg);stroke-width:7;fill:none}"
    ".hop{stroke:var(--warn);stroke-width:1.5;stroke-dasharray:2 3;fill:none}"
    ".number{fill:var(--bg);stroke:var(--warn);stroke-width:1.5}"
)


def timeline_scene(trace: Trace, title: str = "Timeline", *, critical_path: bool = False) -> Scene:
    """Draw a run's record over time.

    Args:
        trace: the record of any run. Spans (`p101.span`), messages and collectives are drawn.
        title: above the picture.
        critical_path: draw the chain of messages and compute that ends last, and say what is on
            it. The rest is faded.

    Returns:
        A still Scene. A bar's tooltip gives its details and the line of source that made the call.

    Raises:
        ValueError: more than 128 ranks (ui.perfetto.dev can show more: see `trace.to_chrome`).
    """
    n = trace.world_size
    instead = "use fewer, or write trace.to_chrome(path) and open it at ui.perfetto.dev"
    check_ranks(n, MOST_RANKS, instead)
    begin = min((e.start for e in trace.events), default=0.0)
    span = max((e.end for e in trace.events), default=begin) - begin
    lanes = span_lanes(trace.spans())
    depth = max((lane + 1 for lane in lanes.values()), default=0)
    tall = 17.0 if n * max(depth, 1) <= 16 else 11.0 if n * max(depth, 1) <= 40 else 4.0
    thin = 5.0 if n <= 16 else 3.0  # of a lane of messages
    between = 10 if n <= 16 else 4 if n <= 40 else 1
    row = depth * tall + 2 * thin + between + 14 * (critical_path and n <= 16)
    path = path_of(trace) if critical_path else None
    notes = [JUMP] * bool(path and _jumps(path)) + notes_of(trace.events)
    height = math.ceil(TOP + n * row + 44) + 18 * len(notes)
    scene = Scene(960, height, title, f"{n} ranks on {trace.backend}, {human_seconds(span)}")
    colours = span_colours(e for e in trace.spans() if not e.waiting)
    rows = TimeRows(scene, begin, span, colours=colours)
    scene.style += PATH_STYLE * critical_path

    def message_lane(rank: int) -> float:
        return TOP + rank * row + depth * tall + thin

    _head(rows, trace, path)
    tops = [TOP + rank * row for rank in range(n)]
    for rank, y in enumerate(tops):
        scene.rect(LEFT, y, RIGHT - LEFT, depth * tall + 2 * thin, "row")
        if rank % math.ceil(15 / row) == 0:
            rows.rank(rank, y + depth * tall / 2 + thin + 4, 12)
    drawn = scene.add("g", class_="dim") if path else scene
    of_rank: dict[int, list[Event]] = defaultdict(list)
    for event in trace.events:
        of_rank[event.rank].append(event)
    for rank, events in of_rank.items():
        bars = rows.together(rows.bars(events, lanes, depth, tall, thin))
        rows.draw(bars, tops[rank], drawn)
    # each message from its start at the sender to its end at the receiver, if few enough to follow
    x, messages = rows.x, trace.messages()
    arrows = "".join(
        f"M{x(m.start):.1f} {message_lane(m.src):.1f}L{x(m.end):.1f} {message_lane(m.dst):.1f}"
        for m in messages
        if m.src != m.dst
    )
    if arrows and len(messages) <= MOST_ARROWS:
        drawn.path(arrows, "arrow")
    if path:
        _critical_path(scene, path, rows.x, message_lane)
    rows.axis(TOP + n * row + 4)
    rows.notes(notes)
    return scene


def _head(rows: TimeRows, trace: Trace, path: CriticalPath | None) -> None:
    """Draw the title, how much was sent, and the legend."""
    scene, kinds = rows.scene, {e.kind for e in trace.events}
    others = sorted(kinds - P2P - {"span"})
    entries = legend_entries(trace.events, rows.colours)
    below = "messages and collectives below" if rows.colours else "Messages and collectives"
    parts = ["Compute on top"] * bool(rows.colours) + [below] * bool(kinds - {"span"})
    if path:
        sentence = f"On the critical path: {path}."
    elif entries:
        sentence = ", ".join(parts) + ". Hover over a bar for details."
    else:
        sentence = unfinished_text(trace) or "Nothing was recorded."
    scene.head(f"{trace_facts(trace)} · {human_seconds(rows.duration)}", sentence)
    sends = [e.nbytes for e in trace.events if e.kind == "send"]
    calls = sum(e.kind in others for e in trace.events)
    messages = f"{len(sends)} message{'s' * (len(sends) != 1)}, {human_bytes(sum(sends))}"
    counts = [messages] * bool(sends)
    counts += [f"{calls} collective call{'s' * (calls != 1)}"] * bool(calls)
    counts += [f"{len(trace.unfinished)} unfinished"] * bool(trace.unfinished)
    scene.write(" · ".join(counts), RIGHT, 64, 13, "m e")
    if path:
        scene.path("M28.0 85h14", "path")
        scene.write("critical path", 48.0, 89, 12.5, "m")
    scene.legend(entries, x=28.0 + (38 + 7 * len("critical path")) * bool(path))


def last_rank(segment: Segment) -> int:
    """Return the rank at which a segment of a critical path ends."""
    return segment.rank if segment.peer is None else segment.peer


def _jumps(path: CriticalPath) -> list[tuple[Segment, Segment]]:
    """Return the pairs of segments between which the path continues at another rank.

    At such a place, a message waited for its receiver, or for a link that the message before it
    used.
    """
    return [(a, b) for a, b in zip(path.segments, path.segments[1:]) if last_rank(a) != b.rank]


def _critical_path(
    scene: Scene, path: CriticalPath, x: Callable[[float], float], y: Callable[[int], float]
) -> None:
    """Draw the path as one line: along a row for compute, from row to row for a message.

    The messages are numbered if they are few.
    """
    lines = [(s, (x(s.start), y(s.rank)), (x(s.end), y(last_rank(s)))) for s in path.segments]
    for before, after in _jumps(path):
        scene.path(f"M{x(before.end):.1f} {y(last_rank(before)):.1f}V{y(after.rank):.1f}", "hop")
    for class_ in ("under", "path"):
        for segment, (x0, y0), (x1, y1) in lines:
            line = scene.path(f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}", class_)
            if class_ == "path":
                line.add("title", f"{segment.label}: {human_seconds(segment.end - segment.start)}")
    messages = [line for line in lines if line[0].kind == "message"]
    if len(messages) > MOST_NUMBERS:
        return
    for k, (_, (x0, y0), (x1, y1)) in enumerate(messages, start=1):
        scene.add("circle", cx=(x0 + x1) / 2, cy=(y0 + y1) / 2, r=8, class_="number")
        scene.write(k, (x0 + x1) / 2, (y0 + y1) / 2 + 3.8, 10.5, "b c")
