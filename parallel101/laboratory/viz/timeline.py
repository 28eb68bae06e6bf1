"""Draws one row for each rank, with its compute on top and its communication below.

    rank 0  ▇▇ forward ▇▇▇▇ backward ▇▇▇▇▇▇/////▇ optimizer ▇     spans; hatched: idle
              ▬▬send▬▬ ╲                                          sends, receives, collectives
    rank 1             ╲▬▬recv▬▬

`timeline_scene` draws any record. Each message has an arrow, if there are few; or the critical path
is drawn. `lanes_scene` draws a record whose compute is in spans: messages under a coloured bar
overlap with compute and cost no time, those under a hatched bar cost time.

The times are those of the record: on gloo and NCCL, a receive lasts from the call until its data
has arrived, so it includes the wait. `laboratory.analysis` computes overlap and critical path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from parallel101.laboratory.analysis.critical_path import CriticalPath, Segment
from parallel101.laboratory.analysis.critical_path import critical_path as path_of
from parallel101.laboratory.analysis.overlap import (
    TimeWindow,
    bookkeeping,
    time_breakdown,
    time_windows,
)
from parallel101.laboratory.record.events import P2P, Event
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds
from parallel101.laboratory.viz.rows import (
    LEFT,
    Bar,
    TimeRows,
    legend_entries,
    notes_of,
    span_colours,
    span_lanes,
    trace_facts,
    unfinished_text,
)
from parallel101.laboratory.viz.scene import END, TO_CHROME, Scene, check_ranks

TOP, HEAD = 112.0, 30.0  # of the first row; the height of a panel's name
BESIDE = 812.0  # the right end of the rows if numbers are beside them
MOST_RANKS, FEW_RANKS, MOST_LANES, MOST_ARROWS, MOST_NUMBERS = 128, 16, 4, 160, 32
JUMP = (
    "Dotted: the next message waited for its receiver, or for a link that the message before it "
    "used."
)
SENTENCE = (
    "Top: what a rank computes. Bottom: its messages in flight. Hatched: it computes nothing and "
    "waits."
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
    check_ranks(trace.world_size, MOST_RANKS, TO_CHROME)
    return _scene(trace, time_windows(trace), title, path_of(trace) if critical_path else None)


def lanes_scene(trace: Trace, *within: str, title: str = "Compute and communication") -> Scene:
    """Draw what the ranks computed and what they had in flight, so that the overlap can be seen.

    Args:
        trace: the record of a run whose compute is in spans, as the trainers' is.
        within: names of spans. Each gives a panel that shows the last span of that name on each
            rank; all panels have the same scale. None: the whole record.

    Returns:
        A still Scene. At the right of each rank: which part of its communication overlapped with
        compute.

    Raises:
        ValueError: more than 16 ranks, or a name that no span has.
    """
    check_ranks(trace.world_size, FEW_RANKS, "use run.timeline(), which draws up to 128")
    return _scene(trace, time_windows(trace, within), title, overlap=True)


def _scene(
    trace: Trace,
    windows: Sequence[TimeWindow],
    title: str,
    path: CriticalPath | None = None,
    overlap: bool = False,
) -> Scene:
    """Draw a panel for each window. `overlap`: hatch idle times, and write what overlaps."""
    n, events = trace.world_size, [e for window in windows for e in window.events]
    spans = [span_lanes([e for e in of.events if e.kind == "span"]) for of in windows]
    flows = [message_lanes(of.events, MOST_LANES if n <= FEW_RANKS else 1) for of in windows]
    depth = max([int(overlap), *(lane + 1 for of in spans for lane in of.values())])
    depth = min(depth, 2) if overlap else depth
    flying = max([int(not overlap), *(lane + 1 for of in flows for lane in of.values())])
    # of a lane of spans, a lane of messages, all lanes of a rank, and from rank to rank
    tall = 18.0 if n * depth <= 32 else 11.0 if n * depth <= 64 else 4.0
    thin = 5.0 if n <= FEW_RANKS else 3.0
    thick = depth * tall + 2 * thin * flying
    row = thick + (14 if n <= FEW_RANKS else 4 if n <= 40 else 1) + 10 * bool(path)
    longest = max(window.end - window.begin for window in windows)
    head = HEAD if windows[0].name else 0.0
    high = head + n * row
    notes = [JUMP] * bool(path and _jumps(path)) + notes_of(events)
    if overlap and bookkeeping(events):
        notes[-1] += " Overlap doesn't count them."
    words = f"{n} ranks on {trace.backend}, {human_seconds(longest)}"
    if overlap:
        words = " ".join(window_text(window, n) for window in windows)
    scene = Scene(960, math.ceil(TOP + len(windows) * high + 44) + 18 * len(notes), title, words)
    scene.style += PATH_STYLE * bool(path)
    colours = span_colours(e for e in events if e.kind == "span" and not e.waiting)
    right = BESIDE if overlap else END
    entries = legend_entries(events, colours)
    below = "messages and collectives below" if colours else "Messages and collectives"
    parts = ["Compute on top"] * bool(colours) + [below] * any(e.kind != "span" for e in events)
    if overlap:
        entries, sentence = list(dict.fromkeys([*entries, ("wait", "idle")])), SENTENCE
        scene.write("overlap", END, 89, 12, "m e")
    elif path:
        sentence = f"On the critical path: {path}."
        scene.path("M28.0 85h14", "path")
        scene.write("critical path", 48.0, 89, 12.5, "m")
    elif entries:
        sentence = ", ".join(parts) + ". Hover over a bar for details."
    else:
        sentence = unfinished_text(trace) or "Nothing was recorded."
    took = f" · {human_seconds(longest)}" * (not head)
    scene.head(trace_facts(trace) + took, sentence)
    scene.legend(entries, x=28.0 + (38 + 7 * len("critical path")) * bool(path))
    if not overlap:
        scene.write(_counts(trace, events), END, 64, 13, "m e")
    ground = scene.add("g")
    drawn = scene.add("g", class_="dim") if path else scene
    for i, window in enumerate(windows):
        rows = TimeRows(scene, window.begin, longest, right=right, colours=colours)
        top = TOP + i * high + head
        if window.name:
            scene.write(window.name, LEFT, top - 9, 15, "b")
            scene.write(human_seconds(window.end - window.begin), right, top - 9, 13, "m e")
        of_rank: dict[int, list[Event]] = {rank: [] for rank in range(n)}
        for event in window.events:
            of_rank[event.rank].append(event)
        for rank, here in of_rank.items():
            y = top + rank * row
            ground.rect(LEFT, y, right - LEFT, thick, "row")
            if rank % math.ceil(15 / row) == 0:
                rows.rank(rank, y + depth * tall / 2 + thin + 4, 12)
            idle = [Bar(window.begin, window.end, "idle", "", 0.5, tall - 1)] * overlap
            bars = rows.bars(here, spans[i] | flows[i], depth, tall, thin)
            rows.draw([*idle, *rows.together(bars)], y, drawn)
            # at the right: which part overlapped, and the bytes sent or collectives called
            if overlap and (spent := time_breakdown(window, rank)).communication:
                sent = sum(e.nbytes for e in here if e.kind == "send")
                collectives = sum(e.kind not in {*P2P, "span"} for e in here)
                told = f"{human_bytes(sent)} sent"
                if collectives and not sent:
                    told = f"{collectives} collective{'s' * (collectives > 1)}"
                share = f"{spent.overlap / spent.communication:.0%}"
                scene.write(share, END, y + 15, 17, "b e")
                scene.write(told, END, y + 31, 11.5, "m e")
    if not head:  # the whole record
        ends = [TOP + rank * row + depth * tall + thin for rank in range(n)]
        arrows = "".join(
            f"M{rows.x(m.start):.1f} {ends[m.src]:.1f}L{rows.x(m.end):.1f} {ends[m.dst]:.1f}"
            for m in trace.messages()
            if m.src != m.dst
        )
        if 0 < arrows.count("M") <= MOST_ARROWS:
            drawn.path(arrows, "arrow")
        if path:
            _critical_path(scene, path, rows.x, ends)
    rows.axis(TOP + len(windows) * high + 4)
    rows.notes(notes)
    return scene


def _counts(trace: Trace, events: Sequence[Event]) -> str:
    """Return how many messages, collective calls and unfinished calls there are."""
    sends = [e.nbytes for e in events if e.kind == "send"]
    calls = sum(e.kind not in {*P2P, "span"} for e in events)
    messages = f"{len(sends)} message{'s' * (len(sends) != 1)}, {human_bytes(sum(sends))}"
    counts = [messages] * bool(sends)
    counts += [f"{calls} collective call{'s' * (calls != 1)}"] * bool(calls)
    counts += [f"{len(trace.unfinished)} unfinished"] * bool(trace.unfinished)
    return " · ".join(counts)


def window_text(window: TimeWindow, ranks: int) -> str:
    """Return the numbers of a window, for the picture's alternative text."""
    of = [time_breakdown(window, rank) for rank in range(ranks)]
    shares = (f"{b.overlap / b.communication:.0%}" if b.communication else "none" for b in of)
    compute = ", ".join(human_seconds(b.compute) for b in of)
    name, took = window.name or "Whole record", human_seconds(window.end - window.begin)
    overlap = f"Communication that overlaps with compute: {', '.join(shares)}."
    return f"{name}: {took}. Compute by rank: {compute}. {overlap}"


def message_lanes(events: Iterable[Event], most: int) -> dict[int, int]:
    """Return the lane of each message, by its id().

    It is the first free lane of its rank and direction, or else the last lane.
    """
    free: dict[tuple[int, bool], list[float]] = {}
    lanes = {}
    for event in (e for e in events if e.kind != "span"):
        ends = free.setdefault((event.rank, event.kind == "recv"), [])
        lane = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        lane = min(lane, most - 1)
        ends[lane : lane + 1] = [event.end]
        lanes[id(event)] = lane
    return lanes


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
    scene: Scene, path: CriticalPath, x: Callable[[float], float], y: Sequence[float]
) -> None:
    """Draw the path as one line: along a row for compute, from row to row for a message.

    The messages are numbered if they are few.
    """
    lines = [(s, (x(s.start), y[s.rank]), (x(s.end), y[last_rank(s)])) for s in path.segments]
    for before, after in _jumps(path):
        scene.path(f"M{x(before.end):.1f} {y[last_rank(before)]:.1f}V{y[after.rank]:.1f}", "hop")
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
