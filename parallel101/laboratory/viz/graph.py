"""The left half of the collective view: ranks, links, and messages as moving lettered tiles.

A rank flashes when a message arrives, with a "+" if it adds the data to its own. The segmented ring
counts the steps.
"""

from __future__ import annotations

import math

from parallel101.laboratory.analysis.replay import Replay
from parallel101.laboratory.record.units import chunk_letters, human_bytes
from parallel101.laboratory.viz.diagram import ASIDE, CENTRE, Diagram, diagram_of, draw_rank
from parallel101.laboratory.viz.scene import Node, Point, Scene
from parallel101.laboratory.viz.timing import Timing

MOST_TILES = 4  # chunks of one message that are drawn one by one
LEGIBLE = 16.0  # a tile that is less high shows no bytes, and of many chunks only their number
STYLE = (
    ".node{fill:var(--bg);stroke:var(--ink);stroke-width:1.5}.z{stroke-width:4;fill-opacity:.22}"
    ".zz{stroke:var(--accent);fill:var(--accent);stroke-width:4;fill-opacity:.18}"
    ".badge{fill:var(--ink)}.plus{stroke:var(--bg);stroke-width:2}.arc{fill:none;stroke-width:5}"
    ".k{stroke:var(--bg);stroke-width:2}.bad{stroke:var(--warn);stroke-width:3}"
    ".plain{fill:var(--accent)}.pack{fill:var(--bg);stroke:var(--ink);stroke-width:1.5}"
    "text.on{fill:var(--bg)}"
)


def draw_graph(scene: Scene, timing: Timing, phases: list[str]) -> None:
    """Add the ranks, their links, their messages and the ring of steps to the scene."""
    scene.style += STYLE
    panel, diagram = scene.panel(narrow="translate(18,-16)"), diagram_of(timing.replay.topology)
    topology, links = diagram.topology, diagram.topology.links
    size = 6 if diagram.node > 15 else 5
    scene.definitions.append(
        f'<marker id="tip" viewBox="0 0 8 8" refX="6.5" refY="4" markerWidth="{size}" '
        f'markerHeight="{size}" orient="auto-start-reverse"><path d="M0 .5 8 4 0 7.5z" '
        'class="tip"/></marker>'
    )
    many = len(links) > 60 or diagram.node < 11
    for a, b in links:
        back = (b, a) in links
        if back and a > b:
            continue  # one line for both directions
        points = _path(diagram, a, b, margin=4.0)
        tips = {"marker_end": "url(#tip)", "marker_start": "url(#tip)" if back else None}
        width = 1 if many else 1.5 if len(links) > 24 else 2
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        panel.add("path", d=d, class_="link", stroke_width=width, **({} if many else tips))
    draw_step_ring(panel, timing, phases, diagram.clock)
    for rank in topology.order:
        draw_rank(panel, rank, diagram.at[rank], diagram.node)
    top = topology.root if topology.kind == "tree" else None
    if topology.kind in ("ring", "chain"):
        top = topology.order[0]
    if top is not None:
        panel.write("rank", diagram.at[top][0], diagram.at[top][1] - diagram.node - 7, 12, "m c")

    for name, vertical in zip(topology.axes, (False, True)):
        if name:  # of a mesh: below a rank of the lowest row, and along the first column
            x0, y0 = diagram.at[topology.order[0]]
            x, y = diagram.at[topology.order[-1 - topology.columns // 2]]
            beside, below = (x0 - diagram.node - 12, (y0 + y) / 2), (x, y + diagram.node + 13)
            x, y = beside if vertical else below
            turned = f"rotate(-90 {x:.1f} {y:.1f})" if vertical else None
            panel.write(f"← {name}" if vertical else f"{name} →", x, y, 13, "m c", transform=turned)
    _messages(panel, diagram, timing)


def _path(diagram: Diagram, a: int, b: int, margin: float = 0.0) -> list[Point]:
    """Return the way from the rim of one rank to the rim of another.

    It is a straight line, or an arc for a grid's wrap-around links.
    """
    (x0, y0), (x1, y1) = diagram.at[a], diagram.at[b]
    reach = diagram.node + margin
    if (a, b) not in diagram.topology.wrap_around:
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        return [(x0 + ux * reach, y0 + uy * reach), (x1 - ux * reach, y1 - uy * reach)]
    # arcs along a row bend upwards, arcs along a column to the right
    bow = 2.3 * diagram.node + 0.12 * math.hypot(x1 - x0, y1 - y0)
    if two_way_arcs(diagram):  # four tiles side by side: both ways, straight and on the arc
        bow = max(bow, 4 * tile_size(diagram) + 12)
    start, end = (x0, y0), (x1, y1)
    middle = ((x0 + x1) / 2, y0 - bow) if abs(y1 - y0) < 1 else (x0 + bow, (y0 + y1) / 2)
    curve = _curve(start, middle, end)
    return [p for p in curve if min(math.dist(p, start), math.dist(p, end)) >= reach - 1]


def draw_step_ring(
    panel: Node, timing: Timing, phases: list[str], clock: tuple[float, float, float]
) -> None:
    """Draw an arc for each step, and inside the number of the step. `clock`: x, y and radius."""
    (x, y, radius), steps = clock, timing.steps
    if not steps:
        return
    central, big, turn = (x, y) == CENTRE, radius / 66, 2 * math.pi / steps
    gap = 0.05 if steps == 1 else 0.06 * turn if steps <= 30 else 0.0
    first = panel.add("g").show((0.0, timing.start(0)))
    first.write("start", x, y + 4, 15 if central else 12, "m c")
    for s in range(steps):
        ends = s * turn + gap, (s + 1) * turn - gap
        (x0, y0), (x1, y1) = ((x + radius * math.sin(a), y - radius * math.cos(a)) for a in ends)
        way = f"{radius:.1f} {radius:.1f} 0 {int(ends[1] - ends[0] > math.pi)} 1"
        d = f"M{x0:.1f} {y0:.1f}A{way} {x1:.1f} {y1:.1f}"
        panel.path(d, "arc", style="stroke:var(--faint)")
        colour = "ink" if timing.replay.adds(s) else "accent"
        done = panel.path(d, "arc", style=f"stroke:var(--{colour})")
        done.show((timing.start(s), timing.duration + 1))
        text = panel.add("g").show((timing.start(s), timing.start(s + 1)))
        text.write("step", x, y - 29 * big, 12 if central else 11, "m c")
        low = y + 10 * big + (0 if central else 3)
        text.write(s + 1, x, low, max(22.0, 40 * big), "c", font_weight=650)
        if phases[s]:
            low, size = (y + 29, 12.5) if central else (y + radius + 18, 12.0)
            text.write(phases[s], x, low, size, "b c")


def _messages(panel: Node, diagram: Diagram, timing: Timing) -> None:
    """Draw the tiles of each step, and the flashes of the ranks where they arrive."""
    replay, side = timing.replay, tile_size(diagram)
    for step in range(timing.steps):
        messages = {i: replay.messages[i] for i in replay.in_step(step)}
        tiles = panel.add("g").show((timing.start(step), timing.arrival(step)))
        flashes = panel.add("g").show((timing.arrival(step), timing.start(step + 1)))
        drawn = {i: draw_tile(tiles, replay, i, side) for i in messages}
        largest = tuple(map(max, zip(*(box for _, box in drawn.values()))))
        pairs = {(m.src, m.dst) for m in messages.values()}
        for rank in sorted({dst for _, dst in pairs}):
            own = [i for i, m in messages.items() if replay.known and m.dst == rank]
            landings = [x for i in own for x in replay.landings[i]]
            arrived = [f"z s{x.chunk % 8}" for x in landings if any(x.carried)] or ["zz"]
            (x, y), r = diagram.at[rank], diagram.node
            flashes.add("circle", cx=x, cy=y, r=r, class_=arrived[0])
            if any(landing.added for landing in landings):
                x, y, small = x + 0.71 * r, y - 0.71 * r, max(5.0, 0.36 * r)
                flashes.add("circle", cx=x, cy=y, r=small, class_="badge")
                arm = small * 0.55
                plus = f"M{x - arm:.1f} {y:.1f}h{2 * arm:.1f}M{x:.1f} {y - arm:.1f}v{2 * arm:.1f}"
                flashes.path(plus, "plus")
        for i, m in messages.items():
            points = flight(diagram, m.src, m.dst, (m.dst, m.src) in pairs, largest)
            (leaves, arrives), last = timing.flight(i), len(points) - 1
            times = (leaves + (arrives - leaves) * k / last for k in range(len(points)))
            mode = "ease" if last == 1 else "linear"
            drawn[i][0].key("translate", *zip(times, points), mode=mode)


def flight(diagram: Diagram, src: int, dst: int, both_ways: bool, tile: Point) -> list[Point]:
    """Return the way of a tile. `tile`: width and height of the largest tile in its step.

    On a circle it goes around the centre, where the tiles of a step would otherwise meet, and
    inside the ranks that it would hide.
    """
    points = _path(diagram, src, dst)
    order, large = diagram.topology.order, sum(tile) / 2
    n, far = len(order), abs(order.index(src) - order.index(dst))
    (x0, y0), (x1, y1) = points[0], points[-1]
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    if diagram.topology.kind != "circle" or n <= 3 or far in (1, n - 1):
        if both_ways:  # each keeps to its right, so that the tiles pass each other
            across, down = abs(y1 - y0) / length, abs(x1 - x0) / length
            shift = min(tile[0] / max(across, 0.01), tile[1] / max(down, 0.01)) / 2 + 2
            dx, dy = (y1 - y0) / length * shift, (x1 - x0) / length * shift
            points = [(x - dx, y + dy) for x, y in points]
        return points
    # the middle of the way, seen from the centre
    mx, my = (x0 + x1) / 2 - ASIDE[0], (y0 + y1) / 2 - ASIDE[1]
    near = math.hypot(mx, my)
    clear = max(n * (large + 4) / (2 * math.pi), 1.2 * large)
    # the furthest from the centre that hides no rank
    rim = math.dist(diagram.at[src], ASIDE) - diagram.node - large / 2 - 2
    right = -(y1 - y0) / length, (x1 - x0) / length
    if near < clear:
        ux, uy = right if both_ways or near < 1 else (mx / near, my / near)
        middle = clear
    else:
        ux, uy = mx / near, my / near
        outside = ux * right[0] + uy * right[1] > 0
        middle = min(near + both_ways * (large / 2 + 2), rim)
        middle -= large + 4 if both_ways and not outside else 0
    # so that the curve's middle is so far from the centre
    cx, cy = 2 * middle * ux - mx + ASIDE[0], 2 * middle * uy - my + ASIDE[1]
    return _curve((x0, y0), (cx, cy), (x1, y1))


def _curve(start: Point, control: Point, end: Point) -> list[Point]:
    """Return points on a quadratic Bézier curve."""
    weights = [((1 - u) ** 2, 2 * u * (1 - u), u * u) for u in (k / 24 for k in range(25))]
    (x0, y0), (mx, my), (x1, y1) = start, control, end
    return [(a * x0 + b * mx + c * x1, a * y0 + b * my + c * y1) for a, b, c in weights]


def two_way_arcs(diagram: Diagram) -> bool:
    """Return whether messages go both ways around the end of a row or column."""
    arcs = diagram.topology.wrap_around
    return any((b, a) in arcs for a, b in arcs)


def tile_size(diagram: Diagram) -> float:
    """Return the height of a tile, small enough to leave the rank behind it visible.

    On a torus, four tiles can pass each other.
    """
    size = min(28.0, max(9.0, 1.15 * diagram.node))
    if not two_way_arcs(diagram):
        return size
    places = list(diagram.at.values())
    return min(size, (math.dist(places[0], places[diagram.topology.columns]) - 10) / 4)


def draw_tile(parent: Node, replay: Replay, index: int, side: float) -> tuple[Node, Point]:
    """Draw a message as it moves, and return it with its width and height.

    It has a lettered square for each chunk: up to two side by side, up to four in two rows. More
    chunks share a tile, with the first and last letter or their number above a band of their
    colours. If the contents are unknown, the tile shows the bytes, unless they are too many letters
    for it; the sentence of the step has them too.

    Args:
        side: of the square of a single chunk.
    """
    tile, landings = parent.add("g"), replay.landings[index] if replay.known else []
    if 0 < len(landings) <= MOST_TILES:
        sizes = (side, side), (1.44 * side, side), (1.24 * side, 1.24 * side)
        width, height = sizes[min(len(landings), 3) - 1]
        columns, rows = min(len(landings), 2), -(-len(landings) // 2)
        wide, high = width / columns, height / rows
        for k, landing in enumerate(landings):
            place = k % columns * wide - width / 2, k // columns * high - height / 2, wide, high
            colour, rim = landing.chunk % 8, "bad" if max(landing.carried) > 1 else "k"
            tile.rect(*place, f"f{colour} {rim}", rx=0.21 * min(wide, high))
            letter = replay.chunks[landing.chunk].label
            tile.label(letter, place, f"b o{colour}", 0.57 * high, 0)
    elif landings:
        text = chunk_letters([replay.chunks[landing.chunk].label for landing in landings])
        if "–" not in text:
            text = f"{len(landings)}{' chunks' * (side > LEGIBLE)}"
        width, height = max(side, 0.35 * side * len(text) + 12), side
        each, font = (width - 8) / len(landings), 0.51 * height
        tile.rect(-width / 2, -height / 2, width, height, "pack", rx=6)
        for k, landing in enumerate(landings):
            left = -width / 2 + 4 + k * each
            tile.rect(left, height * 0.2, each, height * 0.18, f"f{landing.chunk % 8}")
        tile.add("text", text, y=font * 0.11, font_size=font, class_="b c")
    else:
        nbytes, each = replay.messages[index].nbytes, 0.31 * side
        text = human_bytes(nbytes) if not replay.known or not nbytes else "–"
        crowded = replay.topology.kind == "circle" and each * len(text) + 10 >= 1.7 * side
        text = text if side > LEGIBLE and not crowded else ""
        width, height = max(side, each * len(text) + 10), 0.72 * side
        place = -width / 2, -height / 2, width, height
        tile.rect(*place, "k plain", rx=5)
        if text:
            tile.label(text, place, "b on", 0.65 * height, 0)
    return tile, (width, height)
