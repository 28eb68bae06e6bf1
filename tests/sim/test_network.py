"""The topologies of the sim's network: which links each message takes, and errors that say what
was passed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from functools import partial

import pytest

import parallel101 as p101
from parallel101.laboratory.sim.network import Network


def test_a_switch_takes_the_senders_outgoing_and_the_receivers_incoming_link_together():
    route = Network().router(5)
    pairs = [pair for pair in itertools.product(range(5), repeat=2) if pair[0] != pair[1]]
    for a, b in pairs:
        ((out, into),) = route(a, b).hops
        for c, d in pairs:
            ((other_out, other_into),) = route(c, d).hops
            assert (out == other_out) == (a == c) and (into == other_into) == (b == d)
            assert out != other_into


def shorter_way(x, y, n):
    return min((y - x) % n, (x - y) % n)


def one_way(x, y, n):
    return (y - x) % n


def on_a_line(x, y, n):
    return abs(x - y)


RINGS = {  # a network, and how far apart two places are on a ring of n
    "ring": (lambda shape: Network.ring(), shorter_way),
    "one-way ring": (lambda shape: Network.ring(bidirectional=False), one_way),
    "line": (lambda shape: Network.ring(wraparound=False), on_a_line),
    "torus": (Network.torus, shorter_way),
    "one-way torus": (partial(Network.torus, bidirectional=False), one_way),
    "grid": (partial(Network.torus, wraparound=False), on_a_line),
}
CASES = [
    *((kind, (n,)) for kind in RINGS for n in (1, 2, 5, 8)),
    *((kind, shape) for kind in RINGS if "torus" in kind for shape in [(2, 2), (3, 5), (1, 4)]),
    *((kind, (2, 3, 4)) for kind in ("torus", "grid")),
]


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_a_torus_is_crossed_one_axis_after_the_other_by_the_shortest_way(kind, shape):
    make, distance = RINGS[kind]
    route, places = make(shape).router(math.prod(shape)), [*itertools.product(*map(range, shape))]
    for a, b in itertools.product(range(len(places)), repeat=2):
        hops = sum(map(distance, places[a], places[b], shape))
        assert len(route(a, b).hops) == hops == len(set(route(a, b).hops))
        # a link in each direction
        assert kind.startswith("one-way") or not set(route(a, b).hops) & set(route(b, a).hops)


@pytest.mark.parametrize("n", [4, 8, 12])
def test_half_way_round_a_ring_both_directions_carry_half(n):
    route = Network.ring().router(n)
    load = Counter(link for r in range(n) for (link,) in route(r, (r + n // 2) % n).hops)
    assert len(load) == 2 * n and len(set(load.values())) == 1


def test_paths_on_a_torus_share_the_links_of_their_common_hops():
    route = Network.torus((3, 3)).router(9)
    assert set(route(0, 1).hops) < set(route(0, 4).hops) | set(route(0, 1).hops)
    assert set(route(0, 3).hops) & set(route(0, 4).hops)  # first along axis 0, then along axis 1


def test_two_level_networks_share_the_links_of_a_node_and_not_those_inside():
    network = Network.two_level(
        2, latency=3.0, bandwidth=1.0, inside_latency=1.0, inside_bandwidth=5.0
    )
    route = network.router(5)
    assert route(0, 1)[:2] == (1.0, 5.0)
    assert route(0, 2)[:2] == route(4, 0)[:2] == (3.0, 1.0)
    assert route(0, 2).hops[0][0] == route(1, 4).hops[0][0]  # the outgoing link of node 0
    assert route(2, 0).hops[0][1] == route(4, 1).hops[0][1]  # its incoming link
    assert not set(route(0, 1).hops[0]) & set(route(0, 2).hops[0])


def test_each_rank_of_a_node_has_its_own_rail_out_and_in():
    """Three nodes of four ranks, with two rails: 0 and 2 share one, 1 and 3 the other."""
    network = Network.two_level(4, latency=3.0, bandwidth=8.0, rails=2)
    route = network.router(12)
    assert route(0, 4)[:2] == (3.0, 4.0)  # a rail has its part of the node's bandwidth
    links = {}
    for a, b in itertools.product(range(12), repeat=2):
        if a // 4 != b // 4:
            ((out, into),) = route(a, b).hops
            links.setdefault(out, set()).add(("out", a // 4, a % 4 % 2))
            links.setdefault(into, set()).add(("in", b // 4, b % 4 % 2))
    assert all(len(who) == 1 for who in links.values()) and len(links) == 2 * 3 * 2
    inside = {link for a in range(4) for b in range(4) if a != b for link in route(a, b).hops[0]}
    assert not inside & set(links)
    # one rail for each rank; rails that the ranks don't share equally; a smaller last node
    assert len({Network.two_level(4, rails=4).router(8)(r, 4 + r).hops for r in range(4)}) == 4
    assert Network.two_level(3, rails=2).router(5)(2, 4).hops != ()


def test_a_message_to_oneself_takes_no_link_and_no_time():
    for network in (Network(), Network.ring(), Network.two_level(2)):
        assert network.router(4)(1, 1) == (0.0, math.inf, ())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"latency": -1.0}, "latency"),
        ({"latency": math.nan}, "latency"),
        ({"latency": math.inf}, "latency"),
        ({"latency": "1"}, "latency"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"bandwidth": math.nan}, "bandwidth"),
        ({"eager": -1}, "eager"),
        ({"eager": math.nan}, "eager"),
        ({"topology": "ring"}, "topology"),
        pytest.param({"topology": Network.ring()}, "topology", id="topology=a network"),
    ],
)
def test_a_bad_value_is_an_error_that_names_it(arguments, word):
    with pytest.raises(
        ValueError, match=f"{word}.*got {re.escape(repr(next(iter(arguments.values()))))}"
    ):
        Network(**arguments)


BAD = {
    "no axis": (lambda: Network.torus(()), "shape"),
    "an empty axis": (lambda: Network.torus((2, 0)), "shape"),
    "a number": (lambda: Network.torus(4), "shape.*got 4"),
    "ways in words": (lambda: Network.ring(bidirectional="no"), "bidirectional must be.*got 'no'"),
    "round as 0": (lambda: Network.torus((2, 2), wraparound=0), "wraparound must be.*got 0"),
    "one way": (lambda: Network.ring(bidirectional=False, wraparound=False), "gets to the left"),
    "no ranks": (lambda: Network.two_level(0), "ranks_per_node"),
    "slow inside": (lambda: Network.two_level(2, inside_bandwidth=-1.0), "inside_bandwidth"),
    "launch": (  # before it starts any rank
        lambda: p101.launch(int, world_size=4, backend="sim", network=Network.torus((2, 3))),
        "6 ranks, but this run has 4",
    ),
}
BAD |= {
    f"{n!r} rails": (lambda n=n: Network.two_level(8, rails=n), f"rails.*from 1 to 8.*got {n!r}")
    for n in (0, 9, 2.0, True)
}


@pytest.mark.parametrize("what", BAD)
def test_bad_topologies_are_errors(what):
    make, words = BAD[what]
    with pytest.raises(ValueError, match=words):
        make()
