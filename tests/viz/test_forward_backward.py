"""A forward run beside its backward run: both halves are drawn from their runs, one after the
other.
"""

from __future__ import annotations

from functools import partial

import parallel101 as p101
from parallel101.laboratory.viz.forward_backward import forward_backward_scene
from tests.viz.drawn import texts


def watched(program, **size):
    ring = partial(program, algorithm="ring")
    return p101.watch(ring, world_size=3, backend="sim", **size)


def test_the_backward_run_starts_when_the_forward_run_has_ended():
    runs = watched(p101.all_gather, numel=2), watched(p101.reduce_scatter)
    scene = forward_backward_scene(*runs, title="All-gather")
    assert [stop.label.partition(":")[0] for stop in scene.stops] == [
        f"{word}, step {step} of 2" for word in ("Forward", "Backward") for step in (1, 2)
    ]
    assert all(a.end <= b.start for a, b in zip(scene.stops, scene.stops[1:]))
    before, middle, after = (texts(scene, t) for t in (0.0, scene.stops[2].start, scene.duration))
    for names in (before, middle, after):
        assert "Forward: ring all-gather" in names and "Backward: ring reduce-scatter" in names
    assert before.count("start") == 2
    assert "start" not in middle
    assert "Every rank ends with all 3 chunks." in middle
    # two ranks, two rows, two steps
    assert {"Every rank ends with all 3 chunks.", "step"} < set(after) and after.count("2") == 4
