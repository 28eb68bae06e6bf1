"""A scene: SVG elements with keyframes, written once in Python and exported as a still, a loop or a figure with controls.

    circle = scene.add("circle", r=5).key("translate", (0.0, (10, 10)), (1.0, (90, 10)), mode="ease")

A `Node` is an SVG element; `key` says what one of its attributes is at which second. `Scene.svg(t)` draws one moment,
`Scene.svg(smil=True)` lets the SVG play by itself (SMIL: no script), and `html.py` adds the controls.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.viz.palette import FONT, STYLE, THEMES, variables, written_out

MODES = ("linear", "discrete", "ease")
HATCHING = (  #  what `definitions` take, for a class that is filled with url(#hatching)
    '<pattern id="hatching" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" x2="0" y1="0" y2="7" style="stroke:var(--line)" stroke-width="1.6"/></pattern>'
)


class Step(NamedTuple):
    """One step of the story: what "next" plays, and what is read aloud."""

    start: float  #  seconds of the scene's clock
    end: float  #  where "next" comes to rest
    label: str


class Node:
    """An SVG element with keyframes. In attribute names a last underscore goes and the others become hyphens: `class_`, `font_size`."""

    def __init__(self, tag: str, text: object = None, **attributes: Any):
        self.tag = tag
        self.text = None if text is None else str(text)
        self.attributes = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        self.children: list[Node] = []
        self.tracks: dict[str, tuple[str, list[tuple[float, Any]]]] = {}

    def add(self, tag: str, text: object = None, **attributes: Any) -> Node:
        """Append a new element inside this one and return it."""
        child = Node(tag, text, **attributes)
        self.children.append(child)
        return child

    def key(self, attribute: str, *frames: tuple[float, Any], mode: str = "linear") -> Node:
        """Animate an attribute through (second, value) frames. "translate" takes (x, y). Modes: linear, discrete, ease (in and out)."""
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
        if not frames:
            raise ValueError(f"no frames were given for {attribute!r}: pass at least one (second, value) pair")
        self.tracks[attribute] = (mode, sorted(frames, key=lambda frame: frame[0]))
        return self

    def show(self, *spans: tuple[float, float]) -> Node:
        """Make the element visible only in the given [from, to) spans of seconds."""
        frames: dict[float, str] = {0.0: "hidden"}
        for begin, end in sorted(spans):
            frames[begin] = "visible"
            frames[end] = "hidden"
        return self.key("visibility", *frames.items(), mode="discrete")


class Scene(Node):
    """A picture of `width` × `height` that lasts `duration` seconds, in `steps`.

    Attributes:
        steps: what "next" and "previous" move by; empty for a picture that stands still.
        intro: what is said before the first step.
        narrow: (width, height) of the picture on a phone, where each panel stands as its `narrow` says; None where it has no such form.
    """

    def __init__(self, width: int, height: int, title: str, description: str = ""):
        super().__init__("svg")
        self.width, self.height = width, height
        self.title, self.description = title, description
        self.duration = 0.0
        self.steps: list[Step] = []
        self.intro = ""
        self.narrow: tuple[int, int] | None = None
        self.definitions: list[str] = []
        self.style = STYLE

    def __repr__(self) -> str:
        return f"<Scene {self.title!r}: {self.width} × {self.height}, {len(self.steps)} steps, {self.duration:.3g} s>"

    def panel(self, narrow: str, **attributes: Any) -> Node:
        """A group that stands elsewhere on a phone: `narrow` is its transform there, or "none" for a part that is left out."""
        return self.add("g", data_narrow=narrow, **attributes)

    def svg(self, t: float | None = None, smil: bool = False, theme: str | None = None) -> str:
        """The picture as SVG.

        Args:
            t: the second to draw; None is the last one.
            smil: play by itself, in a loop, in place of standing still at t.
            theme: "light" or "dark" for colours written out; None follows the reader's preference.
        """
        if theme is not None and theme not in THEMES:
            raise ValueError(f"theme={theme!r} is not one of {', '.join(THEMES)} (or None, which follows the reader's)")
        t = self.duration if t is None else min(max(t, 0.0), self.duration)
        body = "".join(_element(child, t, self.duration if smil and self.duration else None) for child in self.children)
        if theme is None:
            light, dark = f"svg{{{variables('light')}}}", f"svg{{{variables('dark')}}}"
            colours = f"{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"
        else:
            colours = ""
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" '
            f'role="img" font-family="{FONT}"><title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>'
            f'<style class="theme">{colours}</style><style>svg{{font-variant-numeric:tabular-nums}}{self.style}</style>'
            f"<defs>{''.join(self.definitions)}</defs>"
            f'<rect class="card" x=".5" y=".5" width="{self.width - 1}" height="{self.height - 1}" rx="10"/>'
            f"{body}</svg>"
        )
        return text if theme is None else written_out(text, theme)

    def html(self) -> str:
        """The picture as an HTML fragment with controls: it needs no kernel and no network, and loops where scripts are stripped."""
        from parallel101.viz.html import figure

        return figure(self)

    def _repr_html_(self) -> str:
        return self.html()

    def save(self, path: str | os.PathLike) -> Path:
        """Write a whole page (.html) or a picture that plays by itself (.svg). Returns the path."""
        from parallel101.viz.html import page

        path = Path(path)
        if path.suffix == ".html":
            path.write_text(page(self), encoding="utf-8")
        elif path.suffix == ".svg":
            path.write_text(self.svg(smil=True), encoding="utf-8")
        else:
            raise ValueError(f"{path} ends in {path.suffix or 'nothing'}: a scene is saved as .html (with controls) or .svg (a loop)")
        return path


def value_at(track: tuple[str, list[tuple[float, Any]]], t: float) -> Any:
    """What a track of keyframes says at second t."""
    mode, frames = track
    if t < frames[0][0]:
        return frames[0][1]
    for (begin, before), (end, after) in zip(frames, frames[1:], strict=False):
        if begin <= t < end:
            if mode == "discrete" or before == after:
                return before
            part = (t - begin) / (end - begin)
            part = part * part * (3 - 2 * part) if mode == "ease" else part
            if isinstance(before, tuple):
                return tuple(a + (b - a) * part for a, b in zip(before, after, strict=True))
            return before + (after - before) * part
    return frames[-1][1]


def number(value: Any) -> str:
    """A number as short as SVG allows, at a precision of a hundredth; anything else as it is."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as a piece of a path: many of them make one element."""
    x0, y0, across, down = (number(round(float(v), 1)) for v in (x, y, width, height))
    return f"M{x0} {y0}h{across}v{down}h-{across}z"


def _element(node: Node, t: float, loop: float | None) -> str:
    """One element and all inside it, at second t, or animated through `loop` seconds."""
    attributes, animations = dict(node.attributes), ""
    for name, track in node.tracks.items():
        now = value_at(track, 0.0 if loop else t)
        if name == "visibility" and now == "hidden" and not loop:
            return ""
        if name == "translate":
            attributes["transform"] = f"translate({number(float(now[0]))},{number(float(now[1]))})"
        else:
            attributes[name] = now
        if loop:
            animations += _animation(name, track, loop)
    head = node.tag + "".join(f' {name}="{escape(number(value))}"' for name, value in attributes.items() if value is not None)
    body = escape(node.text, quote=False) if node.text is not None else ""
    body += animations + "".join(_element(child, t, loop) for child in node.children)
    return f"<{head}>{body}</{node.tag}>" if body else f"<{head}/>"


def _animation(name: str, track: tuple[str, list[tuple[float, Any]]], duration: float) -> str:
    """One SMIL element for one track."""
    mode, frames = track
    frames = [(min(max(t, 0.0), duration), value) for t, value in frames]
    if frames[0][0] > 0:
        frames.insert(0, (0.0, frames[0][1]))
    if frames[-1][0] < duration and mode != "discrete":  # a discrete track holds its last value by itself; the others must end at 1
        frames.append((duration, frames[-1][1]))
    times = ";".join(f"{t / duration:.5f}".rstrip("0").rstrip(".") for t, _ in frames)
    values = ";".join(" ".join(number(float(x)) for x in v) if isinstance(v, tuple) else number(v) for _, v in frames)
    how = ""
    if mode == "discrete":
        how = ' calcMode="discrete"'
    elif mode == "ease":
        how = f' calcMode="spline" keySplines="{";".join([".4 0 .6 1"] * (len(frames) - 1))}"'
    tag, kind, target = ("animateTransform", ' type="translate"', "transform") if name == "translate" else ("animate", "", name)
    head = f'<{tag} attributeName="{target}"{kind}{how} dur="{number(duration)}s" repeatCount="indefinite"'
    return f'{head} keyTimes="{times}" values="{values}"/>'
