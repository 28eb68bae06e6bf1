"""The book's seconds are those of the algorithms: on links with the book's figures, their closed
forms, which a run on the simulator has exactly (tests/collectives/test_costs.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parallel101 import cost
from parallel101.cost import closed_form, torus_form

GATHERING = ("all_gather", "reduce_scatter", "all_reduce")
ON_A_RING = {**dict.fromkeys(GATHERING, "bidirectional_ring"), "all_to_all": "direct"}
IN_A_NODE = {**dict.fromkeys(GATHERING, "ring"), "all_to_all": "direct"}
V5P = cost.CHIPS["TPU v5p"]
V5P = replace(V5P, links=replace(V5P.links, ring_multiple=1))  # every axis is a ring
DOUBLING = dict(zip(GATHERING, ("bruck", "recursive_halving", "rabenseifner")))


def forms(algorithms, p, nbytes, links="switch"):
    """By operation: the closed form for an array of `nbytes` bytes in all."""
    return {
        name: closed_form(name, of, p, nbytes // p if name == "all_to_all" else nbytes, links)
        for name, of in algorithms.items()
    }


def agree(of, nbytes, axes, chip, latency=0.0, bandwidth=math.inf):
    """Whether forms take the book's seconds; without a latency its bound of the bandwidth."""
    for name, form in of.items():
        bounds = getattr(cost, name)(nbytes, axes, chip).bounds
        book = bounds["latency"] * (latency > 0) + bounds["bandwidth"] * (bandwidth < math.inf)
        assert form.seconds(latency, bandwidth) == pytest.approx(book, rel=1e-9), name


@pytest.mark.parametrize("n", [5, 8])
def test_one_ring(n):
    """The links of TPU v5p: each bound exactly, and gathering waits for each hop, so that it takes
    their sum.
    """
    links, nbytes = V5P.links, n * n * 4096
    of = forms(ON_A_RING, n, nbytes, "ring")
    agree(of, nbytes, n, V5P, bandwidth=links.bandwidth)
    of.pop("all_to_all")
    agree(of, nbytes, n, V5P, links.latency)
    agree(of, nbytes, n, V5P, links.latency, links.bandwidth)


def test_case_2_pop_quiz_2_on_a_line():
    """560 µs, and 3 µs for a small one: without wraparound shards need three hops, as on a one-way
    ring.
    """
    algorithms = dict.fromkeys(GATHERING, "ring")
    for nbytes, speed in ((2048 * 8192 * 2, {"bandwidth": 4.5e10}), (64, {"latency": 1e-6})):
        agree(forms(algorithms, 4, nbytes, "one_way_ring"), nbytes, 4, "TPU v5e", **speed)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4), (3, 5), (16, 16)])
def test_several_axes(shape):
    """The book's V / (W · axes), but for a chip's own shard, on axes of one length; an all-to-all
    takes exactly the book's time.
    """
    N = math.prod(shape)
    nbytes = 48 * N * N
    of = {"all_to_all": torus_form("all_to_all", shape, nbytes // N)}
    agree(of, nbytes, shape, V5P, bandwidth=9e10)
    if shape[0] == shape[1]:
        of = {name: torus_form(name, shape, nbytes) for name in GATHERING}
        agree(of, nbytes * (N - 1) / N, shape, V5P, bandwidth=9e10)


def test_eight_gpus_of_a_node():
    """65 µs for bf16[1024, 16384] on eight H100; the others follow."""
    nbytes = 2 * 1024 * 16384
    of = forms(IN_A_NODE, 8, nbytes)
    agree(of, nbytes, 8, "H100", bandwidth=450e9)
    assert of["all_gather"].seconds(0.0, 450e9) == pytest.approx(65e-6, rel=0.01)
    agree(forms(DOUBLING, 8, nbytes), nbytes, 8, "H100", latency=0.6e-6)
