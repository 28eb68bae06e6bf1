"""In the diagram of a collective, no rank covers another or leaves the card."""

from __future__ import annotations

import itertools
import math

import pytest
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.analysis.logical_topology import topology_of
from parallel101.laboratory.viz.diagram import diagram_of
from parallel101.laboratory.viz.graph import flight, tile_size
from tests.analysis.test_logical_topology import CASES, binomial, ring
from tests.viz.drawn import elements


@pytest.mark.parametrize(
    ("n", "pairs", "kind"), CASES, ids=[f"{n} ranks, {kind}" for n, _, kind in CASES]
)
def test_ranks_have_their_place(n, pairs, kind):
    diagram = diagram_of(topology_of(range(n), pairs))
    node, points = diagram.node, clear(diagram)
    assert sorted(diagram.at) == list(range(n))
    assert all(20 + node < x < 440 - node and 76 + node < y < 436 - node for x, y in points)
    x, y, radius = diagram.clock
    assert all(math.dist(p, (x, y)) > radius + node for p in points)
    if kind not in ("ring", "chain"):  # the word below the ring of steps has its place too
        assert all(px - node > x + 52 or py - node > y + radius + 21 for px, py in points)


def clear(diagram):
    """The ranks' places, none of which covers another one."""
    points = list(diagram.at.values())
    pairs = itertools.combinations(points, 2)
    assert all(math.dist(p, q) > 2 * diagram.node for p, q in pairs)
    return points


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 33, 64])
def test_many_ranks_keep_apart(n):
    star, all_pairs = [(0, r) for r in range(1, n)], itertools.permutations(range(n), 2)
    for pairs in (ring(n), binomial(n), star, [*all_pairs]):
        clear(diagram_of(topology_of(range(n), pairs)))


def test_the_root_of_a_tree_is_on_top():
    up = [(b, a) for a, b in binomial(8)]
    for pairs in (binomial(8), up, up[::-1] + binomial(8)):
        at = diagram_of(topology_of(range(8), pairs)).at
        assert min(at, key=lambda rank: at[rank][1]) == 0


@pytest.mark.parametrize("n", [4, 5, 8, 9, 12, 16])
def test_tiles_do_not_hide_each_other_in_the_middle_of_a_step(n):
    steps = [[(i, (i + k) % n) for i in range(n)] for k in range(1, n)]
    if n & (n - 1) == 0:
        steps += [[(i, i ^ k) for i in range(n)] for k in (1, 2, 4, 8) if k < n]
    diagram = diagram_of(topology_of(range(n), [pair for step in steps for pair in step]))
    assert diagram.topology.kind == "circle"
    side = tile_size(diagram)
    for step in steps:
        ways = [flight(diagram, src, dst, (dst, src) in step, (side, side)) for src, dst in step]
        middles = [
            way[len(way) // 2] if len(way) > 2 else tuple((a + b) / 2 for a, b in zip(*way))
            for way in ways
        ]
        pairs = itertools.combinations(middles, 2)
        apart = min(max(abs(x - u), abs(y - v)) for (x, y), (u, v) in pairs)
        assert apart >= 0.8 * side, (step, apart)


def test_a_mesh_is_drawn_with_its_axes():
    def both_axes(x):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        return p101.all_reduce(p101.all_gather(x, group=mesh["tp"]), group=mesh["dp"])

    run = p101.watch(both_axes, 8, numel=1, backend="sim")
    texts = {text.text: text for text in elements(run.animate(), "text")}
    x, y = (float(texts["tp →"].get(name)) for name in "xy")
    assert float(texts["4"].get("x")) < x < float(texts["7"].get("x"))
    assert float(texts["7"].get("y")) < y < 436
    assert float(texts["← dp"].get("x")) < float(texts["4"].get("x"))
