"""A forward run beside its backward run: both halves are drawn from their runs, one after the
other.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

import parallel101 as p101
from parallel101.laboratory.viz.forward_backward import forward_backward_scene
from tests.viz.drawn import SVG


@pytest.fixture(scope="module")
def runs():
    forward = p101.watch(
        lambda x: p101.all_gather(x, algorithm="ring"), world_size=3, numel=2, backend="sim"
    )
    return forward, p101.watch(
        lambda g: p101.reduce_scatter(g, algorithm="ring"), world_size=3, backend="sim"
    )


def words(scene, t):
    return [text.text for text in ET.fromstring(scene.svg(t)).iter(f"{SVG}text")]


def test_the_backward_run_starts_when_the_forward_run_has_ended(runs):
    scene = forward_backward_scene(*runs, title="All-gather")
    assert [stop.label.partition(":")[0] for stop in scene.stops] == [
        f"{word}, step {step} of 2" for word in ("Forward", "Backward") for step in (1, 2)
    ]
    assert all(a.end <= b.start for a, b in zip(scene.stops, scene.stops[1:]))
    before, middle, after = (words(scene, t) for t in (0.0, scene.stops[2].start, scene.duration))
    for names in (before, middle, after):
        assert "Forward: ring all-gather" in names and "Backward: ring reduce-scatter" in names
    assert before.count("start") == 2
    assert "start" not in middle
    assert "Every rank ends with all 3 chunks." in middle
    # two ranks, two rows, two steps
    assert {"Every rank ends with all 3 chunks.", "step"} < set(after) and after.count("2") == 4
