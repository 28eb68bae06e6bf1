"""A step on a few virtual GPUs that stand for all is the step of all of them.

And most microbatches are played.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_time import step_time
from parallel101.laboratory.planner.simulated_step import simulate_step
from parallel101.laboratory.sim.network import Network

SHAPE = ModelShape(width=64, layers=2, heads=4, vocabulary=256, time=32, tied=False)
LAYOUT = ParallelLayout(dp=2, tp=2, pp=2, microbatches=6)
EXACT = {
    "1f1b": ({}, {"clip_norm": 1.0}),
    "interleaved": ({"dp": 1, "chunks": 2, "recompute": "full"}, {}),
    "zero bubble": ({"dp": 1, "schedule": "zb-h1", "microbatches": 7}, {}),
    "no pipeline": ({"pp": 1, "tp": 1, "zero_stage": 3}, {}),
    "experts": ({"ep": 2, "tp": 1}, {}),
    "sequence": ({"sequence_parallel": True, "zero_stage": 3, "recompute": "selective"}, {}),
}


def simulated(change, network=None, **options):
    layout = replace(LAYOUT, **change)
    experts = 4 if layout.ep > 1 else 0
    shape = replace(SHAPE, layers=2 * layout.chunks, experts=experts)
    return simulate_step(shape, layout, Cluster("H100", layout.gpus), network=network, **options)


@pytest.mark.parametrize("name", EXACT)
def test_equal_to_all_ranks_and_microbatches(name):
    """On a flat network, where messages of tp and pp meet on one link."""
    change, options = EXACT[name]
    full = simulated(change, Network(), full=True, **options)
    step = simulated(change, Network(), **options)
    assert step.seconds == pytest.approx(full.seconds, rel=1e-12)
    assert step.peak_bytes == full.peak_bytes
    layout = replace(LAYOUT, **change)
    assert len(step.run.gpus) == layout.pp * layout.ep
    assert sum(gpu.flops for gpu in full.run.gpus) == sum(
        gpu.flops * full.run.world_size // len(step.run.gpus) for gpu in step.run.gpus
    )


def test_equal_on_nodes_with_a_rail_for_each_gpu():
    """tp inside of a node: nothing else uses its links, so no played message is sent."""
    layout = replace(LAYOUT, dp=1, tp=4)
    cluster = Cluster("H100", layout.gpus, nodes_of=4)
    full, step = (
        simulate_step(SHAPE, layout, cluster, full=full, trace=True) for full in (True, False)
    )
    assert step.seconds == pytest.approx(full.seconds, rel=1e-12)
    assert step.peak_bytes == full.peak_bytes
    assert step.run.trace.messages_sent[0] < full.run.trace.messages_sent[0]


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_are_played_exactly(stage):
    """Positions on dp have other pieces of parameters there, so one can't quite stand for all."""
    change = {"zero_stage": stage}
    every = simulated(change, Network(), played=False)
    step = simulated(change, Network())
    assert step.seconds == pytest.approx(every.seconds, rel=1e-12)
    assert step.peak_bytes == every.peak_bytes


def test_a_large_run():
    """Of 4,096 GPUs; a thread for each of the 4 stages."""
    shape = ModelShape(width=1024, layers=8, heads=8, vocabulary=4096, time=128, tied=False)
    layout = ParallelLayout(dp=128, tp=8, pp=4, microbatches=64)
    step = simulate_step(shape, layout, Cluster("H100", layout.gpus))
    assert len(step.run.results) == len(step.peak_bytes) == 4 and step.run.trace is None
    assert 0 < step.mfu < step.hfu + 1e-9 < 1
    quick = step_time(shape, layout, Cluster("H100", layout.gpus))
    assert step.mfu * step.seconds == pytest.approx(quick.mfu * quick.seconds)
    assert step.peak_bytes[0] > step.peak_bytes[2]  # the embedding, and more microbatches in flight
