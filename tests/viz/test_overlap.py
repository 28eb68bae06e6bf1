"""No two texts of a picture overlap, whatever the algorithm and the number of ranks: rank
numbers, tiles in flight, labels.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.axis_timeline import axes_scene
from parallel101.laboratory.viz.between_ranks import traffic_scene
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.loss_curves import loss_scene
from parallel101.laboratory.viz.matrices import matrices_scene
from parallel101.laboratory.viz.memory_over_step import activations_scene
from parallel101.laboratory.viz.memory_per_rank import memory_scene
from parallel101.laboratory.viz.node_links import node_scene
from parallel101.trainers.layout import Entry, Shard
from tests.viz import programs as p
from tests.viz.drawn import assert_apart, span
from tests.viz.programs import exchange, me, recorded
from tests.viz.test_memory_over_step import ONE_F_ONE_B, counted

TWICE = partial(p.broken_ring_all_reduce, twice=(1, 1))


def miscounted(x):
    rank, n = me()
    others = [r for r in range(n) if r != rank]
    total = x
    for r, got in zip(others, exchange([(r, x) for r in others], [(r, x) for r in others])):
        total = total + got * {(0, 1): 0, (1, 0): 2}.get((rank, r % 2), 1)
    return total


def on_a_mesh(rows, columns, operation, algorithm, x):
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "tp"))
    return getattr(p101, operation)(x, group=mesh, algorithm=algorithm)


SENTENCES = (p.ring_all_reduce, p.binomial_reduce, TWICE, miscounted)
CASES = {
    "ring, both ways": (p.both_ways_all_reduce, 6, 6),
    "doubling, 8 ranks": (p.doubling_all_reduce, 8, 1),
    "doubling, 16 ranks": (p.doubling_all_gather, 16, 1),
    "halving and doubling": (partial(p101.all_reduce, algorithm="rabenseifner"), 8, 8),
    "Bruck, 16 ranks": (partial(p101.all_to_all, algorithm="bruck"), 16, 16),
    "bytes, 8 ranks": (p.doubling_all_reduce, 8, 0),
    "torus of 4 × 4, several chunks": (partial(on_a_mesh, 4, 4, "all_gather", "torus"), 16, 1),
    "torus of 2 × 4, both ways": (partial(on_a_mesh, 2, 4, "all_to_all", "torus"), 8, 16),
    "torus of 4 × 2, both ways": (partial(on_a_mesh, 4, 2, "all_to_all", "torus"), 8, 16),
    "two levels": (partial(on_a_mesh, 4, 2, "all_reduce", "two_level"), 8, 8),
    **{
        f"sentence {k} on {n} ranks": (program, n, 2 * n)
        for k, program in enumerate(SENTENCES)
        for n in (3, 5, 8)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_no_two_texts_of_a_collective_overlap(name):
    program, n, numel = CASES[name]
    scene = collective_scene(*recorded(program, n, numel))
    # the tiles are half way
    middles = [stop.start + 0.34 * (stop.end - stop.start) for stop in scene.stops[:-1]]
    for t in [0.0, *middles, scene.duration]:
        assert_apart(scene, t)


def ordinary_values(x):
    """An exchange with both neighbours, of values that do not carry their origin."""
    rank, n = me()
    neighbours, value = [(rank + 1) % n, (rank - 1) % n], torch.tensor([1.5])
    exchange([(r, value) for r in neighbours], [(r, value) for r in neighbours])


PHONE = {"ring": p.ring_all_reduce, "tree": p.binomial_broadcast, "bytes": ordinary_values}


@pytest.mark.parametrize("uneven", [False, True], ids=["sim", "as on gloo"])
@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("name", PHONE)
def test_on_a_phone_the_panels_of_a_collective_are_stacked(name, n, uneven):
    scene = collective_scene(*recorded(PHONE[name], n, 1 if n > 8 else n, uneven=uneven))
    for t in (0.0, scene.duration):
        assert_apart(scene, t, narrow=True, sends=True)


def test_an_all_reduce_along_one_axis_at_a_time_has_two_levels():
    for algorithm, name in (("torus", "Torus"), ("two_level", "Two-level")):
        program = partial(on_a_mesh, 4, 2, "all_reduce", algorithm)
        assert collective_scene(*recorded(program, 8, 16)).title == f"{name} all-reduce"


KINDS = {"weights": 4, "gradients": 4, "optimizer state": 8, "gathered weights (peak)": 2}
HELD = SimpleNamespace(ranks=range(4), bytes={k: [n * 10**6] * 4 for k, n in KINDS.items()})
ENTRIES = {
    f"layers.{i}.{name}.weight": Entry((128, 64), None, {"tp": Shard(0, (32,) * 4)})
    for i in range(2)
    for name in ("query", "key", "value", "out", "up")
}


GPIPE = counted(*[("F", i, 10) for i in range(12)], *[("B", i) for i in range(12)])
STEP = [span(0, "step", 0.0, 4.0), span(1, "step", 0.0, 4.0), span(0, "forward", 1.0, 2.0, 1)]


def pipeline(name, stages, microbatches, chunks=1):
    made = p101.schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    return made.time().timeline()


PICTURES = {
    "memory": lambda: memory_scene({"ZeRO-1": HELD, "ZeRO-3": HELD}),
    "loss": lambda: loss_scene({f"{n} ranks": [(0, 3.0), (9, 1e-3 * n)] for n in range(5)}),
    "matrices": lambda: matrices_scene(ENTRIES),
    "traffic": lambda: traffic_scene(recorded(p.ring_all_reduce, 4, 4)[0]),
    "before and after": lambda: p101.watch(p101.reduce_scatter, 4, backend="sim").before_after(),
    "axes": lambda: axes_scene(Trace(STEP, 2, "sim"), "step"),
    "no axes": lambda: axes_scene(Trace([], 16, "gloo")),
    "node": node_scene,
    "activations": lambda: activations_scene({"rank 10": GPIPE, "rank 11": ONE_F_ONE_B}),
    "pipeline": lambda: pipeline("1f1b", 16, 32),
    "one microbatch": lambda: pipeline("1f1b", 1, 1),
    "five stages a rank": lambda: pipeline("interleaved", 8, 24, 5),
    "wrong": lambda: p101.watch(TWICE, 4, backend="sim").before_after(),
}


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "on a phone"])
@pytest.mark.parametrize("name", PICTURES)
def test_no_two_texts_of_other_pictures_overlap(name, narrow):
    scene = PICTURES[name]()
    if narrow and scene.narrow is None:
        pytest.skip("a phone scrolls it")
    assert_apart(scene, scene.duration, narrow)
