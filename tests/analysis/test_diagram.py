"""Where ranks stand follows from who sent to whom, and nobody stands on anybody else or outside the card."""

from __future__ import annotations

import math

import pytest

from parallel101.analysis.diagram import groups_of, layout_of


def ring(n):
    return [(r, (r + 1) % n) for r in range(n)]


def binomial(n):
    return [(r - (1 << k), r) for r in range(1, n) for k in [(r & -r).bit_length() - 1]]


def hypercube(n):
    return [(r, r ^ (1 << k)) for k in range(n.bit_length() - 1) for r in range(n)]


def torus(rows, columns):
    at = {(i, j): i * columns + j for i in range(rows) for j in range(columns)}
    right = [(at[i, j], at[i, (j + 1) % columns]) for i, j in at]
    return right + [(at[i, j], at[(i + 1) % rows, j]) for i, j in at]


CASES = [
    (4, ring(4), "ring"),
    (7, [(b, a) for a, b in ring(7)], "ring"),
    (5, ring(5) + [(b, a) for a, b in ring(5)], "ring"),
    (4, [(0, 2), (2, 1), (1, 3), (3, 0)], "ring"),
    (4, [(0, 1), (1, 2), (2, 3)], "chain"),
    (6, [(r, r + 1) for r in range(5)] + [(r + 1, r) for r in range(5)], "chain"),
    (8, [(3, r) for r in range(8) if r != 3], "star"),
    (4, binomial(4), "tree"),
    (8, binomial(8), "tree"),
    (16, binomial(16), "tree"),
    (4, hypercube(4), "grid"),
    (8, hypercube(8), "circle"),
    (6, torus(2, 3), "grid"),
    (12, torus(3, 4), "grid"),
    (6, [(a, b) for a in range(6) for b in range(6) if a != b], "circle"),
    (6, [(0, 1), (2, 3), (4, 5)], "circle"),
    (3, [(a, b) for a in range(3) for b in range(3) if a != b], "circle"),
    (3, [(0, 1), (1, 0), (0, 2), (2, 0)], "star"),
    (3, [(0, 1), (1, 0), (1, 2), (2, 1)], "chain"),
    (5, [(a, b) for x, y in ((3, 4), (4, 0), (0, 1), (1, 2)) for a, b in ((x, y), (y, x))], "tree"),
    (2, [(0, 1)], "pair"),
    (1, [], "pair"),
]


@pytest.mark.parametrize(("n", "pairs", "kind"), CASES, ids=[f"{n} ranks, {kind}" for n, _, kind in CASES])
def test_the_shape_of_the_messages(n, pairs, kind):
    layout = layout_of(range(n), pairs)
    assert layout.kind == kind
    assert sorted(layout.at) == sorted(layout.order) == list(range(n))
    points = list(layout.at.values())
    assert all(math.dist(p, q) > 2 * layout.node for i, p in enumerate(points) for q in points[:i])
    assert all(x - layout.node > 20 and x + layout.node < 440 and y - layout.node > 76 and y + layout.node < 436 for x, y in points)
    x, y, radius = layout.clock
    assert all(math.dist(p, (x, y)) > radius + layout.node for p in points)
    if layout.kind not in ("ring", "chain"):  # the word below it has its place too
        assert all(px - layout.node > x + 52 or py - layout.node > y + radius + 21 for px, py in points)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 33, 64])
def test_many_ranks_keep_apart(n):
    for pairs in (ring(n), binomial(n), [(0, r) for r in range(1, n)], [(a, b) for a in range(n) for b in range(n) if a != b]):
        points = list(layout_of(range(n), pairs).at.values())
        node = layout_of(range(n), pairs).node
        assert all(math.dist(p, q) > 2 * node for i, p in enumerate(points) for q in points[:i])


def test_a_ring_is_drawn_in_its_own_order():
    assert layout_of(range(4), [(0, 2), (2, 1), (1, 3), (3, 0)]).order == [0, 2, 1, 3]


def test_the_root_of_a_tree_is_on_top():
    up = [(b, a) for a, b in binomial(8)]
    for pairs in (binomial(8), up, up[::-1] + binomial(8)):
        layout = layout_of(range(8), pairs)
        assert layout.root == 0
        assert min(layout.at, key=lambda r: layout.at[r][1]) == 0


def test_who_could_have_reached_whom():
    assert groups_of(range(5), [(0, 1), (2, 3), (3, 2)]) == {0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}, 4: {4}}
