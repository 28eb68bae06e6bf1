"""Plots of measurements: hollow points for what was measured, lines for a model, labels at the lines, log axes.

time │      ╱ ring          `sweep(measured, model)` draws it with matplotlib, as an SVG whose colours follow the page's
     │  ○─○╱  tree          theme, as those of every other picture here do.
     └─────────── bytes
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parallel101.record.units import human_bytes, human_seconds
from parallel101.viz.palette import FONT, LIGHT, PLOTTED, with_colours
from parallel101.viz.scene import Scene

Series = Mapping[str, Mapping[float, float]]
Spread = Mapping[str, Mapping[float, tuple[float, float]]]

WIDTH, HEIGHT, DPI = 960, 420, 72  # at 72 dots per inch, a point is a pixel
MARKERS = "os^Dv"
UNITS = {"bytes": human_bytes, "seconds": human_seconds, "": lambda value: f"{value:,.0f}"}
STYLE: dict[Any, Any] = {
    "font.size": 13,
    "svg.fonttype": "none",
    "svg.hashsalt": "parallel101",
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["mute"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["faint"],
    "xtick.color": LIGHT["mute"],
    "ytick.color": LIGHT["mute"],
    "text.color": LIGHT["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Plot(Scene):
    """A matplotlib figure as a still Scene that follows the page's theme."""

    def __init__(self, figure: Figure, title: str, subtitle: str = ""):
        super().__init__(WIDTH, HEIGHT, title, subtitle)
        self.add("text", title, x=28, y=40, class_="h")
        self.add("text", subtitle, x=28, y=64, font_size=14, class_="m")
        written = io.StringIO()
        with matplotlib.rc_context(STYLE):
            figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
        drawing = written.getvalue()
        self.drawing = _with_variables(drawing[drawing.index("</defs>") + len("</defs>") : drawing.rindex("</svg>")])

    def svg(self, t: float | None = None, smil: bool = False, theme: str | None = None) -> str:
        """The picture as SVG. A plot does not move, so t and smil have no effect."""
        drawing = self.drawing if theme is None else with_colours(self.drawing, theme)
        return super().svg(t, smil, theme).replace("</svg>", drawing + "</svg>")


def sweep(
    measured: Series,
    model: Series | None = None,
    *,
    spread: Spread | None = None,
    title: str,
    subtitle: str = "",
    x: str = "bytes",
    y: str = "seconds",
    x_label: str = "",
) -> Plot:
    """Plot measurements and a model's predictions over a swept size.

    Args:
        measured: {label: {x: y}}, drawn as hollow points.
        model: the same, drawn as lines. A label in both has one colour.
        spread: {label: {x: (lowest, highest)}}, drawn as error bars at the points of `measured`.
        title, subtitle: above the plot.
        x, y: the units: "bytes", "seconds", or "" for plain numbers.
        x_label: the name of the x axis, if the ticks do not say it.

    Returns:
        A Plot, which displays itself in a notebook.

    Raises:
        ValueError: nothing to draw, more than five labels, or a value that is not above zero.
    """
    model, spread = model or {}, spread or {}
    names = list(dict.fromkeys([*model, *measured]))
    values = [v for series in (measured, model) for points in series.values() for pair in points.items() for v in pair]
    values += [v for bars in spread.values() for ends in bars.values() for v in ends]
    if not values or not 1 <= len(names) <= len(MARKERS):
        raise ValueError(f"got {len(names)} labels ({', '.join(names)}): expected 1 to {len(MARKERS)}, with points")
    if min(values) <= 0:
        raise ValueError(f"the axes are logarithmic, and one value is {min(values)}: expected values above zero")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
        axes = figure.add_axes((0.09, 0.12, 0.69, 0.64))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for i, name in enumerate(names):
            colour = LIGHT[PLOTTED[i]]
            if name in model:
                axes.plot(list(model[name]), list(model[name].values()), color=colour, linewidth=1.8)
            if name in measured:
                hollow: dict[str, Any] = {
                    "markerfacecolor": LIGHT["bg"],
                    "markeredgecolor": colour,
                    "markersize": 7,
                    "markeredgewidth": 1.8,
                }
                axes.plot(list(measured[name]), list(measured[name].values()), MARKERS[i], **hollow)
            for x_value, (low, high) in spread.get(name, {}).items():
                axes.plot([x_value, x_value], [low, high], "_-", color=colour, linewidth=1.4, markersize=8, zorder=1)
        _ticks(axes, sorted({v for s in (measured, model) for points in s.values() for v in points}), x, y)
        axes.set_xlabel(x_label, loc="right")
        ends = {name: max({**model.get(name, {}), **measured.get(name, {})}.items()) for name in names}
        _labels(axes, ends)
        return Plot(figure, title, subtitle)


def _ticks(axes: Axes, xs: Sequence[float], x: str, y: str) -> None:
    shown = xs[:: -(-len(xs) // 8)]
    axes.set_xticks(shown, [UNITS[x](v) for v in shown])
    low, high = axes.get_ylim()
    base = 10.0 if y == "seconds" else 2.0
    powers = range(math.ceil(math.log(low, base)), math.floor(math.log(high, base)) + 1)
    axes.set_yticks([base**k for k in powers if k % max(1, -(-len(powers) // 8)) == 0])
    axes.set_yticklabels([UNITS[y](v) for v in axes.get_yticks()])
    axes.minorticks_off()
    axes.tick_params(length=4)


def _labels(axes: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Each label at the end of its line, with labels that would touch pushed apart."""
    right = max(x for x, _ in ends.values())
    heights = {name: axes.transData.transform(point)[1] for name, point in ends.items()}
    bottom, gap = float("-inf"), 19.0
    for i, name in sorted(enumerate(ends), key=lambda item: heights[item[1]]):
        bottom = max(bottom + gap, heights[name])
        at = (axes.transData.transform((right, 1))[0] + 14, bottom)
        axes.annotate(
            name,
            at,
            xycoords="figure pixels",
            va="center",
            color=LIGHT[PLOTTED[i]],
            fontweight="bold",
            fontsize=13,
            annotation_clip=False,
        )


def _with_variables(drawing: str) -> str:
    """Replace the light theme's colours by CSS variables, the font by ours, and xlink:href by href, for an SVG inside a page."""
    names = {LIGHT[name].lower(): name for name in ("bg", "ink", "mute", "line", "faint", *PLOTTED)}
    drawing = re.sub(r"#[0-9a-f]{6}\b", lambda match: f"var(--{names[match[0]]})" if match[0] in names else match[0], drawing)
    drawing = drawing.replace("xlink:href", "href")
    return re.sub(r"'DejaVu Sans'[^;\"]*?sans-serif", FONT.replace('"', "'"), drawing)
