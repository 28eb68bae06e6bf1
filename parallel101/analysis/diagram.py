"""Where the ranks stand in a picture, inferred from who sent to whom.

    ring, chain: on a circle    star: its root in the centre    tree: its root on top
    grid: rows × columns        anything else: on a circle, with a line for each pair that talked

The picture of an algorithm is thus the shape of its messages: a "ring" whose code skips a rank is not drawn as one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

CENTRE = (222.0, 262.0)  #  of a ring, in the left half of the card: the steps are counted inside it
ASIDE = (250.0, 268.0)  #  of everything else: the steps are counted in the corner
CORNER = (76.0, 118.0, 34.0)  #  (x, y, radius)


@dataclass(frozen=True)
class Layout:
    """Where each rank stands.

    Attributes:
        kind: "pair" (two ranks or one), "ring", "chain", "star", "tree", "grid" or "circle".
        order: the ranks, along the ring or chain, or ascending.
        at: for each rank its (x, y).
        node: radius of a rank's circle.
        links: the (src, dst) that sent at least once.
        clock: (x, y, radius) of the ring that shows the step.
        root: of a star or a tree.
        bent: links of a grid that go round the back, drawn as arcs.
    """

    kind: str
    order: list[int]
    at: dict[int, tuple[float, float]]
    node: float
    links: list[tuple[int, int]]
    clock: tuple[float, float, float]
    root: int | None = None
    bent: frozenset[tuple[int, int]] = frozenset()

    @property
    def both_ways(self) -> bool:
        """True when some pair of ranks sent in both directions."""
        return any((dst, src) in self.links for src, dst in self.links)


def layout_of(ranks: Iterable[int], pairs: Iterable[tuple[int, int]]) -> Layout:
    """Place `ranks`, given the (src, dst) pairs that sent, in the order in which they first did."""
    order = sorted(ranks)
    links = [pair for pair in dict.fromkeys(pairs) if pair[0] != pair[1]]
    if len(order) <= 2:
        shift = 110.0 if len(order) == 2 else 0.0
        at = {r: (ASIDE[0] + (2 * i - 1) * shift, ASIDE[1]) for i, r in enumerate(order)}
        return Layout("pair", order, at, 25.0, links, CORNER)
    turned = _ring_order(order, links)
    if turned is not None:
        kind = "ring" if len(links) == 0 or (turned[-1], turned[0]) in links or (turned[0], turned[-1]) in links else "chain"
        radius = 138.0 if len(order) <= 8 else 150.0
        node = _node(len(order), radius)
        return Layout(kind, turned, _circle(turned, CENTRE, radius), node, links, (*CENTRE, 66.0))
    hub = next((r for r in order if all(r in pair for pair in links)), None)
    if hub is not None:
        at = _circle([r for r in order if r != hub]) | {hub: ASIDE}
        return Layout("star", order, at, _node(len(order)), links, CORNER, root=hub)
    near = _neighbours(links)
    if sum(map(len, near.values())) == 2 * (len(order) - 1) and _reach(order[0], near) == set(order):
        root = _root(order, links)
        at, node = _tree(root, near, len(order))
        return Layout("tree", order, at, node, links, CORNER, root=root)
    columns = _grid_columns(order, near)
    if columns is not None:
        at, node = _grid(order, columns)
        bent = frozenset(pair for pair in links if not _adjacent(order.index(pair[0]), order.index(pair[1]), columns))
        return Layout("grid", order, at, node, links, CORNER, bent=bent)
    return Layout("circle", order, _circle(order), _node(len(order)), links, CORNER)


def groups_of(ranks: Iterable[int], pairs: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    """For each rank, the ranks that its data could have reached, over others or directly, and whose data could have reached it."""
    near = _neighbours(pairs)
    return {rank: _reach(rank, near) for rank in ranks}


def _neighbours(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    near: dict[int, list[int]] = defaultdict(list)
    for src, dst in pairs:
        for a, b in ((src, dst), (dst, src)):
            if b not in near[a] and a != b:
                near[a].append(b)
    return near


def _reach(start: int, near: dict[int, list[int]]) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        for rank in near.get(todo.pop(), []):
            if rank not in seen:
                seen.add(rank)
                todo.append(rank)
    return seen


def _ring_order(order: list[int], links: list[tuple[int, int]]) -> list[int] | None:
    """The ranks along their ring or chain, or None where the messages make neither."""
    n = len(order)
    if not links:
        return order
    after: dict[int, int] = dict(links)
    before: dict[int, int] = {dst: src for src, dst in links}
    if len(after) == len(before) == len(links) >= n - 1:  # everyone sends to one rank and hears from one
        first = next((r for r in order if r not in before), order[0])
        turned = [first]
        while after.get(turned[-1], first) not in turned:
            turned.append(after[turned[-1]])
        return turned if len(turned) == n else None
    # both ways, along the ranks' own order
    steps = {abs(order.index(dst) - order.index(src)) for src, dst in links}
    near = _neighbours(links)
    closed = n > 3 and all(len(near[r]) == 2 for r in order)  # three ranks are all neighbours, whatever they do
    line = sum(map(len, near.values())) == 2 * (n - 1) and all((dst, src) in links for src, dst in links)
    return order if (closed and steps <= {1, n - 1}) or (line and steps == {1}) else None


def _root(order: list[int], links: list[tuple[int, int]]) -> int:
    """Of a tree: who never hears, or else who never sends, or else who is the last to begin to send (where a reduce turns)."""
    senders = list(dict.fromkeys(src for src, _ in links))
    hearers = {dst for _, dst in links}
    deaf = [r for r in order if r not in hearers]
    mute = [r for r in order if r not in senders]
    return deaf[0] if len(deaf) == 1 else mute[0] if len(mute) == 1 else senders[-1]


def _node(n: int, radius: float = 122.0) -> float:
    return min(25.0, 0.55 * math.pi * radius / max(n, 1))


def _circle(order: list[int], centre: tuple[float, float] = ASIDE, radius: float = 122.0) -> dict[int, tuple[float, float]]:
    turn = 2 * math.pi / max(len(order), 1)
    return {r: (centre[0] + radius * math.sin(i * turn), centre[1] - radius * math.cos(i * turn)) for i, r in enumerate(order)}


def _tree(root: int, near: dict[int, list[int]], n: int) -> tuple[dict[int, tuple[float, float]], float]:
    """Leaves side by side, each parent over the middle of its children."""
    column: dict[int, float] = {}
    level: dict[int, int] = {}
    leaves = 0

    def place(rank: int, parent: int | None, depth: int) -> None:
        nonlocal leaves
        level[rank] = depth
        children = [c for c in near[rank] if c != parent]
        for child in children:
            place(child, rank, depth + 1)
        if children:
            column[rank] = (column[children[0]] + column[children[-1]]) / 2
        else:
            column[rank] = leaves
            leaves += 1

    place(root, None, 0)
    depth = max(level.values())
    across = min(84.0, 300.0 / max(leaves - 1, 1))
    down = min(92.0, 290.0 / max(depth, 1))
    node = min(25.0, 0.36 * across, 0.34 * down)
    left = ASIDE[0] - across * (leaves - 1) / 2
    top = CENTRE[1] - down * depth / 2
    return {r: (left + across * column[r], top + down * level[r]) for r in column}, node


def _adjacent(a: int, b: int, columns: int) -> bool:
    return abs(a // columns - b // columns) + abs(a % columns - b % columns) == 1


def _grid_columns(order: list[int], near: dict[int, list[int]]) -> int | None:
    """How many columns make every link one between neighbours in a row or a column, wrapped round or not; the squarest wins."""
    n = len(order)
    place = {rank: i for i, rank in enumerate(order)}

    def fits(columns: int) -> bool:
        rows = n // columns
        for rank, others in near.items():
            for other in others:
                (r0, c0), (r1, c1) = divmod(place[rank], columns), divmod(place[other], columns)
                across, down = (c1 - c0) % columns, (r1 - r0) % rows
                if not ((down == 0 and across in (1, columns - 1)) or (across == 0 and down in (1, rows - 1))):
                    return False
        return True

    shapes = [c for c in range(2, n // 2 + 1) if n % c == 0 and c >= n // c]
    return next((c for c in sorted(shapes) if fits(c)), None)


def _grid(order: list[int], columns: int) -> tuple[dict[int, tuple[float, float]], float]:
    rows = len(order) // columns
    across, down = min(104.0, 300.0 / max(columns - 1, 1)), min(100.0, 200.0 / max(rows - 1, 1))
    left, top = ASIDE[0] - across * (columns - 1) / 2, 306.0 - down * (rows - 1) / 2  # below the ring that counts the steps
    at = {r: (left + across * (i % columns), top + down * (i // columns)) for i, r in enumerate(order)}
    return at, min(25.0, 0.3 * across, 0.3 * down)
