"""Draws compute and communication lanes: what each rank computes, above its messages.

All ranks have one time axis.

    rank 0  ▇▇ forward ▇▇▇▇ backward ▇▇▇▇▇▇/////▇ optimizer ▇     hatched: idle
                                  ▬▬▬▬▬  ▬▬▬▬▬▬▬▬▬                sends and receives

Messages under a coloured bar overlap with compute and cost no time. Messages under a hatched bar
cost time. Spans (`p101.span`) are the compute; the numbers are computed in
`laboratory.analysis.overlap`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from parallel101.laboratory.analysis.overlap import (
    TimeBreakdown,
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
)
from parallel101.laboratory.viz.scene import END, Scene, check_ranks

RIGHT, TOP = 812.0, 116.0
# heights: a lane of spans, a lane of messages, the gap between ranks, the name of a window
TALL, THIN, GAP, HEAD = 18.0, 5.0, 14.0, 30.0
MOST_RANKS, MOST_SPAN_LANES, MOST_MESSAGE_LANES = 16, 2, 4
SENTENCE = (
    "Top: what a rank computes. Bottom: its messages in flight. Hatched: it computes nothing and "
    "waits."
)


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
    n = trace.world_size
    check_ranks(n, MOST_RANKS, "use run.timeline(), which draws up to 128")
    windows = time_windows(trace, within)
    longest = max(window.end - window.begin for window in windows)
    events = [e for window in windows for e in window.events]
    # of the spans and of the messages of each window
    lanes = [span_lanes([e for e in of.events if e.kind == "span"]) for of in windows]
    flows = [message_lanes(window.events) for window in windows]
    depth = min(MOST_SPAN_LANES, 1 + max((lane for of in lanes for lane in of.values()), default=0))
    thick = max((lane + 1 for of in flows for lane in of.values()), default=0) * 2 * THIN
    row = depth * TALL + thick + GAP
    high = n * row + (HEAD if within else 0.0)
    notes = notes_of(events)
    if bookkeeping(events):
        notes[-1] += " Overlap doesn't count them."
    height = math.ceil(TOP + len(windows) * high + 40) + 18 * len(notes)
    scene = Scene(960, height, title, " ".join(window_text(window, n) for window in windows))
    colours = span_colours(e for e in events if e.kind == "span" and not e.waiting)
    rows = TimeRows(scene, 0.0, longest, right=RIGHT, colours=colours)
    took = "" if within else f" · {human_seconds(longest)}"  # panels have their own
    scene.head(trace_facts(trace) + took, SENTENCE)
    scene.legend(dict.fromkeys([*legend_entries(trace.events, colours), ("wait", "idle")]))
    scene.write("overlap", END, 89, 12, "m e")
    for i, window in enumerate(windows):
        top = TOP + i * high
        if within:
            scene.write(window.name, LEFT, top + 15, 15, "b")
            scene.write(human_seconds(window.end - window.begin), RIGHT, top + 15, 13, "m e")
        panel = TimeRows(scene, window.begin, longest, right=RIGHT, colours=colours)
        for rank in range(n):  # its spans, over what no span covers, and below them its messages
            y = top + (HEAD - 6 if within else 0) + rank * row
            here = [e for e in window.events if e.rank == rank]
            idle = Bar(window.begin, window.end, "idle", "", 0.5, TALL - 1)
            panel.rank(rank, y + 13)
            panel.draw([idle, *panel.bars(here, lanes[i], depth, TALL, THIN, flows[i])], y)
            _overlap(scene, time_breakdown(window, rank), here, y)
    rows.axis(TOP + len(windows) * high)
    rows.notes(notes)
    return scene


def window_text(window: TimeWindow, ranks: int) -> str:
    """Return the numbers of a window, for the picture's alternative text."""
    of = [time_breakdown(window, rank) for rank in range(ranks)]
    shares = (f"{b.overlap / b.communication:.0%}" if b.communication else "none" for b in of)
    overlap = ", ".join(shares)
    compute = ", ".join(human_seconds(b.compute) for b in of)
    name, took = window.name or "Whole record", human_seconds(window.end - window.begin)
    return (
        f"{name}: {took}. Compute by rank: {compute}. Communication that overlaps with compute: "
        f"{overlap}."
    )


def message_lanes(events: Iterable[Event]) -> dict[int, int]:
    """Return the lane of each message, by its id().

    It is the first free lane of its rank and direction, or else the last lane.
    """
    free: dict[tuple[int, bool], list[float]] = {}
    lanes = {}
    for event in (e for e in events if e.kind != "span"):
        ends = free.setdefault((event.rank, event.kind == "recv"), [])
        lane = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        lane = min(lane, MOST_MESSAGE_LANES - 1)
        ends[lane : lane + 1] = [event.end]
        lanes[id(event)] = lane
    return lanes


def _overlap(scene: Scene, breakdown: TimeBreakdown, events: list[Event], y: float) -> None:
    """Write at the right of a rank which part of its communication overlapped.

    Below are the bytes that it sent, or the number of collectives that it called.
    """
    if breakdown.communication:
        sent = sum(e.nbytes for e in events if e.kind == "send")
        collectives = sum(e.kind not in P2P and e.kind != "span" for e in events)
        told = f"{human_bytes(sent)} sent"
        if collectives and not sent:
            told = f"{collectives} collective{'s' * (collectives > 1)}"
        scene.write(f"{breakdown.overlap / breakdown.communication:.0%}", END, y + 15, 17, "b e")
        scene.write(told, END, y + 31, 11.5, "m e")
