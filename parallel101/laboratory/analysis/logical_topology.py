"""Finds the topology of an algorithm from its messages: who sent to whom.

    pair    one rank or two
    ring    a closed chain
    chain   0 → 1 → 2 → 3
    star    one hub and the others
    tree    each rank but the root has one parent
    grid    links only along rows and columns, or groups of a mesh
    circle  anything else

A "ring" whose code skips a rank is therefore not called a ring. `laboratory.viz.diagram` places
the ranks in a picture. The topology of the simulated hardware is in sim/network.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Link = tuple[int, int]  # (src, dst)
# the ranks of a group, and the axis of the mesh along which they are
GroupOnAxis = tuple[tuple[int, ...], str | None]


@dataclass(frozen=True)
class LogicalTopology:
    """The topology of an algorithm: which ranks sent to each other.

    Attributes:
        kind: "pair", "ring", "chain", "star", "tree", "grid" or "circle".
        order: the ranks, along the ring or chain; otherwise, and in a ring from each rank to the
            one before it, ascending.
        links: the (src, dst) that sent at least once, in the order of their first message.
        root: of a star or a tree, else None.
        columns: of a grid whose ranks are numbered row by row, else 0.
        axes: of a mesh: the names of the axes along its rows and along its columns, if they have
            names.
    """

    kind: str
    order: list[int]
    links: list[Link]
    root: int | None = None
    columns: int = 0
    axes: tuple[str, str] = ("", "")

    @property
    def both_ways(self) -> bool:
        """Return True if some pair of ranks sent in both directions."""
        return any((dst, src) in self.links for src, dst in self.links)

    @cached_property
    def wrap_around(self) -> frozenset[Link]:
        """Return the links of a grid that pass over other ranks.

        Such are the links between the two ends of a row or a column of a torus.
        """
        far = (sum(_distance(self.order, link, self.columns or 1)) != 1 for link in self.links)
        return frozenset(link for link, is_far in zip(self.links, far) if self.columns and is_far)

    @property
    def closed(self) -> bool:
        """Return whether a grid's links between ranks that aren't neighbours join its lines' ends.

        The lines are rows or columns, as on a torus.
        """
        ends = {(len(self.order) // self.columns - 1, 0), (0, self.columns - 1)}
        return {_distance(self.order, link, self.columns) for link in self.wrap_around} <= ends


def topology_of(
    ranks: Iterable[int], pairs: Iterable[Link], groups: Iterable[GroupOnAxis] = ()
) -> LogicalTopology:
    """Return the topology of `ranks`, given the (src, dst) of their messages in order of time.

    `groups`: (ranks, axis of the mesh or None) of the groups in which they were sent. If these are
    rows and columns, the ranks are a mesh.
    """
    order = sorted(ranks)
    links = [pair for pair in dict.fromkeys(pairs) if pair[0] != pair[1]]
    lines = [
        line for line in dict.fromkeys(groups) if len(line[0]) > 1 and set(line[0]) <= set(order)
    ]
    if (mesh := _mesh(order, links, lines)) is not None:
        return mesh
    if len(order) <= 2:
        return LogicalTopology("pair", order, links)
    in_line = _line_order(order, links)
    if in_line is not None:
        closed = (
            not links or (in_line[-1], in_line[0]) in links or (in_line[0], in_line[-1]) in links
        )
        return LogicalTopology("ring" if closed else "chain", in_line, links)
    hub = next((rank for rank in order if all(rank in link for link in links)), None)
    if hub is not None:
        return LogicalTopology("star", order, links, root=hub)
    neighbours = neighbours_of(links)
    joined = _reachable(order[0], neighbours) == set(order)
    if joined and sum(map(len, neighbours.values())) == 2 * (len(order) - 1):
        return LogicalTopology("tree", order, links, root=_root(order, links))
    columns = _grid_columns(order, links)
    return LogicalTopology("grid" if columns else "circle", order, links, columns=columns)


def connected_ranks(ranks: Iterable[int], pairs: Iterable[Link]) -> dict[int, set[int]]:
    """Return, for each rank, itself and all ranks connected to it by messages, directly or not."""
    neighbours = neighbours_of(pairs)
    return {rank: _reachable(rank, neighbours) for rank in ranks}


def neighbours_of(links: Iterable[Link]) -> dict[int, list[int]]:
    """Return the ranks each rank sent to or received from, in order of their first message."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for src, dst in links:
        for a, b in ((src, dst), (dst, src)):
            if b not in neighbours[a] and a != b:
                neighbours[a].append(b)
    return neighbours


def _reachable(start: int, neighbours: dict[int, list[int]]) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        for rank in neighbours.get(todo.pop(), []):
            if rank not in seen:
                seen.add(rank)
                todo.append(rank)
    return seen


def _line_order(order: list[int], links: list[Link]) -> list[int] | None:
    """Return the ranks along their ring or chain, or None if the messages form neither."""
    n = len(order)
    if not links:
        return order
    after: dict[int, int] = dict(links)
    before: dict[int, int] = {dst: src for src, dst in links}
    # each rank sends to one rank and receives from one
    if len(after) == len(before) == len(links) >= n - 1:
        first = next((rank for rank in order if rank not in before), order[0])
        line = [first]
        while after.get(line[-1], first) not in line:
            line.append(after[line[-1]])
        if len(line) < n:
            return None
        # a ring from each rank to the one before it
        leftwards = len(links) == n and [first, *reversed(line[1:])] == order
        return order if leftwards else line
    # in both directions: only in the order of the rank numbers
    steps = {abs(order.index(dst) - order.index(src)) for src, dst in links}
    neighbours = neighbours_of(links)
    # of three ranks, every two are neighbours
    ring = n > 3 and all(len(neighbours[rank]) == 2 for rank in order)
    chain = sum(map(len, neighbours.values())) == 2 * (n - 1) and all(
        (dst, src) in links for src, dst in links
    )
    return order if (ring and steps <= {1, n - 1}) or (chain and steps == {1}) else None


def _root(order: list[int], links: list[Link]) -> int:
    """Return the root of a tree: the one rank that never receives, or the one that never sends.

    If there is neither, it is the last rank to start sending. In a reduce followed by a broadcast
    every rank sends and receives, and the root sends last.
    """
    senders = list(dict.fromkeys(src for src, _ in links))
    receivers = {dst for _, dst in links}
    only_send = [rank for rank in order if rank not in receivers]
    only_receive = [rank for rank in order if rank not in senders]
    if len(only_send) == 1:
        return only_send[0]
    return only_receive[0] if len(only_receive) == 1 else senders[-1]


def _columns(order: list[int]) -> list[int]:
    """Return the numbers of columns of all grids of these ranks, numbered row by row."""
    n = len(order)
    return [columns for columns in range(2, n // 2 + 1) if n % columns == 0]


def _mesh(
    order: list[int], links: list[Link], lines: Sequence[GroupOnAxis]
) -> LogicalTopology | None:
    """Return the grid in which every group is in one row or column; None if there is none.

    If there are only rows, or only columns, each group must be a whole one.
    """
    for columns in _columns(order):
        in_row = [_in_row(order, ranks, columns) for ranks, _ in lines]
        lengths = [columns if row else len(order) // columns for row in in_row]
        whole = lengths == [len(ranks) for ranks, _ in lines]
        if {*in_row} == {True, False} or (whole and {*in_row} in ({True}, {False})):
            rows, downs = (
                dict.fromkeys(
                    axis for row, (_, axis) in zip(in_row, lines) if axis and row is along
                )
                for along in (True, False)
            )
            axes = ", ".join(rows), ", ".join(downs)
            return LogicalTopology("grid", order, links, columns=columns, axes=axes)
    return None


def _in_row(order: list[int], ranks: Sequence[int], columns: int) -> bool | None:
    """Return True if these ranks are in one row, False if in one column, None if in neither."""
    rows, across = zip(*(divmod(order.index(rank), columns) for rank in ranks))
    return True if len({*rows}) == 1 else False if len({*across}) == 1 else None


def _distance(order: list[int], link: Link, columns: int) -> tuple[int, int]:
    """Return how many rows and columns of a grid are between two ranks."""
    (r0, c0), (r1, c1) = (divmod(order.index(rank), columns) for rank in link)
    return abs(r0 - r1), abs(c0 - c1)


def _grid_columns(order: list[int], links: list[Link]) -> int:
    """Return the number of columns with which every link joins neighbours in a row or a column.

    Wrap-around links count. It is 0 if there is no such number. If it has more rows than columns,
    there must be links of both kinds. If several numbers do, the grid nearest to a square is taken,
    the wider one first.
    """
    n = len(order)

    def fits(columns: int) -> bool:
        rows = n // columns
        between = (_distance(order, link, columns) for link in links)
        steps = {(min(r, rows - r), min(c, columns - c)) for r, c in between}
        return steps <= {(0, 1), (1, 0)} and (columns >= rows or len(steps) == 2)

    possible = filter(fits, _columns(order))
    return min(possible, key=lambda c: (max(c, n // c), -c), default=0)
