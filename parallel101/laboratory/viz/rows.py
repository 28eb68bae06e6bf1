"""The engine of pictures with rows over time: a time scale, rows of bars, a legend, an axis.

    rows = TimeRows(scene, begin, span, colours=span_colours(events))
    rows.rank(0, y=130)
    rows.draw(rows.bars(trace.events, span_lanes(trace.spans()), depth=1, tall=17, thin=5), y=112)
    rows.axis(y=300)

A picture is data: of each row, its bars, each from when to when, of which class, with which texts.
It decides which events become bars, and how low and tall they are in their row. Rows of compute and
messages are in timeline.py, those of the axes of a mesh in axis_timeline.py, those of
pipelines in pipeline_timeline.py, and calls that wait for each other in matrix.py.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

from parallel101.laboratory.analysis.overlap import bookkeeping
from parallel101.laboratory.record.events import P2P, Event
from parallel101.laboratory.record.program_lines import named
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds, listed, round_step
from parallel101.laboratory.viz.scene import END, Node, Scene

LEFT, RIGHT = 92.0, END  # of the rows
MOST_LANES = 3
SPAN_COLOURS = {
    "forward": 0,
    "layer forward": 0,
    "backward": 1,
    "layer backward": 1,
    "input gradient": 1,
    "weight gradient": 2,
    "gradient ready": 3,
    "optimizer": 5,
    "compute": 4,
}
STYLE = (
    ".send{fill:var(--accent)}.recv{fill:var(--mute)}.collective{fill:var(--ink)}"
    ".row{fill:var(--faint)}.arrow{stroke:var(--ink);stroke-width:1;fill:none;opacity:.45}"
    ".axis{stroke:var(--line)}.ground{fill:var(--bg)}.idle{fill:url(#hatching)}.now{stroke:var(--ink);stroke-width:2;"
    "vector-effect:non-scaling-stroke}"
)
HALO = "stroke:var(--bg);stroke-width:3;paint-order:stroke"


class Bar(NamedTuple):
    """A bar of a row, or a part of one.

    Attributes:
        class_: f0 to f7 are a chunk's colours, here "f0 k1" of another shade; "idle" is hatched.
        title: its tooltip.
        low, tall: pixels below the row's top, and its height.
        texts: that may be written in it, the longest first.
        name: of what it shows.
    """

    start: float
    end: float
    class_: str
    title: str
    low: float
    tall: float
    texts: Sequence[object] = ()
    name: str = ""


@dataclass
class TimeRows:
    """Rows over time in a scene, from x = `left` to x = `right`.

    Attributes:
        begin, duration: of the rows, in seconds.
        colours: of the spans, by name.
        text: of the texts in bars: their class, and the largest and the smallest size.
        least: pixels of a bar's width.
    """

    scene: Scene
    begin: float
    duration: float
    left: float = LEFT
    right: float = RIGHT
    colours: dict[str, int] = field(default_factory=dict)
    text: tuple[str, float, float] = ("", 10.5, 10.5)
    least: float = 0.8

    def __post_init__(self) -> None:
        if STYLE not in self.scene.style:
            self.scene.style += STYLE

    def x(self, t: float) -> float:
        """Return the x coordinate of a time."""
        part = (t - self.begin) / self.duration if self.duration else 0.0
        return self.left + (self.right - self.left) * part

    def rank(self, rank: int, y: float, size: float = 12.5) -> None:
        """Write the name of a row, at its left."""
        self.scene.write(f"rank {rank}", self.left - 10, y, size, "m e")

    def axis(self, y: float, text: Callable[[float], str] = human_seconds, most: int = 8) -> None:
        """Draw the time axis, from 0 to the duration, with `most` round ticks or fewer."""
        self.scene.path(f"M{self.left} {y:.1f}H{self.right}", "axis")
        step = round_step(self.duration, most)
        for k in range(int(self.duration / step + 1e-9) + 1 if self.duration > 0 else 1):
            at = self.x(self.begin + k * step)
            self.scene.path(f"M{at:.1f} {y:.1f}v5", "axis")
            self.scene.write(text(k * step) if k else "0", at, y + 19, 11, "m c")

    def bars(
        self, events: Iterable[Event], lanes: dict[int, int], depth: int, tall: float, thin: float
    ) -> list[Bar]:
        """Return the bars of a rank: its spans in lanes, and below them its messages.

        Sends and receives alternate. A collective is as tall as both.

        Args:
            lanes: the lane of each span and of each message, by its id(); a message without one is
                in the first, and a span in a lane beyond `depth` isn't drawn.
            tall, thin: the height of a lane of spans, and of a lane of messages.
        """
        found = []
        for event in events:
            name, texts = event.name or event.kind, span_texts(event)
            lane = lanes.get(id(event), 0)
            if event.kind == "span":
                low, high = lane * tall + 0.5, tall - 1
                if lane >= depth:
                    continue
            else:
                low, texts = depth * tall + 1 + thin * (2 * lane + (event.kind == "recv")), []
                high = thin - 1 + thin * (event.kind not in P2P)
            title = event_text(event, human_seconds(event.end - event.start))
            class_ = event_class(event, self.colours)
            found.append(Bar(event.start, event.end, class_, title, low, high, texts, name))
        return found

    def together(self, bars: Iterable[Bar]) -> list[Bar]:
        """Return the bars of a row; neighbours of one name share one of up to two pixels."""
        widest, found = 2 * self.duration / (self.right - self.left), list[Bar]()
        counts: dict[tuple[float, str], tuple[int, int]] = {}  # where the latest is, of how many
        for bar in bars:
            at, count = counts.get((bar.low, bar.name), (-1, 0))
            end = max(bar.end, found[at].end) if count else math.inf
            if count and end - found[at].start < widest:
                start, count = found[at].start, count + 1
                title = f"{count} × {bar.name}, {human_seconds(end - start)}"
                found[at] = found[at]._replace(end=end, title=title, texts=())
            else:
                at, count = len(found), 1
                found.append(bar)
            counts[bar.low, bar.name] = at, count
        return found

    def draw(self, bars: Iterable[Bar], y: float, into: Node | None = None) -> None:
        """Draw the bars of a row whose top is y. Waits that take no time are left out."""
        panel, (weight, size, smallest) = into or self.scene, self.text
        for bar in bars:
            left, width = self.x(bar.start), self.x(bar.end) - self.x(bar.start)
            idle, gap = bar.class_ == "idle", 0.6 * (bar.class_ != "idle")
            place = left, y + bar.low, max(self.least, width - gap), bar.tall
            if idle and bar.end == bar.start:
                continue
            if idle:
                panel.rect(*place, "ground")
            panel.rect(*place, bar.class_, rx=1.5 if width > 3.6 else 0, title=bar.title)
            ink = "m" if idle else f"o{bar.class_[1]}" if " k" not in bar.class_ else ""
            look, halo = (f"{weight} {ink}", size, smallest), HALO if idle else None
            inside = left, y + bar.low - 0.5, width, bar.tall + 1
            any(panel.label(text, inside, *look, style=halo) for text in bar.texts)

    def cursor(
        self, panel: Node, frames: Iterable[tuple[float, float]], top: float, bottom: float
    ) -> Node:
        """Draw a line that moves: (second of the scene, time of the rows) pairs."""
        moves = [(second, (self.x(time), 0.0)) for second, time in frames]
        cursor = panel.path(f"M0 {top:.1f}V{bottom:.1f}", "now")
        return cursor.key("translate", *moves)

    def notes(self, notes: Sequence[str]) -> None:
        """Write sentences at the bottom of a scene that has 18 pixels for each."""
        self.scene.intro = " ".join([self.scene.intro, *notes])
        self.scene.lines(notes[::-1], 28, self.scene.height - 14, -18, 12, "m")


def event_class(event: Event, colours: dict[str, int]) -> str:
    """Return the class of an event's bar."""
    if event.kind != "span":
        return event.kind if event.kind in P2P else "collective"
    return "idle" if event.waiting else f"f{colours[event.name or 'span']}"


def trace_facts(trace: Trace, whole_run: bool = False) -> str:
    """Return "4 ranks · gloo · as recorded", and which of the run's events a partial trace has.

    `whole_run`: a picture shows the whole run all the same.
    """
    clock = "virtual time" if trace.backend == "sim" else "as recorded"
    kept = f" · {trace.kept_text}" if trace.earlier and not whole_run else ""
    ranks = f"{trace.world_size} rank{'s' if trace.world_size != 1 else ''}"
    return f"{ranks} · {trace.backend} · {clock}{kept}"


def unfinished_text(trace: Trace) -> str:
    """Return a sentence about calls that had not finished at the run's end, or "" if all had."""
    kinds = Counter({"recv": "receive"}.get(e.kind, e.kind) for e in trace.unfinished)
    if not kinds:
        return ""
    counted = sorted(kinds.items())
    calls = listed(f"{n} {k}{'s' * (n > 1 and k in ('send', 'receive'))}" for k, n in counted)
    first = min(trace.unfinished, key=lambda e: (e.posted, e.rank))
    by = f"rank {first.rank} at {named(first.where)}"
    return f"{calls} had not finished when the run ended; the first was posted by {by}."


def span_lanes(spans: Sequence[Event]) -> dict[int, int]:
    """Return the lane of each span, by the span's id().

    A span inside another one is a lane below it.

    (Events with labels can't be hashed.)
    """
    open_: dict[int, list[float]] = defaultdict(list)
    lanes = {}
    for event in sorted(spans, key=lambda e: (e.rank, e.start, -e.end)):
        ends = open_[event.rank]
        while ends and ends[-1] <= event.start:
            ends.pop()
        lanes[id(event)] = min(len(ends), MOST_LANES - 1)
        ends.append(event.end)
    return lanes


def span_colours(spans: Iterable[Event]) -> dict[str, int]:
    """Return a colour for each name.

    It is the one in SPAN_COLOURS, or else the next free one in order of appearance.
    """
    names = list(dict.fromkeys(e.name or "span" for e in spans))
    taken = {SPAN_COLOURS[name] for name in names if name in SPAN_COLOURS}
    free = cycle([c for c in (3, 4, 5, 6, 7, 0, 1, 2) if c not in taken] or range(8))
    return {n: SPAN_COLOURS[n] if n in SPAN_COLOURS else next(free) for n in names}


def legend_entries(
    events: Iterable[Event], colours: dict[str, int], most: int = 6
) -> list[tuple[str, str]]:
    """Return the legend as (name, class): up to `most` spans, waits, messages and collectives.

    Each colour of a span appears once, under the first name that has it.
    """
    first = {colour: name for name, colour in reversed(colours.items())}
    found = [(name, f"f{colour}") for name, colour in colours.items() if first[colour] == name]
    kinds = {("wait" if e.waiting else e.kind) for e in events}
    found = found[:most] + [("wait", "idle")] * ("wait" in kinds)
    found += [("send", "send")] * ("send" in kinds) + [("receive", "recv")] * ("recv" in kinds)
    others = sorted(kinds - P2P - {"span", "wait"})
    named = listed(others) if len(others) <= 2 else "collective"
    return found + [(named, "collective")] * bool(others)


def span_texts(event: Event) -> list[str]:
    """Return the texts that may be written in a span's bar, the longest first.

    For example "forward, microbatch 3", "microbatch 3", "3".
    """
    name = event.name or "span"
    if not event.args or event.waiting:
        return [name]
    key, value = next(iter(event.args.items()))
    short = f"{key} {value}" if str(value).isdigit() else str(value)
    return [f"{name} {value}" if key in name else f"{name}, {short}", short, str(value)]


def notes_of(events: Sequence[Event]) -> list[str]:
    """Return the sentences below the picture, about the numbers in bars and small messages."""
    numbered: dict[str, list[str]] = defaultdict(list)
    for event in events:
        key, value = next(iter((event.args or {}).items()), ("", ""))
        if event.kind == "span" and not event.waiting and str(value).isdigit():
            numbered[key].append(event.name or "span")
    parts = [f"{key} ({', '.join(dict.fromkeys(names))})" for key, names in numbered.items()]
    notes = [f"A number in a bar is its {' or its '.join(parts)}."] if parts else []
    small = [e.nbytes for e in bookkeeping(events) if e.kind == "send"]
    if small:
        size = " to ".join(dict.fromkeys(map(human_bytes, (min(small), max(small)))))
        names = {e.name for e in events if e.waiting}
        told = ["the number of samples, the loss and errors"] * ("agree" in names)
        told += ["lengths"] * ("lengths" in names)
        notes.append(f"Small messages ({size}): the ranks agree on {listed(told)}.")
    return notes


def event_text(event: Event, took: str = "$") -> str:
    """Return the tooltip of an event. `took`: its time, or what to put in its place."""
    labels = ", ".join(f"{k}={v}" for k, v in (event.args or {}).items())
    where = f" at {named(event.where)}" if event.where else ""
    if event.kind == "span":
        return f"{event.name}{f' ({labels})' if labels else ''}: {took}{where}"
    link = {"send": "to", "recv": "from"}.get(event.kind, "root")
    peer = f" {link} rank {event.peer}" if event.peer is not None else ""
    return f"{event.kind}{peer}: {human_bytes(event.nbytes)}, {took}{where}"
