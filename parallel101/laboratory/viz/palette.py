"""The colours of every picture: a light and a dark theme, and eight chunk colours.

The chunk colours were chosen so that readers with normal, protan, deutan and tritan sight can tell
them apart. Each chunk also has a letter: after eight chunks the colours repeat, but the letters do
not. Scenes use the CSS classes of `STYLE` and name no colours themselves, so a picture follows the
theme of its page.
"""

from __future__ import annotations

import re

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"

COLOURS = {  # in the light theme, and in the dark one
    "bg": ("#ffffff", "#14181f"),
    "ink": ("#1f2933", "#e6eaf0"),
    "mute": ("#5f6c7b", "#9aa7b5"),
    "line": ("#c5ced8", "#3b4654"),
    "hatch": ("#a3b0bd", "#68788b"),
    "faint": ("#eef1f5", "#202733"),
    "accent": ("#0b62a8", "#6cb8f0"),
    "warn": ("#b3480f", "#f0955a"),
    "p0": ("#3B5BDB", "#8EA2FF"),
    "p1": ("#882255", "#E687B4"),
    "p2": ("#117733", "#5FC486"),
    "p3": ("#B3480F", "#F0955A"),
    "p4": ("#5B3E96", "#B79BEA"),
}
LIGHT, DARK = ({name: pair[k] for name, pair in COLOURS.items()} for k in (0, 1))
THEMES = {"light": LIGHT, "dark": DARK}
PLOTTED = ("p0", "p1", "p2", "p3", "p4")  # the lines of a plot, in order

CHUNK = ("#3B5BDB", "#CCBB44", "#117733", "#EE6677", "#66CCEE", "#882255", "#CC79A7", "#5B3E96")
# the colour of text on each of them
ON_CHUNK = ("#fff", "#1f2933", "#fff", "#1f2933", "#1f2933", "#fff", "#1f2933", "#fff")

# The names are short because a picture repeats them hundreds of times: m muted, h heading, b bold,
# c centred, e right-aligned, w warning; f0…f7 filled with a chunk's colour, s0…s7 stroked with it,
# o0…o7 text on it.
STYLE = (
    "text{fill:var(--ink)}.m{fill:var(--mute)}.h{font-size:19px;font-weight:650}"
    ".b{font-weight:600}.c{text-anchor:middle}.e{text-anchor:end}text.w{fill:var(--warn)}"
    ".card{fill:var(--bg);stroke:var(--line)}.faint{fill:var(--faint)}"
    ".link{stroke:var(--line);fill:none}.tip{fill:var(--line)}"
    + "".join(
        f".f{i}{{fill:{fill}}}.s{i}{{stroke:{fill};fill:{fill}}}text.o{i}{{fill:{on}}}"
        for i, (fill, on) in enumerate(zip(CHUNK, ON_CHUNK, strict=True))
    )
)


def variables(theme: str) -> str:
    """Return the CSS declarations of a theme, "light" or "dark"."""
    return "".join(f"--{name}:{colour};" for name, colour in THEMES[theme].items())


def with_colours(svg: str, theme: str) -> str:
    """Replace the CSS variables by a theme's colours, for renderers that lack variables."""
    return re.sub(r"var\(--(\w+)\)", lambda match: THEMES[theme][match[1]], svg)
