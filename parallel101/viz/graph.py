"""The left half of the collective view: ranks, the links between them, and messages as lettered tiles that slide along them.

A rank flashes when a message arrives, with a "+" if it adds the data to its own. The segmented ring counts the steps.
"""

from __future__ import annotations

import math

from parallel101.analysis.diagram import CENTRE
from parallel101.analysis.replay import History, Landing
from parallel101.record.units import human_bytes, labels
from parallel101.viz.scene import Node, Scene
from parallel101.viz.timing import Timing

MOST_TILES = 4  # chunks of one message that are drawn one by one
STYLE = (
    ".node{fill:var(--bg);stroke:var(--ink);stroke-width:1.5}.z{stroke-width:4;fill-opacity:.22}"
    ".zz{stroke:var(--accent);fill:var(--accent);stroke-width:4;fill-opacity:.18}"
    ".badge{fill:var(--ink)}.plus{stroke:var(--bg);stroke-width:2}.arc{fill:none;stroke-width:5}"
    ".k{stroke:var(--bg);stroke-width:2}.bad{stroke:var(--warn);stroke-width:3}.plain{fill:var(--accent)}"
    ".pack{fill:var(--bg);stroke:var(--ink);stroke-width:1.5}text.on{fill:var(--bg)}"
)
Point = tuple[float, float]


def draw_graph(scene: Scene, history: History, timing: Timing, phases: list[str]) -> None:
    """Add the ranks, their links, their messages and the ring of steps to the scene."""
    scene.style += STYLE
    panel = scene.panel(narrow="translate(18,-16)")
    _links(scene, panel, history)
    _step_ring(panel, history, timing, phases)
    _ranks(panel, history)
    _messages(panel, history, timing)


def _links(scene: Scene, panel: Node, history: History) -> None:
    layout = history.layout
    size = 6 if layout.node > 15 else 5
    scene.definitions.append(
        f'<marker id="tip" viewBox="0 0 8 8" refX="6.5" refY="4" markerWidth="{size}" markerHeight="{size}" orient="auto-start-reverse">'
        '<path d="M0 .5 8 4 0 7.5z" class="tip"/></marker>'
    )
    many = len(layout.links) > 60 or layout.node < 11
    for a, b in layout.links:
        back = (b, a) in layout.links
        if back and a > b:
            continue  # one line for both directions
        points = _path(history, a, b, margin=4.0)
        marks = {} if many else {"marker_end": "url(#tip)", "marker_start": "url(#tip)" if back else None}
        width = 1 if many else 1.5 if len(layout.links) > 24 else 2
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        panel.add("path", d=d, class_="link", stroke_width=width, **marks)


def _path(history: History, a: int, b: int, margin: float = 0.0) -> list[Point]:
    """From the rim of one rank to the rim of the other: a straight line, or an arc for a grid's wrap-around links."""
    layout = history.layout
    (x0, y0), (x1, y1) = layout.at[a], layout.at[b]
    reach = layout.node + margin
    if (a, b) not in layout.bent:
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        return [(x0 + ux * reach, y0 + uy * reach), (x1 - ux * reach, y1 - uy * reach)]
    bow = 2.3 * layout.node + 0.12 * math.hypot(x1 - x0, y1 - y0)  # arcs along a row bend upwards, arcs along a column to the right
    mx, my = ((x0 + x1) / 2, y0 - bow) if abs(y1 - y0) < 1 else (x0 + bow, (y0 + y1) / 2)
    curve = []
    for k in range(25):  # a quadratic Bézier curve
        u = k / 24
        a0, a1, a2 = (1 - u) ** 2, 2 * u * (1 - u), u * u
        curve.append((a0 * x0 + a1 * mx + a2 * x1, a0 * y0 + a1 * my + a2 * y1))
    return [p for p in curve if min(math.dist(p, (x0, y0)), math.dist(p, (x1, y1))) >= reach - 1]


def _ranks(panel: Node, history: History) -> None:
    layout = history.layout
    size = min(17.0, layout.node * 0.95)
    for rank in layout.order:
        x, y = layout.at[rank]
        panel.add("circle", cx=x, cy=y, r=layout.node, class_="node")
        if layout.node >= 7:
            panel.add("text", rank, x=x, y=y + size * 0.36, font_size=size, class_="b c")
    top = layout.root if layout.kind == "tree" else layout.order[0] if layout.kind in ("ring", "chain") else None
    if top is not None:
        panel.add("text", "rank", x=layout.at[top][0], y=layout.at[top][1] - layout.node - 7, font_size=12, class_="m c")


def _step_ring(panel: Node, history: History, timing: Timing, phases: list[str]) -> None:
    x, y, radius = history.layout.clock
    steps, central = history.steps, (x, y) == CENTRE
    big = radius / 66
    if not steps:
        return
    turn = 2 * math.pi / steps
    gap = 0.06 * turn if steps <= 30 else 0.0
    first = panel.add("g").show((0.0, timing.start(0)))
    first.add("text", "start", x=x, y=y + 4, font_size=15 if central else 12, class_="m c")
    for s in range(steps):
        a, b = s * turn + gap, (s + 1) * turn - gap
        if steps == 1:
            a, b = 0.05, 2 * math.pi - 0.05
        large = int(b - a > math.pi)
        d = (
            f"M{x + radius * math.sin(a):.1f} {y - radius * math.cos(a):.1f}"
            f"A{radius:.1f} {radius:.1f} 0 {large} 1 {x + radius * math.sin(b):.1f} {y - radius * math.cos(b):.1f}"
        )
        panel.add("path", d=d, class_="arc", style="stroke:var(--faint)")
        colour = "ink" if history.adds(s) else "accent"
        panel.add("path", d=d, class_="arc", style=f"stroke:var(--{colour})").show((timing.start(s), timing.duration + 1))
        text = panel.add("g").show((timing.start(s), timing.start(s + 1)))
        text.add("text", "step", x=x, y=y - 29 * big, font_size=12 if central else 11, class_="m c")
        text.add("text", s + 1, x=x, y=y + 10 * big + (0 if central else 3), font_size=max(22.0, 40 * big), font_weight=650, class_="c")
        if phases[s]:
            text.add("text", phases[s], x=x, y=y + 29 if central else y + radius + 18, font_size=12.5 if central else 12, class_="b c")


def _messages(panel: Node, history: History, timing: Timing) -> None:
    """The tiles of each step, and the flashes of the ranks where they arrive."""
    for step in range(history.steps):
        indices = history.in_step(step)
        tiles = panel.add("g").show((timing.start(step), timing.arrival(step)))
        flashes = panel.add("g").show((timing.arrival(step), timing.start(step + 1)))
        pairs = {(history.messages[i].src, history.messages[i].dst) for i in indices}
        for rank in sorted({history.messages[i].dst for i in indices}):
            mine = [i for i in indices if history.messages[i].dst == rank]
            _flash(flashes, history, rank, [landing for i in mine for landing in history.landings[i]] if history.known else [])
        for i in indices:
            m = history.messages[i]
            points = _path(history, m.src, m.dst)
            if (m.dst, m.src) in pairs:  # both directions at once: each keeps to its right
                points = _aside(points, 0.5 * tile_size(history) + 2)
            leaves, arrives = timing.flight(i)
            tile = _tile(tiles, history, i)
            last = len(points) - 1
            frames = [(leaves + (arrives - leaves) * k / last, point) for k, point in enumerate(points)]
            tile.key("translate", *frames, mode="ease" if last == 1 else "linear")


def _aside(points: list[Point], shift: float) -> list[Point]:
    (x0, y0), (x1, y1) = points[0], points[-1]
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    return [(x - (y1 - y0) / length * shift, y + (x1 - x0) / length * shift) for x, y in points]


def _flash(parent: Node, history: History, rank: int, landings: list) -> None:
    x, y = history.layout.at[rank]
    r = history.layout.node
    parent.add("circle", cx=x, cy=y, r=r, class_=f"z s{landings[0].column % 8}" if landings else "zz")
    if any(landing.added for landing in landings):
        bx, by, small = x + 0.71 * r, y - 0.71 * r, max(5.0, 0.36 * r)
        parent.add("circle", cx=bx, cy=by, r=small, class_="badge")
        arm = small * 0.55
        parent.add("path", d=f"M{bx - arm:.1f} {by:.1f}h{2 * arm:.1f}M{bx:.1f} {by - arm:.1f}v{2 * arm:.1f}", class_="plus")


def tile_size(history: History) -> float:
    """The height of a tile, small enough to leave the rank behind it visible."""
    return min(28.0, max(9.0, 1.15 * history.layout.node))


def _tile(parent: Node, history: History, index: int) -> Node:
    """A message as it moves: a lettered tile for each chunk in it, or its bytes if the contents are unknown."""
    tile, side = parent.add("g"), tile_size(history)
    if not history.known:
        _bytes(tile, human_bytes(history.messages[index].nbytes), side)
    elif not history.landings[index]:
        _bytes(tile, "0 B" if history.messages[index].nbytes == 0 else "–", side)
    elif len(history.landings[index]) > MOST_TILES:
        _pack(tile, history, history.landings[index], side)
    else:
        _letters(tile, history, history.landings[index], side)
    return tile


def _bytes(tile: Node, text: str, side: float) -> None:
    font = 0.47 * side
    width = max(side, 0.65 * font * len(text) + 10)
    tile.add("rect", x=-width / 2, y=-side * 0.36, width=width, height=side * 0.72, rx=5, class_="k plain")
    if side > 12:
        tile.add("text", text, y=font * 0.36, font_size=font, class_="b c on")


def _letters(tile: Node, history: History, landings: list[Landing], side: float) -> None:
    width, font = side if len(landings) == 1 else 0.72 * side, 0.57 * side
    for k, landing in enumerate(landings):
        x, colour = (k - (len(landings) - 1) / 2) * width, landing.column % 8
        rim = "bad" if any(count > 1 for count in landing.carried) else "k"
        tile.add("rect", x=x - width / 2, y=-side / 2, width=width, height=side, rx=side * 0.21, class_=f"f{colour} {rim}")
        tile.add("text", history.columns[landing.column].label, x=x, y=font * 0.32, font_size=font, class_=f"b c o{colour}")


def _pack(tile: Node, history: History, landings: list[Landing], side: float) -> None:
    """Many chunks in one tile: the first and last letter above a band of all their colours."""
    text = labels([history.columns[landing.column].label for landing in landings])
    text = text if "–" in text else f"{len(landings)} chunks"
    font = 0.51 * side
    width = max(side, 0.67 * font * len(text) + 12)
    each = (width - 8) / len(landings)
    tile.add("rect", x=-width / 2, y=-side / 2, width=width, height=side, rx=6, class_="pack")
    for k, landing in enumerate(landings):
        tile.add("rect", x=-width / 2 + 4 + k * each, y=side * 0.2, width=each, height=side * 0.18, class_=f"f{landing.column % 8}")
    tile.add("text", text, y=font * 0.11, font_size=font, class_="b c")
