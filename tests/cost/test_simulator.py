"""The simulator agrees: runs on networks with the book's figures take the seconds that cost/
predicts.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives, cost
from parallel101.laboratory.sim.network import Network

GATHERING = ("all_gather", "reduce_scatter", "all_reduce")
ON_A_RING = {**dict.fromkeys(GATHERING, "bidirectional_ring"), "all_to_all": "direct"}
IN_A_NODE = {**dict.fromkeys(GATHERING, "ring"), "all_to_all": "direct"}
DOUBLING = dict(zip(GATHERING, ("bruck", "recursive_halving", "rabenseifner")))


def each_in_a_span(algorithms, nbytes, shape):
    """Each operation once on an array of `nbytes` bytes in all.

    What every rank passes follows from it.
    """
    p = dist.get_world_size()
    group = None if shape is None else dist.device_mesh.init_device_mesh("cpu", shape)
    for operation, algorithm in algorithms.items():
        whole = operation in ("reduce_scatter", "all_reduce")
        x = torch.empty(nbytes if whole else nbytes // p, dtype=torch.uint8)
        dist.barrier()
        with p101.span(operation):
            getattr(collectives, operation)(x, algorithm=algorithm, group=group)


def seconds(network, p, algorithms, nbytes, shape=None):
    """By operation: from the first start to the last end."""
    run = p101.launch(
        each_in_a_span, algorithms, nbytes, shape, world_size=p, backend="sim", network=network
    )
    of = {name: run.trace.spans(name) for name in algorithms}
    return {n: max(s.end for s in spans) - min(s.start for s in spans) for n, spans in of.items()}


def near(which, algorithms, nbytes, axes, chip, factor=1.0, **kwargs):
    """What the book says, as `which` of a Time."""
    times = {name: getattr(cost, name)(nbytes, axes, chip, **kwargs) for name in algorithms}
    return pytest.approx({n: factor * which(time) for n, time in times.items()}, rel=1e-9)


def bandwidth(time):
    return time.bounds["bandwidth"]


def latency(time):
    return time.bounds["latency"]


@pytest.mark.parametrize("n", [5, 8])
def test_one_ring(n):
    """The links of TPU v5p.

    All operations have both times exactly, and the gathering ones, which wait for each hop, take
    their sum.
    """
    links, nbytes = cost.CHIPS["TPU v5p"].links, n * n * 4096
    gathering = {name: ON_A_RING[name] for name in GATHERING}
    for t, w, algorithms, which in (
        (0.0, links.bandwidth, ON_A_RING, bandwidth),
        (links.latency, math.inf, gathering, latency),
        (links.latency, links.bandwidth, gathering, lambda time: bandwidth(time) + latency(time)),
    ):
        run = seconds(Network.ring(latency=t, bandwidth=w), n, algorithms, nbytes)
        assert run == near(which, algorithms, nbytes, n, "TPU v5p", wraparound=True)


def test_case_2_pop_quiz_2_on_a_line():
    """560 µs (here for 1/64 of the array), and 3 µs for a small one: without wraparound shards
    need three hops, as on a one-way ring.
    """
    algorithms = dict.fromkeys(GATHERING, "ring")
    for t, w, nbytes, which in (
        (0.0, 4.5e10, 2048 * 8192 * 2 // 64, bandwidth),
        (1e-6, math.inf, 64, latency),
    ):
        line = Network.ring(latency=t, bandwidth=w, bidirectional=False)
        run = seconds(line, 4, algorithms, nbytes)
        assert run == near(which, algorithms, nbytes, 4, "TPU v5e")


@pytest.mark.parametrize("shape", [(4, 4), (2, 4), (3, 5)])
def test_several_axes(shape):
    """The book's V / (W · axes), but for a chip's own shard, on axes of one length; an all-to-all
    takes exactly the book's time.
    """
    N, network = math.prod(shape), Network.torus(shape, latency=0.0, bandwidth=9e10)
    names = {"all_to_all": (12 * N * N, 1.0)}
    if shape == (4, 4):
        names |= dict.fromkeys(GATHERING, (48 * N, (N - 1) / N))
    for name, (nbytes, factor) in names.items():
        of = {name: "torus"}
        run = seconds(network, N, of, nbytes, shape)
        assert run == near(bandwidth, of, nbytes, shape, "TPU v5p", factor, wraparound=True)


def test_a_whole_pod_is_within_one_percent_of_the_book():
    """16 × 16 TPU v5e. That a run has the steps and bytes of `torus_form` is tested in
    tests/collectives/test_costs.py.
    """
    V = 4 * 256 * 1024
    run, book = cost.torus_form("all_gather", (16, 16), V), cost.all_gather(V, [16, 16], "TPU v5e")
    assert run.seconds(0.0, 4.5e10) == pytest.approx(book.bounds["bandwidth"], rel=0.01)


def test_eight_gpus_of_a_node():
    """65 µs for bf16[1024, 16384] on eight H100, here for 1/64 of it; the others follow."""
    nbytes = 2 * 1024 * 16384 // 64
    run = seconds(Network(latency=0.0, bandwidth=450e9), 8, IN_A_NODE, nbytes)
    assert run == near(bandwidth, IN_A_NODE, nbytes, 8, "H100")
    assert 64 * run["all_gather"] == pytest.approx(65e-6, rel=0.01)
    hops = seconds(Network(latency=0.6e-6, bandwidth=math.inf), 8, DOUBLING, nbytes)
    assert hops == near(latency, DOUBLING, nbytes, 8, "H100")
