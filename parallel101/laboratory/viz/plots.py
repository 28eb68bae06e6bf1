"""Plots: measurements as hollow points, with bars for their spread, and models as lines.

time │      ╱ ring
     │  ○─○╱  tree
     └─────────── bytes

`sweep(measured, model)` draws times, and `bandwidth(measured, model)` bytes per second, both on
logarithmic axes. `draw_plot` is the engine, also for the losses in loss_curves.py: two axes, and
curves with their labels at their ends. It draws twice, because a phone gets its own drawing.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from parallel101.laboratory.record.units import (
    decimal_bytes,
    human_bytes,
    human_seconds,
    round_step,
)
from parallel101.laboratory.viz.palette import PLOTTED
from parallel101.laboratory.viz.scene import END, PHONE, Scene

Series = Mapping[str, Mapping[float, float]]
Spread = Mapping[str, Mapping[float, tuple[float, float]]]
Model = Mapping[str, Mapping[float, float] | Callable[[float], float]]

APART = 19.0  # pixels between two labels
# of what the player shows on phones only
ONLY_NARROW = {"data-narrow": "translate(0,0)", "data-only-narrow": "", "style": "display:none"}
MARKERS = (  # of points, as paths around (0, 0): circle, square, triangle, diamond, triangle
    "m-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
    "m-3.3 -3.3h6.6v6.6h-6.6z",
    "m0 -4l3.8 6.8h-7.6z",
    "m0 -4.4l4.4 4.4l-4.4 4.4l-4.4 -4.4z",
    "m0 4l3.8 -6.8h-7.6z",
)
# of the distance between two sizes: so far apart are the points of one size, if they have bars
BESIDE = 0.17
LINE_POINTS = 61  # of a model that is a function
UNITS = {
    "bytes": human_bytes,
    "seconds": human_seconds,
    "bytes/s": lambda value: f"{decimal_bytes(value)}/s",
    "relative": lambda value: f"{value:.2g}",
    "": lambda value: f"{value:,.0f}",
}
STYLE = (
    ".grid{stroke:var(--faint)}.edge{stroke:var(--line)}.lines *{fill:none;stroke-width:1.8}"
    ".lines .hollow{fill:var(--bg)}"
) + "".join(
    f".lines .l{i}{{stroke:var(--{colour})}}text.l{i}{{fill:var(--{colour})}}"
    for i, colour in enumerate(PLOTTED)
)


class Scale(NamedTuple):
    """An axis: the values at its ends, whether it is logarithmic, and its ticks."""

    low: float
    high: float
    log: bool
    ticks: Sequence[tuple[float, str]]

    def part(self, value: float) -> float:
        """Return where a value is, from 0 at `low` to 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Curve(NamedTuple):
    """A line, or points, or both, with a label at its right end."""

    name: str
    line: Sequence[tuple[float, float]] = ()
    points: Sequence[tuple[float, float]] = ()
    bars: Sequence[tuple[float, float, float]] = ()  # x, and from where to where
    dashes: str | None = None
    value: str = ""  # at the right of its label


def draw_plot(
    title: str,
    subtitle: str,
    height: int,
    curves: Sequence[Curve],
    axes: tuple[Scale, Scale],
    x_label: str = "",
    description: str = "",
) -> Scene:
    """Draw curves along two axes, and return them as a still Scene."""
    scene = Scene(960, height, title, description or subtitle)
    scene.style += STYLE
    top, values = 101.0 if subtitle else 84.0, any(curve.value for curve in curves)
    names = 7.6 * max((len(curve.name) for curve in curves), default=0) + 60 * values
    if names < 240:  # with longer labels, a phone has no room for the curves
        scene.narrow = (PHONE, height)
    scene.head("", subtitle)
    scene.children[0].attributes["data-narrow"] = "none"
    narrow = scene.add("g", **ONLY_NARROW)
    narrow.lines(textwrap.wrap(title, 40), 28, 36, 22, 17, "b")
    x_axis, y_axis = axes
    bottom, marked = height - 46.0, sum(bool(curve.points) for curve in curves) > 1
    for panel, left, most, end in ((scene.panel("none"), 86, 8, END), (narrow, 82, 4, PHONE - 28)):
        right = min(770.0, end - 60, max(end - names - 40, left + 150))

        def x_of(x: float, left: float = left, right: float = right) -> float:
            return left + (right - left) * x_axis.part(x)

        def y_of(y: float) -> float:
            return bottom - (bottom - top) * y_axis.part(y)

        for value, text in [*x_axis.ticks][:: -(-len(x_axis.ticks) // most)]:
            panel.path(f"M{x_of(value):.1f} {top:g}V{bottom + 4:g}", "grid")
            panel.write(text, x_of(value), bottom + 19, 12, "m c")
        for value, text in y_axis.ticks:
            panel.path(f"M{left} {y_of(value):.1f}H{right:g}", "grid")
            panel.write(text, left - 8, y_of(value) + 4, 12, "m e")
        panel.add("path", d=f"M{left} {top:g}V{bottom:g}H{right:g}", class_="edge", fill="none")
        if x_label:
            panel.write(x_label, right, bottom + 37, 12, "m e")
        lines, ends = panel.add("g", class_="lines"), {}
        for i, curve in enumerate(curves):
            if curve.line:
                places = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve.line)
                lines.add("polyline", points=places, class_=f"l{i}", stroke_dasharray=curve.dashes)
            bars = "".join(
                f"M{x_of(x) - 4:.1f} {y_of(low):.1f}h8m-4 0V{y_of(high):.1f}m-4 0h8"
                for x, low, high in curve.bars
            )
            points = "".join(f"M{x_of(x):.1f} {y_of(y):.1f}{MARKERS[i]}" for x, y in curve.points)
            for path, look in ((bars, f"l{i}"), (points, f"l{i} hollow")):
                if path:
                    lines.path(path, look)
            if last := max([*(curve.line or curve.points)], default=None):
                ends[i] = y_of(last[1])
        for i, y in spread_out(ends, bottom - 4).items():
            if marked and curves[i].points:
                lines.path(f"M{right + 18:g} {y:.1f}{MARKERS[i]}", f"l{i} hollow")
            panel.write(curves[i].name, right + 14 + 14 * marked, y + 4, 13, f"b l{i}")
            if curves[i].value:
                panel.write(curves[i].value, end, y + 4, 13, "m e")
    return scene


def spread_out(heights: Mapping[int, float], lowest: float) -> dict[int, float]:
    """Return where labels are: at these heights, and pushed apart if they would touch.

    Labels that would touch are around the middle of their heights. None is below `lowest`.
    """
    groups: list[list[int]] = []

    def middle(group: Sequence[int]) -> float:
        return sum(heights[i] for i in group) / len(group)

    for i in sorted(heights, key=lambda i: heights[i]):
        groups.append([i])
        while len(groups) > 1:
            above, below = groups[-2:]
            if middle(below) - middle(above) >= APART * len(above + below) / 2:
                break
            groups[-2:] = [above + below]
    places: dict[int, float] = {}
    for group in reversed(groups):
        for k, i in reversed([*enumerate(group)]):
            places[i] = min(middle(group) + APART * (k - (len(group) - 1) / 2), lowest)
            lowest = places[i] - APART
    return places


def sweep(
    measured: Series,
    model: Model | None = None,
    *,
    spread: Spread | None = None,
    title: str,
    subtitle: str = "",
    x: str = "bytes",
    y: str = "seconds",
    x_label: str = "",
) -> Scene:
    """Plot measurements and a model's predictions over a swept size.

    Args:
        measured: {label: {x: y}}, drawn as hollow points.
        model: {label: {x: y}}, or {label: a function of x}, drawn as lines. A label in both has one
            colour.
        spread: {label: {x: (lowest, highest)}}, drawn as error bars at the points of `measured`.
            Points of one x are then side by side.
        title, subtitle: above the plot.
        x, y: the units: "bytes", "seconds", "bytes/s", "relative", or "" for whole numbers.
        x_label: the name of the x axis, if the ticks do not say it.

    Returns:
        A still Scene, which displays itself in a notebook.

    Raises:
        ValueError: nothing to draw, more than five labels, or a value that is not above zero.
    """
    model, spread = model or {}, spread or {}
    names = list(dict.fromkeys([*model, *measured]))
    known = [*measured.values(), *(of for of in model.values() if isinstance(of, Mapping))]
    swept = sorted({at for of in known for at in of})
    if not swept or not 1 <= len(names) <= len(MARKERS):
        got = f"got {len(names)} labels ({', '.join(names)})"
        raise ValueError(f"{got}: expected 1 to {len(MARKERS)}, with points")
    ratio, parts = swept[-1] / swept[0] if swept[0] else 1.0, LINE_POINTS - 1
    even = [swept[0] * ratio ** (k / parts) for k in range(LINE_POINTS)]  # evenly on the axis
    lines = {
        name: of if isinstance(of, Mapping) else {size: of(size) for size in even}
        for name, of in model.items()
    }
    values = [v for of in (*measured.values(), *lines.values()) for v in of.values()]
    values += [v for bars in spread.values() for ends in bars.values() for v in ends]
    if not min(values + swept) > 0:
        raise ValueError(
            f"the axes are logarithmic, and one value is {min(values + swept)}: expected values "
            "above zero"
        )
    gap = min((b / a for a, b in itertools.pairwise(swept)), default=1.0) ** (BESIDE * bool(spread))
    # points of one size that have bars are side by side
    shift = {k: gap ** (i - (len(measured) - 1) / 2) for i, k in enumerate(measured)}
    curves = [
        Curve(
            name,
            [*lines.get(name, {}).items()],
            [(at * shift[name], of) for at, of in measured.get(name, {}).items()],
            [(at * shift[name], *ends) for at, ends in spread.get(name, {}).items()],
        )
        for name in names
    ]
    across = _widened([at for curve in curves for at, _ in (*curve.line, *curve.points)])
    low, high = _widened(values)
    heights = log_ticks(low, high, 10.0 if y in ("seconds", "bytes/s") else 2.0)
    axes = (
        Scale(*across, True, [(at, UNITS[x](at)) for at in swept]),
        Scale(low, high, True, [(at, UNITS[y](at)) for at in heights]),
    )
    return draw_plot(title, subtitle, 420, curves, axes, x_label)


def bandwidth(
    measured: Series,
    model: Model | None = None,
    *,
    spread: Spread | None = None,
    title: str,
    subtitle: str = "",
    factor: float = 1.0,
) -> Scene:
    """Plot bytes per second against bytes.

    Where latency decides, the line rises; where bandwidth decides, it is flat.

    Args:
        measured, model, spread: seconds by bytes, as for `sweep`.
        title, subtitle: above the plot.
        factor: by which bytes per second are multiplied. For bus bandwidth (nccl-tests,
            PERFORMANCE.md) it is 2(p−1)/p for an all-reduce, (p−1)/p for an all-gather,
            reduce-scatter or all-to-all, and 1 for a broadcast or reduce.

    Returns, raises: as `sweep`.
    """

    def rate(nbytes: float, seconds: float) -> float:
        if not seconds > 0:
            raise ValueError(f"{human_bytes(nbytes)} took {seconds} s: expected times above zero")
        return factor * nbytes / seconds

    def rates(times: Mapping[float, float] | Callable[[float], float]):
        if isinstance(times, Mapping):
            return {nbytes: rate(nbytes, seconds) for nbytes, seconds in times.items()}
        return lambda nbytes: rate(nbytes, times(nbytes))

    points, lines = ({k: rates(of) for k, of in given.items()} for given in (measured, model or {}))
    bars = {
        name: {n: (rate(n, slow), rate(n, fast)) for n, (fast, slow) in of.items()}
        for name, of in (spread or {}).items()
    }
    return sweep(points, lines, spread=bars, title=title, subtitle=subtitle, y="bytes/s")


def _widened(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis, a little beyond its values."""
    margin = max((max(values) / min(values)) ** 0.05, 1.01)
    return min(values) / margin, max(values) * margin


def log_ticks(low: float, high: float, base: float) -> list[float]:
    """Return powers of the base, or if there are fewer than two, other round numbers."""
    first, end = math.ceil(math.log(low, base)), math.floor(math.log(high, base)) + 1
    ticks = [base**k for k in range(first, end) if k % max(1, -(-(end - first) // 8)) == 0]
    if base == 10 and len(ticks) < 2:  # less than two decades: 1, 2 and 5 times a power
        decades = range(first - 1, end + 1)
        ticks = [k * 10.0**d for d in decades for k in (1, 2, 5) if low <= k * 10.0**d <= high]
    if len(ticks) < 2:  # all values are close to each other
        step = round_step(high - low, 4)
        ticks = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return ticks
