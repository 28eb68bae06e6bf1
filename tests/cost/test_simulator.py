"""The simulator agrees: runs on networks with the book's figures take the seconds that cost/
predicts.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives, cost
from parallel101.laboratory.sim.network import Network

ON_A_RING = {
    "all_gather": "bidirectional_ring",
    "reduce_scatter": "bidirectional_ring",
    "all_reduce": "bidirectional_ring",
    "all_to_all": "direct",
}
ON_A_LINE = {"all_gather": "ring", "reduce_scatter": "ring", "all_reduce": "ring"}


def each_in_a_span(algorithms, nbytes, shape=None):
    """Each operation once on an array of `nbytes` bytes in all.

    What every rank passes follows from it.
    """
    p = dist.get_world_size()
    group = None if shape is None else dist.device_mesh.init_device_mesh("cpu", shape)
    for operation, algorithm in algorithms.items():
        x = torch.empty(
            nbytes if operation in ("reduce_scatter", "all_reduce") else nbytes // p,
            dtype=torch.uint8,
        )
        dist.barrier()
        with p101.span(operation):
            getattr(collectives, operation)(x, algorithm=algorithm, group=group)


def seconds(network, p, algorithms, nbytes, shape=None):
    """By operation: from the first start to the last end."""
    run = p101.launch(
        each_in_a_span, algorithms, nbytes, shape, world_size=p, backend="sim", network=network
    )
    spans = run.trace.spans()
    return {
        operation: max(s.end for s in spans if s.name == operation)
        - min(s.start for s in spans if s.name == operation)
        for operation in algorithms
    }


def predicted(which, algorithms, nbytes, axes, chip, **kwargs):
    return {
        operation: getattr(getattr(cost, operation)(nbytes, axes, chip, **kwargs), which)
        for operation in algorithms
    }


def near(times):
    return pytest.approx(times, rel=1e-9)


@pytest.mark.parametrize("n", [5, 8])
def test_one_ring(n):
    """The links of TPU v5p.

    All operations have both times exactly, and the gathering ones, which wait for each hop, take
    their sum.
    """
    w, t = cost.CHIPS["TPU v5p"].links.bandwidth, cost.CHIPS["TPU v5p"].links.latency
    nbytes, ask = (
        n * n * 4096,
        partial(predicted, nbytes=n * n * 4096, axes=n, chip="TPU v5p", wraparound=True),
    )
    assert seconds(Network.ring(latency=0.0, bandwidth=w), n, ON_A_RING, nbytes) == near(
        ask("bandwidth_seconds", ON_A_RING)
    )
    gathering = {
        operation: algorithm
        for operation, algorithm in ON_A_RING.items()
        if operation != "all_to_all"
    }
    assert seconds(Network.ring(latency=t, bandwidth=math.inf), n, gathering, nbytes) == near(
        ask("latency_seconds", gathering)
    )
    both = {
        o: ask("bandwidth_seconds", gathering)[o] + ask("latency_seconds", gathering)[o]
        for o in gathering
    }
    assert seconds(Network.ring(latency=t, bandwidth=w), n, gathering, nbytes) == near(both)


def test_case_2_pop_quiz_2_on_a_line():
    """560 µs (here for 1/64 of the array), and 3 µs for a small one: without wraparound shards
    need three hops, as on a one-way ring.
    """
    nbytes = 2048 * 8192 * 2 // 64
    line = partial(Network.ring, bidirectional=False)
    assert seconds(line(latency=0.0, bandwidth=4.5e10), 4, ON_A_LINE, nbytes) == near(
        predicted("bandwidth_seconds", ON_A_LINE, nbytes, 4, "TPU v5e")
    )
    assert seconds(line(latency=1e-6, bandwidth=math.inf), 4, ON_A_LINE, 64) == near(
        predicted("latency_seconds", ON_A_LINE, 64, 4, "TPU v5e")
    )


def test_several_axes():
    """The book's V / (W · axes), but for a chip's own shard; an all-to-all takes exactly the
    book's time.
    """
    shape = (4, 4)
    N, algorithms = (
        math.prod(shape),
        dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), "torus"),
    )
    nbytes = 48 * N
    run = seconds(Network.torus(shape, latency=0.0, bandwidth=9e10), N, algorithms, nbytes, shape)
    book = predicted("bandwidth_seconds", algorithms, nbytes, shape, "TPU v5p")
    assert run == near({operation: time * (N - 1) / N for operation, time in book.items()})
    for shape in ((4, 4), (2, 4), (3, 5)):
        N, exchange = math.prod(shape), {"all_to_all": "torus"}
        run = seconds(
            Network.torus(shape, latency=0.0, bandwidth=9e10), N, exchange, 12 * N * N, shape
        )
        assert run == near(
            predicted("bandwidth_seconds", exchange, 12 * N * N, shape, "TPU v5p", wraparound=True)
        )


def test_a_whole_pod_is_within_one_percent_of_the_book():
    """16 × 16 TPU v5e. That a run has the steps and bytes of `torus_form` is tested in
    tests/collectives/test_costs.py.
    """
    V = 4 * 256 * 1024
    run, book = cost.torus_form("all_gather", (16, 16), V), cost.all_gather(V, [16, 16], "TPU v5e")
    assert run.seconds(0.0, 4.5e10) == pytest.approx(book.bandwidth_seconds, rel=0.01)


def test_eight_gpus_of_a_node():
    """65 µs for bf16[1024, 16384] on eight H100, here for 1/64 of it; the others follow."""
    algorithms = {
        "all_gather": "ring",
        "reduce_scatter": "ring",
        "all_reduce": "ring",
        "all_to_all": "direct",
    }
    nbytes = 2 * 1024 * 16384 // 64
    run = seconds(Network(latency=0.0, bandwidth=450e9), 8, algorithms, nbytes)
    assert run == near(predicted("bandwidth_seconds", algorithms, nbytes, 8, "H100"))
    assert 64 * run["all_gather"] == pytest.approx(65e-6, rel=0.01)
    doubling = {
        "all_gather": "bruck",
        "reduce_scatter": "recursive_halving",
        "all_reduce": "rabenseifner",
    }
    hops = seconds(Network(latency=0.6e-6, bandwidth=math.inf), 8, doubling, nbytes)
    assert hops == near(predicted("latency_seconds", doubling, nbytes, 8, "H100"))
