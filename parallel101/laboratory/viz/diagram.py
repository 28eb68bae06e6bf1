"""The place of each rank in the diagram of a collective, given the topology of its messages.

ring, chain: on a circle, in the order of the ring      tree: the root on top, leaves side by side
star: the hub in the centre                              grid: rows × columns
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.analysis.logical_topology import LogicalTopology, neighbours_of
from parallel101.laboratory.viz.scene import Node, Point

CENTRE = (222.0, 262.0)  # of a ring, in the left half of the card: the steps are counted inside it
ASIDE = (250.0, 268.0)  # of every other topology: the steps are counted in the corner
CORNER = (76.0, 118.0, 34.0)  # (x, y, radius)


class Diagram(NamedTuple):
    """The place of each rank of a topology."""

    topology: LogicalTopology
    at: dict[int, Point]  # by rank
    node: float  # radius of a rank's circle
    clock: tuple[float, float, float]  # (x, y, radius) of the ring that counts the steps


def diagram_of(topology: LogicalTopology) -> Diagram:
    """Place the ranks of a topology."""
    order, n = topology.order, len(topology.order)
    if topology.kind in ("ring", "chain"):
        radius = 138.0 if n <= 8 else 150.0
        return Diagram(topology, circle(order, CENTRE, radius), _node(n, radius), (*CENTRE, 66.0))
    at, node = circle(order), _node(n)
    if topology.kind == "pair":
        shift, node = (110.0 if n == 2 else 0.0), 25.0
        at = {rank: (ASIDE[0] + (2 * i - 1) * shift, ASIDE[1]) for i, rank in enumerate(order)}
    elif topology.kind == "star":
        assert topology.root is not None
        at = circle([rank for rank in order if rank != topology.root]) | {topology.root: ASIDE}
    elif topology.kind in ("tree", "grid"):
        at, node = _tree(topology) if topology.kind == "tree" else _grid(topology)
    return Diagram(topology, at, node, CORNER)


def _node(n: int, radius: float = 122.0) -> float:
    return min(25.0, 0.55 * math.pi * radius / max(n, 1))


def circle(
    order: Sequence[int], centre: Point = ASIDE, radius: float = 122.0, start: float = 0.0
) -> dict[int, Point]:
    """Return a place on a circle for each rank, clockwise. The first is on top, unless turned."""
    (x, y), turn = centre, 2 * math.pi
    angles = {rank: start + turn * i / len(order) for i, rank in enumerate(order)}
    return {r: (x + radius * math.sin(a), y - radius * math.cos(a)) for r, a in angles.items()}


def draw_rank(panel: Node, rank: int, place: Point, radius: float, class_: str = "node") -> None:
    """Draw a circle with the number of a rank, if there is room for it."""
    (x, y), size = place, min(17.0, 0.95 * radius)
    panel.add("circle", cx=x, cy=y, r=radius, class_=class_)
    if radius >= 7:
        panel.write(rank, x, y + 0.36 * size, size, "b c")


def _tree(topology: LogicalTopology) -> tuple[dict[int, Point], float]:
    """Place leaves side by side, and each parent above the middle of its children."""
    assert topology.root is not None
    neighbours = neighbours_of(topology.links)
    column: dict[int, float] = {}
    level: dict[int, int] = {}
    leaves = 0

    def place(rank: int, parent: int | None, depth: int) -> None:
        nonlocal leaves
        level[rank] = depth
        children = [child for child in neighbours[rank] if child != parent]
        for child in children:
            place(child, rank, depth + 1)
        if children:
            column[rank] = (column[children[0]] + column[children[-1]]) / 2
        else:
            column[rank] = leaves
            leaves += 1

    place(topology.root, None, 0)
    depth = max(level.values())
    across = min(84.0, 300.0 / max(leaves - 1, 1))
    down = min(92.0, 290.0 / max(depth, 1))
    left = ASIDE[0] - across * (leaves - 1) / 2
    top = CENTRE[1] - down * depth / 2
    at = {rank: (left + across * column[rank], top + down * level[rank]) for rank in column}
    return at, min(25.0, 0.36 * across, 0.34 * down)


def _grid(topology: LogicalTopology) -> tuple[dict[int, Point], float]:
    """Place ranks in rows × columns, with room at the right for arcs if a column is closed."""
    order, columns, rows = topology.order, topology.columns, len(topology.order) // topology.columns
    place = order.index
    beside = any((place(a) - place(b)) % columns == 0 for a, b in topology.wrap_around)
    across = min(104.0, (250.0 if beside else 300.0) / max(columns - 1, 1))
    down = min(100.0, 200.0 / max(rows - 1, 1))
    middle = 306.0 if rows < 4 else 298.0  # below the ring that counts the steps
    left, top = ASIDE[0] - 25 * beside - across * (columns - 1) / 2, middle - down * (rows - 1) / 2
    places = (divmod(i, columns) for i in range(len(order)))
    at = {rank: (left + across * c, top + down * r) for rank, (r, c) in zip(order, places)}
    return at, min(25.0, 0.3 * across, 0.3 * down)
