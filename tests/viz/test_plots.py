"""Plots: hollow points for measurements, a line for the model, labels that do not touch, and
the page's colours.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from parallel101.laboratory.viz.palette import LIGHT, PLOTTED, THEMES
from parallel101.laboratory.viz.plots import HEIGHT, NARROW, bandwidth, sweep

SIZES = [2.0**k for k in range(6, 27, 4)]
MODEL = {"ring": {s: 1e-4 + s / 1e9 for s in SIZES}, "tree": {s: 3e-5 + s / 1.01e9 for s in SIZES}}


def heights(svg: str, *labels: str) -> list[float]:
    """The y of each label, in pixels from the top."""
    return [float(re.search(rf'<text[^>]* y="([\d.]+)"[^>]*>{label}<', svg)[1]) for label in labels]


def test_a_sweep_is_drawn_in_the_pages_colours():
    plot = sweep(MODEL, MODEL, title="Time against size", subtitle="points measured")
    svg = plot.svg()
    ET.fromstring(svg)
    assert "Time against size" in svg
    assert "points measured" in svg
    assert "4 MiB" in svg
    assert "1 ms" in svg
    assert not set(re.findall(r"#[0-9a-f]{6}", plot.drawing)) & {
        LIGHT[name].lower() for name in PLOTTED
    }
    assert "var(--p0)" in plot.drawing and "fill: var(--bg)" in plot.drawing
    for theme, colours in THEMES.items():
        assert f"--p1:{colours['p1']};" in svg, "alone it follows the reader's theme"
        assert "var(" not in plot.svg(theme=theme)
        assert f"stroke: {colours['p1']}" in plot.svg(theme=theme)


def test_an_axis_of_less_than_two_decades_has_ticks_in_between():
    drawn = sweep({"a": {1.0: 0.004, 2.0: 0.03}}, title="a").drawing
    assert all(f">{tick} ms<" in drawn for tick in (5, 10, 20))


def test_the_same_numbers_give_the_same_picture():
    assert sweep(MODEL, title="a").svg() == sweep(MODEL, title="a").svg()


def test_labels_that_would_touch_are_pushed_apart():
    a, b = heights(sweep(MODEL, title="a").svg(), "ring", "tree")
    assert abs(a - b) >= 18


def test_points_and_the_marks_of_labels_are_hollow_and_lines_have_no_points():
    points, lines = sweep(MODEL, title="a").drawing, sweep({}, MODEL, title="a").drawing
    assert points.count("fill: var(--bg)") == 2 * len(SIZES) + 2 and "fill: var(--bg)" not in lines


def test_the_spread_is_drawn_as_bars_within_the_axes():
    spread = {"ring": {s: (t / 3, 3 * t) for s, t in MODEL["ring"].items()}}
    without, with_bars = sweep(MODEL, title="a"), sweep(MODEL, spread=spread, title="a")
    assert len(re.findall(r"<path|<use", with_bars.drawing)) >= len(
        re.findall(r"<path|<use", without.drawing)
    ) + 3 * len(SIZES)
    ET.fromstring(with_bars.svg())
    with pytest.raises(ValueError, match="one value is 0"):
        sweep(MODEL, spread={"ring": {64.0: (0, 1)}}, title="a")


def test_points_of_one_size_with_bars_stand_side_by_side():
    spread = {name: {s: (t / 2, 2 * t) for s, t in of.items()} for name, of in MODEL.items()}
    alone, together = (
        {name: MODEL[name] for name in names} for names in (["ring"], ["ring", "tree"])
    )
    at = [
        re.findall(
            r'<use [^>]*x="([\d.]+)"', sweep(m, spread={n: spread[n] for n in m}, title="a").drawing
        )
        for m in (alone, together)
    ]
    columns = [len({float(x) for x in xs}) for xs in at]
    assert columns[1] - columns[0] > len(SIZES)


def test_five_labels_that_would_touch_lie_around_their_lines():
    names = ["a-label", "b-label", "c-label", "d-label", "e-label"]
    alike, apart = (
        {name: {1: 1.0, 64: 2.0 * (1 + e * k)} for k, name in enumerate(names)} for e in (1e-4, 9.0)
    )
    first = heights(sweep(alike, title="a").svg(), *names)
    assert [round(a - b) for a, b in zip(first, first[1:])] == [19] * 4
    (alone,) = heights(
        sweep({names[2]: alike[names[2]]}, model={names[0]: alike[names[0]]}, title="a").svg(),
        names[0],
    )
    assert abs(first[2] - alone) < 19
    wide = heights(sweep(apart, title="a").svg(), *names)
    assert wide == sorted(wide, reverse=True)


def test_bandwidth_is_bytes_over_seconds():
    times = {size: 1e-4 + size / 1e9 for size in SIZES}
    spread = {"ring": {size: (t / 2, 3 * t) for size, t in times.items()}}
    plot = bandwidth({"ring": times}, {"ring": times}, spread=spread, title="a", factor=1.5)
    rates = {"ring": {size: 1.5 * size / t for size, t in times.items()}}
    bars = {"ring": {size: (rate / 3, 2 * rate) for size, rate in rates["ring"].items()}}
    assert heights(plot.svg(), "1 GB/s", "1 MB/s") == heights(
        sweep(rates, rates, spread=bars, title="a", y="bytes/s").svg(), "1 GB/s", "1 MB/s"
    )
    with pytest.raises(ValueError, match=r"64 B took 0\.0 s: expected times above zero"):
        bandwidth({"ring": {64: 0.0}}, title="a")


def test_a_model_that_is_a_function_is_a_smooth_line():
    points = {"ring": dict.fromkeys(SIZES, 1.0)}
    few, many = (
        sweep(points, MODEL, title="a"),
        sweep(points, {"ring": lambda size: 1e-4 + size / 1e9}, title="a"),
    )
    assert many.drawing.count("\nL ") > few.drawing.count("\nL ") + 40


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({}, "got 0 labels"),
        ({str(i): {1: 1.0} for i in range(6)}, "got 6 labels"),
        ({"a": {1: 0.0}}, r"one value is 0\.0: expected"),
    ],
)
def test_wrong_data_is_refused(measured, message):
    with pytest.raises(ValueError, match=message):
        sweep(measured, title="a")


def test_on_a_phone_the_labels_are_inside_the_card():
    plot = sweep(
        MODEL,
        MODEL,
        title="All-reduce on 4 processes of this machine, which has 2 cores",
        subtitle="Points: measured.",
    )
    assert plot.narrow == (NARROW, HEIGHT) and plot.intro == "Points: measured."
    for label in MODEL:
        x = float(re.search(rf'<text[^>]* x="([\d.]+)"[^>]*>{label}<', plot.narrow_drawing)[1])
        assert x + 0.65 * 13 * len(label) < NARROW
    svg = plot.svg()
    assert f'<g data-narrow="none">{plot.drawing}</g>' in svg
    assert svg.count('style="display:none"') == 2
