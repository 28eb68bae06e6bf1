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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from parallel101.laboratory.analysis.critical_path import CriticalPath, Segment
from parallel101.laboratory.analysis.critical_path import critical_path as path_of
from parallel101.laboratory.analysis.overlap import bookkeeping
from parallel101.laboratory.record.events import P2P, Event
from parallel101.laboratory.record.program_lines import named
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds, listed, round_step
from parallel101.laboratory.viz.scene import HATCHING, Node, Scene

LEFT, RIGHT, TOP = 92.0, 932.0, 112.0
MOST_RANKS, MOST_ARROWS, MOST_LANES, MOST_NUMBERS = 128, 160, 3, 32
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
    ".axis{stroke:var(--line)}.idle{fill:url(#hatching)}"
)
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


class Bar:
    """One bar of a row: an event, or several neighbouring events.

    These are too narrow to draw one by one.
    """

    __slots__ = ("count", "end", "event", "start")

    def __init__(self, event: Event):
        self.event, self.start, self.end, self.count = event, event.start, event.end, 1


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
    if n > MOST_RANKS:
        raise ValueError(
            f"the run has {n} ranks, and the timeline can show up to {MOST_RANKS}: use fewer, or "
            "write trace.to_chrome(path) and open it at ui.perfetto.dev"
        )
    begin = min((e.start for e in trace.events), default=0.0)
    span = max((e.end for e in trace.events), default=begin) - begin
    lanes = span_lanes(trace.spans())
    depth = max((lane + 1 for lane in lanes.values()), default=0)
    tall = 17.0 if n * max(depth, 1) <= 16 else 11.0 if n * max(depth, 1) <= 40 else 4.0
    thin, rim = (10.0, 1.0) if n <= 16 else (6.0, 0.0)  # of a lane of messages
    row = (
        depth * tall
        + thin
        + 14 * (critical_path and n <= 16)
        + (10 if n <= 16 else 4 if n <= 40 else 1)
    )
    path = path_of(trace) if critical_path else None
    notes = [JUMP] * bool(path and _jumps(path)) + notes_of(trace.events)
    scene = Scene(
        960,
        math.ceil(TOP + n * row + 44) + 18 * len(notes),
        title,
        f"{n} ranks on {trace.backend}, {human_seconds(span)}",
    )
    scene.style += STYLE + PATH_STYLE * critical_path
    scene.definitions.append(HATCHING)

    def x(t: float) -> float:
        return LEFT + (RIGHT - LEFT) * ((t - begin) / span if span else 0.0)

    def message_lane(rank: int) -> float:
        return TOP + rank * row + depth * tall + thin / 2

    _head(scene, trace, span)
    for rank in range(n):
        y = TOP + rank * row
        scene.rect(LEFT, y, RIGHT - LEFT, depth * tall + thin, "row")
        if rank % math.ceil(15 / row) == 0:
            scene.write(f"rank {rank}", LEFT - 10, y + (depth * tall + thin) / 2 + 4, 12, "m e")
    colours = span_colours(e for e in trace.spans() if not e.waiting)
    _legend(scene, trace, colours, path)
    drawn = scene.add("g", class_="dim") if path else scene
    for (rank, kind, lane), bars in _bars(
        trace.events, lanes, (RIGHT - LEFT) / span if span else 0.0
    ).items():
        y = TOP + rank * row
        if kind == "span":
            for bar in bars:
                draw_span(drawn, bar, x, y + lane * tall, tall, colours)
        else:
            low = {"send": 0.0, "recv": 0.5}.get(kind, 0.0)
            for bar in bars:
                height = (thin - 2 * rim) * (0.5 if kind in P2P else 1.0) - 0.4
                draw_bar(
                    drawn, bar, x, y + depth * tall + rim + low * (thin - 2 * rim), height, kind
                )
    _arrows(drawn, trace, x, message_lane)
    if path:
        _critical_path(scene, path, x, message_lane)
    time_axis(scene, span, TOP + n * row + 4, LEFT, RIGHT)
    draw_notes(scene, notes)
    return scene


def _head(scene: Scene, trace: Trace, span: float) -> None:
    scene.write(scene.title, 28, 40, None, "h")
    scene.write(f"{trace_facts(trace)} · {human_seconds(span)}", 932, 40, 13, "m e")
    sends = [e.nbytes for e in trace.events if e.kind == "send"]
    messages = len(sends)
    collectives = sum(1 for e in trace.events if e.kind not in P2P and e.kind != "span")
    parts = (
        [f"{messages} message{'s' if messages != 1 else ''}, {human_bytes(sum(sends))}"]
        if messages
        else []
    )
    parts += (
        [f"{collectives} collective call{'s' if collectives != 1 else ''}"] if collectives else []
    )
    parts += [f"{len(trace.unfinished)} unfinished"] if trace.unfinished else []
    scene.write(" · ".join(parts), 932, 64, 13, "m e")


def _legend(scene: Scene, trace: Trace, colours: dict[str, int], path: CriticalPath | None) -> None:
    kinds = {e.kind for e in trace.events}
    entries = span_entries(colours) + [("wait", "idle")] * any(e.waiting for e in trace.spans())
    entries += [
        (label, kind) for kind, label in (("send", "send"), ("recv", "receive")) if kind in kinds
    ]
    others = sorted(kinds - P2P - {"span"})
    entries += (
        [(listed(others) if len(others) <= 2 else "collective", "collective")] if others else []
    )
    x = 28.0
    below = "messages and collectives below" if colours else "Messages and collectives"
    parts = ["Compute on top"] * bool(colours) + [below] * bool(kinds - {"span"})
    sentence = (
        ", ".join(parts) + ". Hover over a bar for details."
        if entries
        else unfinished_text(trace) or "Nothing was recorded."
    )
    if path:
        sentence = f"On the critical path: {path}."
        scene.path(f"M{x} 85h14", "path")
        scene.write("critical path", x + 20, 89, 12.5, "m")
        x += 38 + 7 * len("critical path")
    scene.write(sentence, 28, 64, 14, "m")
    scene.intro = sentence
    draw_legend(scene, entries, x)


def draw_legend(scene: Node, entries: Iterable[tuple[str, str]], x: float = 28.0) -> None:
    """Draw a row of coloured boxes, each with its label, from `x` on.

    Entries that do not fit into the picture's width are left out, and "…" says so.
    """
    for label, class_ in entries:
        if x + 20 + 7 * len(label) > 932:
            scene.write("…", x, 89, 12.5, "m")
            break
        outline = "stroke:var(--line)" if class_ == "idle" else None
        scene.rect(x, 80, 14, 10, class_, rx=2, style=outline)
        scene.write(label, x + 20, 89, 12.5, "m")
        x += 38 + 7 * len(label)


def trace_facts(trace: Trace, whole_run: bool = False) -> str:
    """ "4 ranks · gloo · as recorded", and which events of the run the trace has if not all.

    `whole_run`: a picture shows the whole run all the same.
    """
    clock = "virtual time" if trace.backend == "sim" else "as recorded"
    kept = f" · {trace.kept_text}" if trace.earlier and not whole_run else ""
    ranks = f"{trace.world_size} rank{'s' if trace.world_size != 1 else ''}"
    return f"{ranks} · {trace.backend} · {clock}{kept}"


def unfinished_text(trace: Trace) -> str:
    """What had not ended when the run was over, in a sentence. "" if nothing."""
    kinds = Counter(
        {"send": "send", "recv": "receive"}.get(e.kind, e.kind) for e in trace.unfinished
    )
    if not kinds:
        return ""
    calls = listed(
        f"{count} {kind}{'s' if count > 1 and kind in ('send', 'receive') else ''}"
        for kind, count in sorted(kinds.items())
    )
    first = min(trace.unfinished, key=lambda e: (e.posted, e.rank))
    return (
        f"{calls} had not finished when the run ended; the first was posted by rank {first.rank} "
        f"at {named(first.where)}."
    )


def span_lanes(spans: Sequence[Event]) -> dict[int, int]:
    """The lane of each span, by the span's id(): a span inside another one is a lane below it.

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
    """A colour for each name.

    It is the one in SPAN_COLOURS, or else the next free one in order of appearance.
    """
    names = list(dict.fromkeys(e.name or "span" for e in spans))
    taken = {SPAN_COLOURS[name] for name in names if name in SPAN_COLOURS}
    free = [c for c in (3, 4, 5, 6, 7, 0, 1, 2) if c not in taken] or list(range(8))
    others = [name for name in names if name not in SPAN_COLOURS]
    return {
        name: SPAN_COLOURS[name] if name in SPAN_COLOURS else free[others.index(name) % len(free)]
        for name in names
    }


def span_entries(colours: dict[str, int], most: int = 6) -> list[tuple[str, str]]:
    """The legend of spans as (name, class): each colour once, under the first name that has it."""
    first = {colour: name for name, colour in reversed(colours.items())}
    return [(name, f"f{colour}") for name, colour in colours.items() if first[colour] == name][
        :most
    ]


def _bars(
    events: Iterable[Event], lanes: dict[int, int], scale: float
) -> dict[tuple[int, str, int], list[Bar]]:
    """The bars of each (rank, kind, lane).

    Neighbouring events of one name that are narrower than a pixel share a bar.
    """
    rows: dict[tuple[int, str, int], list[Bar]] = defaultdict(list)
    for event in events:
        bars = rows[event.rank, event.kind, lanes.get(id(event), 0)]
        last = bars[-1] if bars else None
        small = (event.end - event.start) * scale < 1
        alike = (
            last is not None
            and last.event.name == event.name
            and (last.end - last.start) * scale < 2
        )
        if last is not None and alike and small and (event.start - last.end) * scale < 0.5:
            last.end, last.count = max(last.end, event.end), last.count + 1
        else:
            bars.append(Bar(event))
    return rows


def draw_bar(
    scene: Node, bar: Bar, x: Callable[[float], float], y: float, height: float, kind: str
) -> Node:
    class_ = kind if kind in P2P or kind.startswith("f") or kind == "idle" else "collective"
    width = max(0.8, x(bar.end) - x(bar.start) - 0.6)
    rect = scene.rect(x(bar.start), y, width, height, class_, rx=1.5 if width > 3 else 0)
    rect.add("title", _tooltip(bar))
    return rect


def draw_span(
    scene: Node,
    bar: Bar,
    x: Callable[[float], float],
    y: float,
    height: float,
    colours: dict[str, int],
) -> None:
    """A span with its name and its first label, or what fits of them.

    One in which the rank waits is hatched, if it waits at all.
    """
    if bar.event.waiting and bar.end == bar.start:
        return
    event, width, middle = bar.event, x(bar.end) - x(bar.start), (x(bar.start) + x(bar.end)) / 2
    text = (
        next((t for t in span_texts(event) if 6.6 * len(t) + 6 < width), None)
        if height >= 11 and bar.count == 1
        else None
    )
    if event.waiting:
        scene.rect(x(bar.start), y + 0.5, max(0.8, width - 0.6), height - 1, "card")
        draw_bar(scene, bar, x, y + 0.5, height - 1, "idle")
        if text:
            halo = "stroke:var(--bg);stroke-width:3;paint-order:stroke"
            scene.write(text, middle, y + height / 2 + 3.6, 10.5, "m c", style=halo)
        return
    colour = colours[event.name or "span"]
    draw_bar(scene, bar, x, y + 0.5, height - 1, f"f{colour}")
    if text:
        scene.write(text, middle, y + height / 2 + 3.8, 10.5, f"c o{colour}")


def span_texts(event: Event) -> list[str]:
    """What may be written in a span's bar, the longest first.

    For example "forward, microbatch 3", "microbatch 3", "3".
    """
    name = event.name or "span"
    if not event.args or event.waiting:
        return [name]
    key, value = next(iter(event.args.items()))
    short = f"{key} {value}" if str(value).isdigit() else str(value)
    return [f"{name} {value}" if key in name else f"{name}, {short}", short, str(value)]


def notes_of(events: Sequence[Event]) -> list[str]:
    """The sentences below the picture: what the numbers in the bars are, and small messages."""
    numbered: dict[str, list[str]] = defaultdict(list)
    for event in events:
        key, value = next(iter((event.args or {}).items()), ("", ""))
        if (
            event.kind == "span"
            and not event.waiting
            and str(value).isdigit()
            and event.name not in numbered[key]
        ):
            numbered[key].append(event.name or "span")
    parts = [f"{key} ({', '.join(names)})" for key, names in numbered.items() if names]
    notes = [f"A number in a bar is its {' or its '.join(parts)}."] if parts else []
    small = [e.nbytes for e in bookkeeping(events) if e.kind == "send"]
    if small:
        size = (
            human_bytes(min(small))
            if min(small) == max(small)
            else f"{human_bytes(min(small))} to {human_bytes(max(small))}"
        )
        names = {e.name for e in events if e.waiting}
        told = ["the number of samples, the loss and errors"] * ("agree" in names)
        told += ["lengths"] * ("lengths" in names)
        notes.append(f"Small messages ({size}): the ranks agree on {listed(told)}.")
    return notes


def draw_notes(scene: Scene, notes: Sequence[str]) -> None:
    """The notes, at the bottom of a scene that has 18 pixels for each."""
    scene.intro = " ".join([scene.intro, *notes])
    for k, note in enumerate(notes):
        scene.write(note, 28, scene.height - 14 - 18 * (len(notes) - 1 - k), 12, "m")


def _tooltip(bar: Bar) -> str:
    event = bar.event
    last = f"{human_seconds(bar.end - bar.start)}"
    if bar.count > 1:
        return f"{bar.count} × {event.name or event.kind}, {last}"
    return event_text(event, last)


def event_text(event: Event, took: str = "$") -> str:
    """What a tooltip says of one event. `took`: its time, or what to put in its place."""
    labels = ", ".join(f"{k}={v}" for k, v in (event.args or {}).items())
    where = f" at {named(event.where)}" if event.where else ""
    if event.kind == "span":
        return f"{event.name}{f' ({labels})' if labels else ''}: {took}{where}"
    link = {"send": "to", "recv": "from"}.get(event.kind, "root")
    peer = f" {link} rank {event.peer}" if event.peer is not None else ""
    return f"{event.kind}{peer}: {human_bytes(event.nbytes)}, {took}{where}"


def _arrows(
    scene: Node, trace: Trace, x: Callable[[float], float], y: Callable[[int], float]
) -> None:
    """Draw a line for each message, from its start at the sender to its end at the receiver.

    This needs few enough messages to follow.
    """
    messages = trace.messages()
    if len(messages) <= MOST_ARROWS:
        path = "".join(
            f"M{x(m.start):.1f} {y(m.src):.1f}L{x(m.end):.1f} {y(m.dst):.1f}"
            for m in messages
            if m.src != m.dst
        )
        if path:
            scene.path(path, "arrow")


def last_rank(segment: Segment) -> int:
    """The rank at which a segment of a critical path ends."""
    return segment.rank if segment.peer is None else segment.peer


def _jumps(path: CriticalPath) -> list[tuple[Segment, Segment]]:
    """Where a path continues at another rank.

    There a message waited for its receiver, or for a link that the one before it used.
    """
    return [(a, b) for a, b in zip(path.segments, path.segments[1:]) if last_rank(a) != b.rank]


def _critical_path(
    scene: Scene, path: CriticalPath, x: Callable[[float], float], y: Callable[[int], float]
) -> None:
    """The path as one line: along a row for compute, from row to row for a message.

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
    for k, (_, (x0, y0), (x1, y1)) in enumerate(
        messages if len(messages) <= MOST_NUMBERS else [], start=1
    ):
        scene.add("circle", cx=(x0 + x1) / 2, cy=(y0 + y1) / 2, r=8, class_="number")
        scene.write(k, (x0 + x1) / 2, (y0 + y1) / 2 + 3.8, 10.5, "b c")


def time_axis(scene: Scene, span: float, y: float, left: float, right: float) -> None:
    """A time axis from 0 to `span` seconds with round ticks, from x = left to x = right."""
    scene.path(f"M{left} {y:.1f}H{right}", "axis")
    step = round_step(span, 8)
    for k in range(int(span / step + 1e-9) + 1 if span > 0 else 1):
        at = left + (right - left) * (k * step / span if span else 0.0)
        scene.path(f"M{at:.1f} {y:.1f}v5", "axis")
        scene.write(human_seconds(k * step) if k else "0", at, y + 19, 11, "m c")
