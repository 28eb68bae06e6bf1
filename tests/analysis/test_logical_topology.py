"""The topology of an algorithm follows from who sent to whom."""

from __future__ import annotations

import math

import pytest

from parallel101.laboratory.analysis.logical_topology import (
    _distance,
    connected_ranks,
    topology_of,
)


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


@pytest.mark.parametrize(
    ("n", "pairs", "kind"), CASES, ids=[f"{n} ranks, {kind}" for n, _, kind in CASES]
)
def test_the_topology_of_the_messages(n, pairs, kind):
    topology = topology_of(range(n), pairs)
    assert topology.kind == kind
    assert sorted(topology.order) == list(range(n))
    assert topology.both_ways == any((b, a) in pairs for a, b in pairs)


def test_the_order_of_a_ring_and_the_root_of_a_tree():
    mixed = [(0, 2), (2, 1), (1, 3), (3, 0)]
    assert topology_of(range(4), mixed).order == [0, 2, 1, 3]
    # a ring and the same ring backwards: their pictures differ in the arrows alone
    for n in (3, 7):
        for pairs in (ring(n), [pair[::-1] for pair in ring(n)]):
            assert topology_of(range(n), pairs).order == [*range(n)]
    up = [(b, a) for a, b in binomial(8)]
    for pairs in (binomial(8), up, up[::-1] + binomial(8)):
        assert topology_of(range(8), pairs).root == 0


def test_the_wrap_around_links_of_a_torus():
    ends = {(3, 0), (7, 4), (11, 8), (8, 0), (9, 1), (10, 2), (11, 3)}
    assert topology_of(range(12), torus(3, 4)).wrap_around == ends
    assert not topology_of(range(4), hypercube(4)).wrap_around
    assert not topology_of(range(4), ring(4)).wrap_around


def test_connected_ranks():
    pair, other = {0, 1}, {2, 3}
    found = connected_ranks(range(5), [(0, 1), (2, 3), (3, 2)])
    assert found == {0: pair, 1: pair, 2: other, 3: other, 4: {4}}


def lines(*extents):
    """The groups along each axis of a mesh, whose last axis runs fastest, with the names x, y,
    z from the last one.
    """
    found = []
    for axis, extent in enumerate(extents):
        stride, name = math.prod(extents[axis + 1 :]), "xyz"[len(extents) - 1 - axis]
        for start in range(math.prod(extents)):
            if start // stride % extent == 0:
                found.append((tuple(start + k * stride for k in range(extent)), name))
    return found


@pytest.mark.parametrize(("extents", "down"), [((2, 4), "y"), ((4, 2), "y"), ((2, 2, 3), "yz")])
def test_groups_along_the_axes_of_a_mesh_are_rows_and_columns(extents, down):
    groups = lines(*extents)
    links = [(a, b) for ranks, _ in groups for a in ranks for b in ranks if a != b]
    topology = topology_of(range(math.prod(extents)), links, groups[::-1])
    assert (topology.kind, topology.columns) == ("grid", extents[-1])
    assert topology.axes[0] == "x" and {*topology.axes[1].split(", ")} == {*down}
    far = {link for link in links if sum(_distance(topology.order, link, extents[-1])) != 1}
    assert topology.wrap_around == far


def test_groups_of_one_kind_are_a_mesh_if_they_are_whole_rows_or_columns():
    for axis, columns in (("x", 4), ("y", 4)):
        groups = [line for line in lines(2, 4) if line[1] == axis]
        links = [(a, b) for ranks, _ in groups for a, b in zip(ranks, ranks[1:])]
        topology = topology_of(range(8), links, groups)
        assert (topology.kind, topology.columns) == ("grid", columns) and axis in topology.axes
    for groups in (
        [(tuple(range(8)), None)],
        [((0, 1), "x"), ((2, 3), "x"), ((4, 7), "x"), ((5, 6), "x")],
        [*lines(2, 4), ((1, 2, 4, 7), None)],
    ):
        assert topology_of(range(8), hypercube(8), groups).kind == "circle"
    two_rows = [(a, a + 1) for a in (0, 1, 3, 4)]
    assert topology_of(range(8), [(a, b) for a, b in torus(4, 2) if a != b]).columns == 2
    assert topology_of(range(6), two_rows).columns == 3
