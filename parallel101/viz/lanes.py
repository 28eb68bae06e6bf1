"""Compute and communication lanes: what each rank computes above, what it has under way below, on one time axis.

    rank 0  ▇▇ forward ▇▇▇▇ backward ▇▇▇▇▇▇/////▇ optimizer ▇     hatched: it computes nothing
                                  ▬▬▬▬▬  ▬▬▬▬▬▬▬▬▬                sent and received meanwhile

Bytes that move under a coloured bar cost no time; those under a hatched one do. Spans (`p101.span`) are the compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parallel101.record.trace import P2P, Event, Trace
from parallel101.record.units import human_bytes, human_seconds
from parallel101.viz.scene import HATCHING, Node, Scene
from parallel101.viz.timeline import STYLE, Bar, draw_bar, draw_span, span_colours, span_entries, span_lanes, time_axis

LEFT, RIGHT, TOP = 92.0, 812.0, 116.0
TALL, THIN, GAP, HEAD = 18.0, 5.0, 14.0, 30.0  #  heights: of a lane of spans, of one of messages, between ranks, of a panel's name
MOST_RANKS, MOST_SPAN_LANES, MOST_MESSAGE_LANES = 16, 2, 4
WAITS = ("wait", "synchronise", "agree", "gather weights")  #  a span whose name begins so is no compute: it lasts until something arrives

Interval = tuple[float, float]


class Panel(NamedTuple):
    """A piece of the record that has a time axis of its own length."""

    name: str
    begin: float
    end: float
    events: list[Event]  #  spans and messages inside it, cut to it


class Share(NamedTuple):
    """Seconds of one rank in one panel."""

    computing: float
    moving: float  #  with something under way
    hidden: float  #  both at once
    idle: float  #  neither computing nor done


def lanes_scene(trace: Trace, *within: str, title: str = "Compute and communication") -> Scene:
    """Draw what the ranks computed and what they had under way, so that their overlap is seen.

    Args:
        trace: of a run whose compute has spans; the trainers' has.
        within: names of spans, one panel each, above each other on one scale: what happened within the last span of that name on each
            rank. None: all of the record.

    Returns:
        A Scene that stands still. At the right of each rank: how much of the time in which something was under way was also computed in.

    Raises:
        ValueError: more than 16 ranks, or a name that no span has.
    """
    if trace.world_size > MOST_RANKS:
        raise ValueError(f"{trace.world_size} ranks are more than the {MOST_RANKS} rows that fit here; run.timeline() draws up to 128")
    panels = panels_of(trace, within)
    longest = max(panel.end - panel.begin for panel in panels)
    spans = {panel.name: [e for e in panel.events if e.kind == "span"] for panel in panels}
    depth = 1 + max((min(lane, MOST_SPAN_LANES - 1) for of in spans.values() for lane in span_lanes(of).values()), default=0)
    flows = {panel.name: message_lanes(panel.events) for panel in panels}
    thick = max((lane + 1 for of in flows.values() for lane in of.values()), default=0) * 2 * THIN
    row = depth * TALL + thick + GAP
    high = trace.world_size * row + (HEAD if within else 0.0)
    scene = Scene(960, math.ceil(TOP + len(panels) * high + 40), title, " ".join(in_words(panel, trace.world_size) for panel in panels))
    scene.style += STYLE + ".idle{fill:url(#hatching)}"
    scene.definitions.append(HATCHING)
    colours = span_colours(e for of in spans.values() for e in of if not is_wait(e))
    _head(scene, trace, colours)
    scale = (RIGHT - LEFT) / longest if longest else 0.0
    for i, panel in enumerate(panels):
        top = TOP + i * high
        if within:
            scene.add("text", panel.name, x=LEFT, y=top + 15, font_size=15, class_="b")
            scene.add("text", human_seconds(panel.end - panel.begin), x=RIGHT, y=top + 15, font_size=13, class_="m e")
        _panel(scene, panel, top + (HEAD - 6 if within else 0), row, depth, scale, colours, flows[panel.name], trace.world_size)
    time_axis(scene, longest, TOP + len(panels) * high, LEFT, RIGHT)
    return scene


def panels_of(trace: Trace, within: Sequence[str]) -> list[Panel]:
    """The pieces of the record that are asked for, each cut out for all ranks at once."""
    if not within:
        moments = [t for e in trace.events for t in (e.start, e.end)] or [0.0]
        return [Panel("", min(moments), max(moments), trace.events)]
    panels = []
    for name in within:
        last = {e.rank: e for e in trace.spans(name)}
        if not last:
            names = ", ".join(sorted({e.name or "" for e in trace.spans()})) or "none at all"
            raise ValueError(f"no span is called {name!r}; the record has {names}")
        begin, end = min(e.start for e in last.values()), max(e.end for e in last.values())
        inside = [
            e._replace(start=max(e.start, last[e.rank].start), end=min(e.end, last[e.rank].end))
            for e in trace.events
            if e.name not in within and e.rank in last and e.end > last[e.rank].start and e.start < last[e.rank].end
        ]
        panels.append(Panel(name, begin, end, inside))
    return panels


def shares(panel: Panel, rank: int) -> Share:
    """How a rank spent its time, from the record: unions of intervals, each moment counted once."""
    mine = [e for e in panel.events if e.rank == rank]
    working = union((e.start, e.end) for e in mine if e.kind == "span" and not is_wait(e))
    waiting = union((e.start, e.end) for e in mine if e.kind == "span" and is_wait(e))
    moving = union((e.start, e.end) for e in mine if e.kind != "span")
    computing = seconds(working) - seconds(both(working, waiting))
    hidden = seconds(both(moving, working)) - seconds(both(both(moving, working), waiting))
    return Share(computing, seconds(moving), hidden, panel.end - panel.begin - computing)


def in_words(panel: Panel, ranks: int) -> str:
    """What is seen at a glance, for those who cannot see it."""
    of = [shares(panel, rank) for rank in range(ranks)]
    hidden = ", ".join(f"{s.hidden / s.moving:.0%}" if s.moving else "none" for s in of)
    busy = ", ".join(human_seconds(s.computing) for s in of)
    took = human_seconds(panel.end - panel.begin)
    return f"{panel.name or 'All'}: {took}, computing by rank: {busy}; of its communication under compute: {hidden}."


def is_wait(event: Event) -> bool:
    return (event.name or "").startswith(WAITS)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def both(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in an interval of each."""
    b = list(b)
    return union((max(s, t), min(e, f)) for s, e in a for t, f in b if max(s, t) < min(e, f))


def seconds(intervals: Iterable[Interval]) -> float:
    return math.fsum(end - start for start, end in intervals)


def message_lanes(events: Iterable[Event]) -> dict[int, int]:
    """For each message (its id) a lane of its rank and direction that is free when it starts; the last lane takes all that finds none."""
    free: dict[tuple[int, bool], list[float]] = {}
    lanes = {}
    for event in (e for e in events if e.kind != "span"):
        ends = free.setdefault((event.rank, event.kind == "recv"), [])
        lane = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        lane = min(lane, MOST_MESSAGE_LANES - 1)
        ends[lane : lane + 1] = [event.end]
        lanes[id(event)] = lane
    return lanes


def _head(scene: Scene, trace: Trace, colours: dict[str, int]) -> None:
    scene.add("text", scene.title, x=28, y=40, class_="h")
    clock = "of virtual time" if trace.backend == "sim" else "as recorded"
    ranks = f"{trace.world_size} rank{'s' if trace.world_size != 1 else ''}"
    scene.add("text", f"{ranks} · {trace.backend} · {clock}", x=932, y=40, font_size=13, class_="m e")
    scene.add(
        "text",
        "Above what a rank computes, below what it has under way. Hatched: it computes nothing.",
        x=28,
        y=64,
        font_size=14,
        class_="m",
    )
    x, kinds = 28.0, {e.kind for e in trace.events}
    entries = [*span_entries(colours), ("waits", "idle")]
    entries += [(label, kind) for kind, label in (("send", "sends"), ("recv", "receives")) if kind in kinds]
    entries += [("collective", "together")] * bool(kinds - P2P - {"span"})
    for label, class_ in entries:
        scene.add("rect", x=x, y=80, width=14, height=10, rx=2, class_=class_, style="stroke:var(--line)" if class_ == "idle" else None)
        scene.add("text", label, x=x + 20, y=89, font_size=12.5, class_="m")
        x += 38 + 7 * len(label)
    scene.add("text", "under compute", x=932, y=89, font_size=12, class_="m e")


def _panel(
    scene: Scene, panel: Panel, top: float, row: float, depth: int, scale: float, colours: dict[str, int], flows: dict[int, int], ranks: int
) -> None:
    lanes = span_lanes([e for e in panel.events if e.kind == "span"])

    def x(t: float) -> float:
        return LEFT + (t - panel.begin) * scale

    for rank in range(ranks):
        y, here = top + rank * row, [e for e in panel.events if e.rank == rank]
        _hatched(scene, LEFT, y, x(panel.end) - LEFT)
        scene.add("text", f"rank {rank}", x=LEFT - 10, y=y + 13, font_size=12.5, class_="m e")
        for event in (e for e in here if e.kind == "span" and lanes[id(e)] < depth):
            lane = y + lanes[id(event)] * TALL
            if is_wait(event):
                rect = _hatched(scene, x(event.start), lane, max(0.8, x(event.end) - x(event.start)))
                rect.add("title", f"{event.name}: {human_seconds(event.end - event.start)}")
            else:
                draw_span(scene, Bar(event), x, lane, TALL, colours)
        for event in (e for e in here if e.kind != "span"):
            lane = y + depth * TALL + 1 + THIN * (2 * flows[id(event)] + (event.kind == "recv"))
            draw_bar(scene, Bar(event), x, lane, THIN - 1, event.kind)
        _share(scene, shares(panel, rank), sum(e.nbytes for e in here if e.kind == "send"), y)


def _hatched(scene: Scene, x: float, y: float, width: float) -> Node:
    scene.add("rect", x=x, y=y + 0.5, width=width, height=TALL - 1, class_="card")
    return scene.add("rect", x=x, y=y + 0.5, width=width, height=TALL - 1, class_="idle")


def _share(scene: Scene, share: Share, sent: int, y: float) -> None:
    if share.moving:
        scene.add("text", f"{share.hidden / share.moving:.0%}", x=932, y=y + 15, font_size=17, class_="b e")
        scene.add("text", f"{human_bytes(sent)} sent", x=932, y=y + 31, font_size=11.5, class_="m e")
