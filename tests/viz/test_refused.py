"""What a picture can't show is refused with words that say what to do."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.cost import CHIPS
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.axis_timeline import axes_scene
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.explore import explore_collective
from parallel101.laboratory.viz.forward_backward import forward_backward_scene
from parallel101.laboratory.viz.loss_curves import loss_scene
from parallel101.laboratory.viz.matrices import matrices_scene
from parallel101.laboratory.viz.memory_over_step import activations_scene
from parallel101.laboratory.viz.memory_per_rank import memory_scene
from parallel101.laboratory.viz.node_links import node_scene
from parallel101.laboratory.viz.pipeline_timeline import pipeline_scene
from parallel101.laboratory.viz.plots import bandwidth, sweep
from parallel101.laboratory.viz.timeline import lanes_scene, timeline_scene
from parallel101.laboratory.viz.watch import watch
from tests.viz import programs as p
from tests.viz.drawn import span
from tests.viz.programs import exchange, me, recorded

ONE = Trace([span(0, "load", 0.0, 1.0)], 1, "sim")
WATCHED = {"fn": p101.all_gather}
PLOT = {"a": {64.0: 1e-4, 1024.0: 2e-4}}
PIPELINE = p101.schedule("1f1b", stages=50, microbatches=50)
NODE, LEAF, *_ = CHIPS["H100"].links
SHARED = dataclasses.replace(CHIPS["H100"], links=(NODE, dataclasses.replace(LEAF, rails=4)))


def empty(n: int) -> Trace:
    return Trace([], n, "sim")


def chatter(x):
    peer = 1 - me()[0]
    for _ in range(1001):
        exchange([(peer, x)], [(peer, x)])


def sharded(text: str, *tensors, **mesh):
    return p101.sharding.run(text, *tensors, mesh=mesh).picture()


def on_sim(program):
    return watch(program, 4, backend="sim")


def not_watched():
    return p101.launch(lambda: p101.all_gather(torch.ones(4)), world_size=2, backend="sim")


# the words, and what can't be drawn
REFUSED = {
    r"no span is called 'stp': the record has load": lambda: lanes_scene(ONE, "stp"),
    r"no span is called 'axs': the record has load": lambda: axes_scene(ONE, "axs"),
    r"17 ranks.*run\.timeline": lambda: lanes_scene(empty(17)),
    r"17 ranks, and this picture .* up to 16: use run\.timeline": lambda: axes_scene(empty(17)),
    r"129 ranks.*to_chrome": lambda: timeline_scene(empty(129)),
    r"129 ranks.*to_chrome\(path\)": lambda: collective_scene(
        recorded(p.binomial_broadcast, 129, 0, payload=False)[0]
    ),
    "2002 messages": lambda: collective_scene(recorded(chatter, 2, 1, payload=False)[0]),
    "results has 1 entries for 2 ranks": lambda: collective_scene(empty(2), [None]),
    r"the record has no pipeline: .*; its spans are: load\.": lambda: pipeline_scene(ONE),
    "within='step': names of spans choose parts of one record": lambda: pipeline_scene(
        PIPELINE.time(), "step"
    ),
    "2 pipelines have 100 ranks together: expected 1 to 96": lambda: pipeline_scene(
        dict.fromkeys("ab", PIPELINE.time())
    ),
    "0 pipelines have 0 ranks together": lambda: pipeline_scene({}),
    "0 ranks together: expected 1 to 48 rows": lambda: memory_scene({}),
    "0 ranks: expected 1 to 16 to draw": lambda: activations_scene([]),
    "17 ranks: expected 1 to 16": lambda: activations_scene([SimpleNamespace()] * 17),
    "the layout has 0 different matrices: expected 1 to 24": lambda: matrices_scene({}),
    "65 ranks, and this picture can show up to 64": lambda: p101.DeadlockError(
        {r: ("send", (r + 1) % 65, "a.py:1") for r in range(65)}, cycle=range(65)
    ).picture(),
    "has 3 dims: expected one or two to draw": lambda: sharded(
        "x[B_X, T, D] → x[B, T, D]", torch.ones(2, 3, 4), X=2
    ),
    "the run has 17 ranks and": lambda: sharded("x[B_X] → x[B]", torch.ones(17), X=17),
    r"run it with p101\.watch\(fn, …\)": lambda: not_watched().before_after(),
    "17 ranks, and this picture can show up to 16: use fewer": lambda: watch(
        p101.all_gather, 17, numel=1, backend="sim"
    ).before_after(),
    r"can't be followed.*return a tensor": lambda: on_sim(dist.all_reduce).before_after(),
    r"(?s)can't be followed.*return a tensor": lambda: on_sim(lambda x: x + 1).before_after(),
    r"the backward run has no messages .* record it with parallel101\.watch": lambda: (
        forward_backward_scene(on_sim(p101.all_gather), not_watched())
    ),
    "got 0 labels": lambda: sweep({}, title="a"),
    "got 6 labels": lambda: sweep({str(i): {1: 1.0} for i in range(6)}, title="a"),
    r"one value is 0\.0: expected": lambda: sweep({"a": {1: 0.0}}, title="a"),
    "one value is 0: expected": lambda: sweep(PLOT, spread={"a": {64.0: (0, 1)}}, title="a"),
    r"64 B took 0\.0 s: expected times above": lambda: bandwidth({"ring": {64: 0.0}}, title="a"),
    "6 curves": lambda: loss_scene({str(n): [(0, 1)] for n in range(6)}),
    "8 GPUs and 4 rails": lambda: node_scene(SHARED),
    **{chip: lambda chip=chip: node_scene(chip) for chip in ("TPU v5e", "A100", "B200", "GB200")},
}
# before any rank starts: the words, and the settings of `watch` and of the explorer
SETTINGS = {
    r"float32: values that encode their origin need torch\.int64": {"dtype": torch.float32},
    "world_size='4': expected a whole number of ranks": {"world_size": "4"},
    "world_size=0": {"world_size": 0},
    "do not fit into torch.int64, which can hold 0: take fewer ranks": {"world_size": 19},
    "do not fit": {"world_size": 16, "numel": 1000},
    "shape=4: expected a whole number for each dim, such as": {"shape": 4},
    r"shape=\(2, 2\.5\): expected a whole number": {"shape": (2, 2.5)},
    r"shape=\[-1\]: expected": {"shape": [-1]},
    "shape='ab': expected": {"shape": "ab"},
    "shape=.* has 6 elements, but numel=5": {"shape": (2, 3), "numel": 5},
    "takes a function of a tensor, to run on each rank; got a int: 3": {"fn": 3},
    "operation='allreduce' is unknown: expected one of 'broadcast'": {"operation": "allreduce"},
    "network='mesh' is unknown: expected one of 'switch'": {"network": "mesh"},
    "ranks=99: expected a whole number from 1 to 8": {"ranks": 99},
    r"ranks=2\.5: expected a whole number": {"ranks": 2.5},
    "numbers=48: .* from 1 to 40": {"numbers": 48, "ranks": 16, "world": "sim"},
    "root=4: expected a whole number from 0 to 3": {"root": 4},
}
EXPLORED = {"operation", "network", "ranks", "root"}
for words, settings in SETTINGS.items():
    explored = partial(explore_collective, **settings)
    REFUSED[words] = explored if EXPLORED & {*settings} else partial(watch, **WATCHED | settings)


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused(words):
    with pytest.raises((ValueError, TypeError), match=words):
        REFUSED[words]()
