"""Plots measurements as hollow points, with bars for their spread, and models as lines.

time │      ╱ ring
     │  ○─○╱  tree
     └─────────── bytes

`sweep(measured, model)` draws times, and `bandwidth(measured, model)` bytes per second. The axes
are logarithmic, and each line has its label. matplotlib draws an SVG whose colours follow the
page's theme, as in every other picture here.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallel101.extras import needs_extra
from parallel101.laboratory.record.units import decimal_bytes, human_bytes, human_seconds
from parallel101.laboratory.viz.palette import FONT, LIGHT, PLOTTED, with_colours
from parallel101.laboratory.viz.scene import Scene

with needs_extra("A plot"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

Series = Mapping[str, Mapping[float, float]]
Spread = Mapping[str, Mapping[float, tuple[float, float]]]
Model = Mapping[str, Mapping[float, float] | Callable[[float], float]]

# NARROW: on phones. At 72 dots per inch, a point is a pixel
WIDTH, NARROW, HEIGHT, DPI = 960, 480, 420, 72
# left, bottom, width and height of the axes
AREA = {WIDTH: (0.09, 0.12, 0.69, 0.64), NARROW: (0.17, 0.12, 0.43, 0.66)}
APART = 19.0  # pixels between two labels
# of what the player shows on phones only
ONLY_NARROW = {"data-narrow": "translate(0,0)", "data-only-narrow": "", "style": "display:none"}
MARKERS = "os^Dv"
HOLLOW: dict[str, Any] = {"markerfacecolor": LIGHT["bg"], "markersize": 7, "markeredgewidth": 1.8}
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
STYLE: dict[Any, Any] = {
    "font.size": 13,
    "svg.fonttype": "none",
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
    """A still Scene made of matplotlib's figures, which follows the page's theme.

    There are two figures, one WIDTH and one NARROW wide.
    """

    def __init__(self, figures: Mapping[int, Figure], title: str, subtitle: str = ""):
        super().__init__(WIDTH, HEIGHT, title, subtitle)
        self.narrow, self.intro = (NARROW, HEIGHT), subtitle
        head = self.panel(narrow="none")
        head.write(title, 28, 40, None, "h")
        head.write(subtitle, 28, 64, 14, "m")
        narrow_head = self.add("g", **ONLY_NARROW)
        for k, line in enumerate(textwrap.wrap(title, 40)):
            narrow_head.write(line, 28, 36 + 22 * k, 17, "b")
        self.drawing = _drawing(figures[WIDTH], "wide")
        self.narrow_drawing = _drawing(figures[NARROW], "narrow")

    def svg(self, *moment: Any, theme: str | None = None, **options: Any) -> str:
        """Return the picture as SVG. A plot does not move, so other options have no effect."""
        narrow = " ".join(f'{name}="{value}"' for name, value in ONLY_NARROW.items())
        drawing = f'<g data-narrow="none">{self.drawing}</g><g {narrow}>{self.narrow_drawing}</g>'
        drawing = drawing if theme is None else with_colours(drawing, theme)
        return super().svg(theme=theme).replace("</svg>", f"{drawing}</svg>")


def _drawing(figure: Figure, salt: str) -> str:
    """Return a figure as SVG elements, whose ids depend on the salt."""
    written = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    drawing = written.getvalue().partition("</defs>")[2].rpartition("</svg>")[0]
    return _with_variables(drawing)


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
) -> Plot:
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
        A Plot, which displays itself in a notebook.

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
    lines = {name: _line(of, swept[0], swept[-1]) for name, of in model.items()}
    values = swept + [v for of in (*measured.values(), *lines.values()) for v in of.values()]
    values += [v for bars in spread.values() for ends in bars.values() for v in ends]
    if not min(values) > 0:
        raise ValueError(
            f"the axes are logarithmic, and one value is {min(values)}: expected values above zero"
        )
    gap = min((b / a for a, b in itertools.pairwise(swept)), default=1.0)
    shift = BESIDE * bool(spread)
    beside = {k: gap ** (shift * (i - (len(measured) - 1) / 2)) for i, k in enumerate(measured)}

    def figure_of(width: int) -> Figure:
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(width / DPI, HEIGHT / DPI), dpi=DPI)
            axes = figure.add_axes(AREA[width])
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for i, name in enumerate(names):
                colour = LIGHT[PLOTTED[i]]
                if name in lines:
                    line = lines[name]
                    axes.plot(list(line), list(line.values()), color=colour, linewidth=1.8)
                if name in measured:
                    at, of = [x * beside[name] for x in measured[name]], measured[name].values()
                    axes.plot(at, list(of), MARKERS[i], markeredgecolor=colour, **HOLLOW)
                for x_bar, bar in spread.get(name, {}).items():
                    look: dict[str, Any] = {"color": colour, "linewidth": 1.4, "markersize": 8}
                    axes.plot([x_bar * beside[name]] * 2, list(bar), "_-", zorder=1, **look)
            _ticks(axes, swept, x, y, 8 if width == WIDTH else 4)
            axes.set_xlabel(x_label, loc="right")
            ends = {name: max((lines.get(name) or measured[name]).items()) for name in names}
            marked = list(measured) if len(measured) > 1 else []
            _labels(axes, ends, marked, swept[-1] * max(beside.values(), default=1.0))
            return figure

    return Plot({width: figure_of(width) for width in AREA}, title, subtitle)


def bandwidth(
    measured: Series,
    model: Model | None = None,
    *,
    spread: Spread | None = None,
    title: str,
    subtitle: str = "",
    factor: float = 1.0,
) -> Plot:
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

    def rates(seconds: Mapping[float, float]) -> Mapping[float, float]:
        return {n: rate(n, t) for n, t in seconds.items()}

    lines: dict[str, Any] = {
        name: rates(of) if isinstance(of, Mapping) else lambda n, of=of: rate(n, of(n))
        for name, of in (model or {}).items()
    }
    bars = {
        name: {n: (rate(n, slow), rate(n, fast)) for n, (fast, slow) in of.items()}
        for name, of in (spread or {}).items()
    }
    points = {name: rates(of) for name, of in measured.items()}
    return sweep(points, lines, spread=bars, title=title, subtitle=subtitle, y="bytes/s")


def _line(
    model: Mapping[float, float] | Callable[[float], float], first: float, last: float
) -> Mapping[float, float]:
    """Return the points of a model's line.

    A function is evaluated at sizes that are evenly spaced on the axis.
    """
    if isinstance(model, Mapping):
        return model
    sizes = [first * (last / first) ** (k / (LINE_POINTS - 1)) for k in range(LINE_POINTS)]
    return {size: model(size) for size in sizes}


def _ticks(axes: Axes, xs: Sequence[float], x: str, y: str, most: int) -> None:
    shown = xs[:: -(-len(xs) // most)]
    axes.set_xticks(shown, [UNITS[x](v) for v in shown])
    low, high = axes.get_ylim()
    base = 10.0 if y in ("seconds", "bytes/s") else 2.0
    powers = range(math.ceil(math.log(low, base)), math.floor(math.log(high, base)) + 1)
    ticks = [base**k for k in powers if k % max(1, -(-len(powers) // 8)) == 0]
    if base == 10 and len(ticks) < 2:  # less than two decades: 1, 2 and 5 times a power
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        ticks = [k * 10.0**d for d in decades for k in (1, 2, 5) if low <= k * 10.0**d <= high]
    if len(ticks) < 2:  # all values are close to each other
        ticks = [v for v in MaxNLocator(4).tick_values(low, high) if low <= v <= high]
    axes.set_yticks(ticks)
    axes.set_yticklabels([UNITS[y](v) for v in axes.get_yticks()])
    axes.minorticks_off()
    axes.tick_params(length=4)


def _labels(
    axes: Axes, ends: Mapping[str, tuple[float, float]], marked: Sequence[str], right: float
) -> None:
    """Draw each label at the end of its line, after the mark of its points if it is `marked`.

    Labels that would touch are pushed apart, around the middle.
    """
    heights = {name: axes.transData.transform(point)[1] for name, point in ends.items()}
    names = list(ends)
    groups: list[list[str]] = []
    for name in sorted(names, key=lambda name: heights[name]):
        groups.append([name])
        while len(groups) > 1:
            (*_, below, above), room = groups, APART * len(groups[-2] + groups[-1]) / 2
            if _middle(above, heights) - _middle(below, heights) >= room:
                break
            groups[-2:] = [below + above]
    x = axes.transData.transform((right, 1))[0] + 14
    for group in groups:
        for k, name in enumerate(group):
            y = _middle(group, heights) + APART * (k - (len(group) - 1) / 2)
            colour, i = LIGHT[PLOTTED[names.index(name)]], names.index(name)
            if name in marked:
                look = {"marker": MARKERS[i], "color": colour, "clip_on": False, **HOLLOW}
                axes.plot([x + 4], [y], transform=None, **look)
            style: dict[str, Any] = {"fontweight": "bold", "fontsize": 13, "color": colour}
            style |= {"xycoords": "figure pixels", "va": "center", "annotation_clip": False}
            axes.annotate(name, (x + (14 if marked else 0), y), **style)


def _middle(group: Sequence[str], heights: Mapping[str, float]) -> float:
    return sum(heights[name] for name in group) / len(group)


def _with_variables(drawing: str) -> str:
    """Adapt an SVG to a page.

    The light theme's colours become CSS variables, the font becomes ours, and xlink:href becomes
    href.
    """
    names = {LIGHT[name].lower(): name for name in ("bg", "ink", "mute", "line", "faint", *PLOTTED)}
    for colour, name in names.items():
        drawing = re.sub(rf"{colour}\b", f"var(--{name})", drawing)
    drawing = drawing.replace("xlink:href", "href")
    return re.sub(r"'DejaVu Sans'[^;\"]*?sans-serif", FONT.replace('"', "'"), drawing)
