"""Plots: what was passed is at its place on the axes, labels don't touch, and colours follow the
page; losses are collected from ranks and redrawn in place in a notebook.
"""

from __future__ import annotations

import math
import pickle
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

import parallel101.laboratory.viz.loss_curves as loss
from parallel101.laboratory.viz.loss_curves import LiveLoss, loss_scene
from parallel101.laboratory.viz.palette import THEMES
from parallel101.laboratory.viz.plots import bandwidth, sweep
from tests.viz.drawn import SVG, assert_apart

SIZES = [2.0**k for k in range(6, 27, 4)]
MODEL = {"ring": {s: 1e-4 + s / 1e9 for s in SIZES}, "tree": {s: 3e-5 + s / 1.01e9 for s in SIZES}}
SPREAD = {name: {s: (t / 3, 3 * t) for s, t in of.items()} for name, of in MODEL.items()}
FIVE = {f"{n} ranks": [(0, 3.0), (1, 1 + n / 1000)] for n in range(5)}
POINT = r"M([\d.]+) ([\d.]+)m"


def wide(scene, tag: str) -> list[ET.Element]:
    """The elements that a wide screen shows, without title and sentence."""
    return [*ET.fromstring(scene.svg())[-2].iter(f"{SVG}{tag}")]


def written(scene) -> dict[str, tuple[float, float]]:
    return {t.text: (float(t.get("x")), float(t.get("y"))) for t in wide(scene, "text")}


def lines(scene) -> list[list[tuple[float, ...]]]:
    found = (line.get("points").split() for line in wide(scene, "polyline"))
    return [[tuple(map(float, point.split(","))) for point in line] for line in found]


def paths(scene, look: str) -> list[str]:
    return [e.get("d") for e in wide(scene, "path") if e.get("class") == look]


def test_points_bars_and_lines_are_at_their_values():
    """Logarithms of values lie on a straight line through the ticks of their axis."""
    plot = sweep(MODEL, MODEL, spread=SPREAD, title="a")
    text = written(plot)
    assert {"64 B", "16 KiB", "1 ms", "100 ms", "ring", "tree"} <= {*text}

    def y(seconds: float) -> float:
        (top, low), tall = (text[tick][1] - 4 for tick in ("100 ms", "1 ms")), math.log(100)
        return low - (low - top) * math.log(seconds / 1e-3) / tall

    xs = []
    for i, (name, times) in enumerate(MODEL.items()):
        heights = pytest.approx([*map(y, times.values())], abs=0.2)
        assert [p[1] for p in lines(plot)[i]] == heights
        points = re.findall(POINT, paths(plot, f"l{i} hollow")[0])
        assert [float(b) for _, b in points] == heights
        bars = re.findall(r"M[\d.]+ ([\d.]+)h8m-4 0V([\d.]+)", paths(plot, f"l{i}")[0])
        ends = [end for bar in bars for end in map(float, bar)]
        assert ends == pytest.approx([y(t) for b in SPREAD[name].values() for t in b], abs=0.2)
        xs.append([float(a) for a, _ in points])
    assert all(5 < b - a < 30 for a, b in zip(*xs)), "side by side, as both have bars"
    middles = [(a + b) / 2 for a, b in zip(*xs)]
    assert middles == pytest.approx([p[0] for p in lines(plot)[0]], abs=0.2)


def test_colours_follow_the_theme_and_the_same_numbers_give_the_same_picture():
    for scene in (sweep(MODEL, MODEL, title="a"), loss_scene(FIVE)):
        for theme, colours in THEMES.items():
            assert f"--p1:{colours['p1']};" in scene.svg(), "alone it follows the reader's theme"
            assert "var(" not in scene.svg(theme=theme)
            assert f".l1{{stroke:{colours['p1']}}}" in scene.svg(theme=theme)
    assert sweep(MODEL, title="a").svg() == sweep(MODEL, title="a").svg()
    assert paths(sweep({}, MODEL, title="a"), "l0 hollow") == []


def test_an_axis_has_at_least_two_round_ticks_also_if_all_values_are_close():
    for values, ticks in (
        ({1.0: 0.004, 2.0: 0.03}, {"5 ms", "10 ms", "20 ms"}),
        ({1.0: 1.0, 2.0: 1.04}, {"1 s", "1.02 s", "1.04 s"}),
    ):
        assert ticks <= {*written(sweep({"a": values}, title="a"))}


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "on a phone"])
def test_labels_are_at_their_lines_and_do_not_touch(narrow):
    long = "All-reduce on 4 processes of this machine, which has 2 cores"
    close, apart = (
        {f"{c}-label": {1: 1.0, 64: 2.0 * (1 + e * k)} for k, c in enumerate("abcde")}
        for e in (1e-4, 9.0)
    )
    alone = {"two ranks, then one": [(0, 3.0), (1, 2.0)]}
    plots = [sweep(MODEL, MODEL, title=long, subtitle="Points: measured."), sweep(close, title="a")]
    for scene in (*plots, sweep(apart, title="a"), loss_scene(FIVE), loss_scene(alone)):
        assert_apart(scene, 0.0, narrow)
    assert plots[0].intro == "Points: measured."
    ends = [written(plots[1])[name][1] for name in close]
    assert [round(a - b) for a, b in zip(ends, ends[1:])] == [19] * 4
    last = re.findall(POINT, paths(plots[1], "l2 hollow")[0])[-1]
    assert ends[2] - 4 == pytest.approx(float(last[1]), abs=2)


def test_bandwidth_is_bytes_over_seconds_and_a_function_is_a_smooth_line():
    rates = {name: {s: 1.5 * s / t for s, t in of.items()} for name, of in MODEL.items()}
    bars = {name: {s: (r / 3, 3 * r) for s, r in of.items()} for name, of in rates.items()}
    drawn = bandwidth(MODEL, MODEL, spread=SPREAD, title="a", factor=1.5)
    assert drawn.svg() == sweep(rates, rates, spread=bars, title="a", y="bytes/s").svg()
    smooth = bandwidth(MODEL, {"ring": lambda size: 1e-4 + size / 1e9}, title="a")
    assert len(lines(smooth)[0]) > 40


@pytest.mark.parametrize(("length", "high"), [(1, 2.0), (2, 0.0007), (300, 5.066), (5000, 250.0)])
def test_a_loss_goes_through_its_points_on_an_axis_of_round_numbers(length, high):
    history = SimpleNamespace(steps=range(length), losses=[high / (1 + s) for s in range(length)])
    scene = loss_scene(history)
    (line,), text = lines(scene), written(scene)
    ticks = {t: at[1] - 4 for t, at in text.items() if re.fullmatch(r"[\d.]+", t) and at[0] < 80}
    assert 4 <= len(ticks) <= 8 and all(float(f"{float(t):.1e}") == float(t) for t in ticks)
    base, top = ticks.pop("0"), min(ticks, key=ticks.get)
    scale = (base - ticks[top]) / float(top)
    assert line[0][1] == pytest.approx(base - high * scale, abs=0.3)
    assert line[-1][1] == pytest.approx(base - high / length * scale, abs=0.3)
    assert len(line) <= 1000 and (length == 1 or line[-1][0] == text[f"step {length - 1}"][0])
    assert f"{high / length:.4f}" in text


def test_ranks_add_to_what_the_notebook_draws_and_redraws_in_place(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=shown.append)
    monkeypatch.setattr(loss, "in_notebook", lambda: True)
    monkeypatch.setattr(loss, "INTERVAL", 60.0)
    first = "IPython.display.display", lambda image, display_id: shown.append(image) or handle
    monkeypatch.setattr(*first)
    with LiveLoss("falling", until=3) as live:
        there = pickle.loads(pickle.dumps(live))  # as it travels to a rank
        for step in range(3):
            there.add("2 ranks", step, 3.0 - step)
        with open(live.path, "a", encoding="utf-8") as file:
            file.write('["2 ranks", 3')  # half a line, as if a rank were still writing it
        assert live.update() and live.curves == {"2 ranks": [(0, 3.0), (1, 2.0), (2, 1.0)]}
        assert not live.update()
        with open(live.path, "a", encoding="utf-8") as file:
            file.write(", 0.5]\n")
    assert live.curves["2 ranks"][-1] == (3, 0.5) and not live.path.exists()
    assert re.search(r'<img alt="falling".*data:image/svg\+xml;base64,', shown[0].data)
    assert isinstance(shown[-1], loss.Scene) and "polyline" in shown[-1].svg()
