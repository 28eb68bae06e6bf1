"""The picture of a plan: bars and words agree with it, and no text covers another."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

import parallel101 as p101
from parallel101.laboratory.planner.plan_picture import crossing
from parallel101.laboratory.viz.scene import Scene
from tests.viz.drawn import SVG, assert_apart, text_boxes, titled

PLANS = {
    "many": ("llama-3-70b", {"gpus": 1024, "layout": {"tp": 4, "pp": 8, "zero_stage": 1}}),
    "context": ("llama-3-8b", {"gpus": 64, "layout": {"cp": 2, "tp": 2, "pp": 2, "chunks": 4}}),
    "one stage": ("llama-3-8b", {"gpus": 16, "layout": {"pp": 1, "tp": 8}}),
    "small": ("256,8,8,1000,128", {"gpus": 4, "batch_tokens": 4096}),
    "one GPU": ("256,8,8,1000,128", {"gpus": 1, "batch_tokens": 4096}),
}


@pytest.fixture(scope="module", params=PLANS)
def plan(request):
    model, options = PLANS[request.param]
    plan = p101.plan(model, **options, simulate=0, top=6, progress=False)
    best = plan.best
    ran = SimpleNamespace(seconds=best.seconds * 1.05, peak_bytes=(7, 9), mfu=0.5, hfu=0.5)
    layouts = (dataclasses.replace(best, simulated=ran), *plan.layouts[1:])
    return dataclasses.replace(plan, layouts=layouts)


def test_bars_are_as_long_as_their_parts(plan):
    scene = plan.picture()
    assert isinstance(scene, Scene) and scene.narrow
    widths = {}
    for name in ("matmul", "memory-bound", "bubble"):
        for rect, of in zip(titled(scene, f"{name}:"), plan, strict=False):
            widths[name, id(of)] = float(rect.get("width")) / max(of.parts[name], 1e-12)
    shown = [w for (name, of), w in widths.items() if name == "matmul"]
    assert len(shown) == min(len(plan), 5) and max(shown) == pytest.approx(min(shown), rel=1e-2)
    (headroom,) = {
        rect.get("width") for rect in ET.fromstring(scene.svg()).iter(f"{SVG}rect")
        if rect.get("class") == "idle" and rect.get("height") == "22"
    }  # fmt: skip
    scale = float(headroom) / plan.cluster.memory_bytes
    weights = titled(scene, "weights:")[0]
    expected = plan.best.memory[0].weights * scale
    assert float(weights.get("width")) == pytest.approx(expected, abs=0.11)
    assert f"{plan.best.mfu:.1%}" in " ".join(t for t, *_ in text_boxes(scene, 0.0))


def test_every_gpu_that_is_drawn_is_where_the_layout_has_it(plan):
    strides = plan.best.layout.strides
    squares = [of.find(f"{SVG}title").text for of in titled(plan.picture(), "GPU ")]
    assert 0 < len(squares) == len({*squares}) <= 4 * 3 * 8
    for words in squares:
        gpu, places = words.removeprefix("GPU ").split(": ")
        place = dict(text.split() for text in places.split(", "))
        assert place.keys() == strides.keys()
        assert int(gpu) == sum(int(n) * strides[axis] for axis, n in place.items())


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_no_text_leaves_the_card_or_covers_another(plan, narrow):
    assert_apart(plan.picture(), 0.0, narrow)


def test_which_axes_stay_inside_a_node():
    layout = p101.cost.ParallelLayout(dp=4, tp=4, cp=2, pp=2)
    assert crossing(layout, 8) == [
        "Inside a node, on NVLink: tp 4 and cp 2.",
        "Across nodes, on the network: dp 4 and pp 2.",
    ]
    assert crossing(layout, 64) == ["Inside a node, on NVLink: tp 4, cp 2, dp 4 and pp 2."]
