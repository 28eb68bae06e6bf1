"""A scene: SVG elements with keyframes, for a still, a loop or a figure with controls.

    circle = scene.add("circle", r=5)
    circle.key("translate", (0.0, (10, 10)), (1.0, (90, 10)), mode="ease")

    Scene.svg(t)           one moment
    Scene.svg(smil=True)   an SVG that plays in a loop (SMIL animation, no script)
    Scene.save("a.svg")    that loop, and the last moment for readers who prefer reduced motion
    Scene.html()           that loop in an <img>, and a script (player.js) that replaces it with
                           controls: play, step and scrub

Nothing is fetched: the SVG is a data URI and the script is part of the HTML. If a page removes
scripts, the loop still plays. What the pictures show is in the other files of this folder, one file
for each kind of picture.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.laboratory.viz.palette import FONT, STYLE, THEMES, variables, with_colours

Point = tuple[float, float]  # (x, y), in units of the picture
Box = tuple[float, float, float, float]  # x, y, width, height
MODES = ("linear", "discrete", "ease")
END = 932.0  # the right end of what is written in a picture
TO_CHROME = "use fewer, or write run.trace.to_chrome(path) and open it at ui.perfetto.dev"
PHONE = 480  # the width of a picture on phones
HATCHING = (  # every scene has it: fill a class with url(#hatching)
    '<pattern id="hatching" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line x1="0" x2="0" y1="0" y2="7" style="stroke:var(--hatch)" '
    'stroke-width="1.6"/></pattern>'
)


class Stop(NamedTuple):
    """One stop of the player: the button "next" plays up to its end.

    A screen reader reads its label.
    """

    start: float  # seconds from the start of the scene
    end: float
    label: str


class Node:
    """An SVG element with keyframes.

    Attribute names are SVG's, with underscores for hyphens (`font_size`). A trailing underscore is
    dropped (`class_`).
    """

    def __init__(self, tag: str, text: object = None, **attributes: Any):
        self.tag = tag
        self.text = None if text is None else str(text)
        self.attributes = {
            name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()
        }
        self.children: list[Node] = []
        self.tracks: dict[str, tuple[str, list[tuple[float, Any]]]] = {}

    def add(self, tag: str, text: object = None, **attributes: Any) -> Node:
        """Append a new element inside this one and return it."""
        child = Node(tag, text, **attributes)
        self.children.append(child)
        return child

    def write(
        self, text: object, x: Any, y: float, size: Any = None, class_: str = "", **attributes: Any
    ) -> Node:
        """Append a text whose first line stands on (x, y), and return it.

        Classes: "h" is a heading, "b" bold, "m" muted; "c" is centred on x, "e" ends there.
        """
        look = {"font_size": size, "class_": class_ or None}
        return self.add("text", text, x=x, y=y, **look, **attributes)

    def rect(
        self, x: float, y: float, width: float, height: float, class_: str, **attributes: Any
    ) -> Node:
        """Append a rectangle, and return it. `title`: its tooltip."""
        title = attributes.pop("title", None)
        box = {"x": x, "y": y, "width": width, "height": height}
        rect = self.add("rect", **box, class_=class_, **attributes)
        if title:
            rect.add("title", title)
        return rect

    def label(
        self, text: Any, box: Box, class_: str, size: float = 12, smallest: float = 12, **more: Any
    ) -> Node | None:
        """Write a text in the middle of a box, and return it; None if there is no room for it.

        It is as large as the box allows: at most `size`, and at least `smallest`.
        """
        x, y, width, height = box
        room = min(size, height, (width - 4) / (0.6 * max(len(str(text)), 1)))
        if room < smallest:
            return None
        middle = y + height / 2 + 0.35 * room
        return self.write(text, x + width / 2, middle, room, f"{class_} c".strip(), **more)

    def lines(
        self, texts: Iterable[object], x: Any, y: float, step: float, size: Any, class_: str = ""
    ) -> None:
        """Append texts, one below the other, each `step` pixels lower."""
        for k, text in enumerate(texts):
            self.write(text, x, y + step * k, size, class_)

    def path(self, d: str, class_: str, **attributes: Any) -> Node:
        """Append a path, and return it."""
        return self.add("path", d=d, class_=class_, **attributes)

    def key(self, attribute: str, *frames: tuple[float, Any], mode: str = "linear") -> Node:
        """Animate an attribute through (second, value) frames.

        The value of "translate" is (x, y). `mode` is one of MODES.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown: expected one of {', '.join(MODES)}")
        if not frames:
            raise ValueError(
                f"key() got no frames for {attribute!r}: pass at least one (second, value) pair"
            )
        self.tracks[attribute] = (mode, sorted(frames, key=lambda frame: frame[0]))
        return self

    def show(self, *spans: tuple[float, float]) -> Node:
        """Make the element visible only during the given [begin, end) spans of seconds."""
        frames: dict[float, str] = {0.0: "hidden"}
        for begin, end in sorted(spans):
            frames[begin] = "visible"
            frames[end] = "hidden"
        return self.key("visibility", *frames.items(), mode="discrete")


class Scene(Node):
    """A picture of `width` × `height`, with an animation of `duration` seconds.

    Attributes:
        stops: where "next" and "previous" go; empty for a still picture.
        intro: the caption before the first stop. On phones it is below the picture, also of a
            still, where it can wrap.
        narrow: (width, height) of the layout for phones, in which each panel moves to its `narrow`;
            None if there is no such layout.
        definitions: SVG elements for <defs>. HATCHING is there already.
        style: CSS rules.
    """

    def __init__(self, width: int, height: int, title: str, description: str = ""):
        super().__init__("svg")
        self.width, self.height = width, height
        self.title, self.description = title, description
        self.duration = 0.0
        self.stops: list[Stop] = []
        self.intro = ""
        self.narrow: tuple[int, int] | None = None
        self.definitions = [HATCHING]
        self.style = STYLE

    def __repr__(self) -> str:
        return (
            f"<Scene {self.title!r}: {self.width} × {self.height}, {len(self.stops)} stops, "
            f"{self.duration:.3g} s>"
        )

    def panel(self, narrow: str, **attributes: Any) -> Node:
        """Add a group that moves in the layout for phones, and return it.

        `narrow` is its transform there, or "none" to leave it out.
        """
        return self.add("g", data_narrow=narrow, **attributes)

    def head(self, facts: str, sentence: str, size: float = 14) -> None:
        """Write the title, the facts at its right, and below it a sentence, also the caption.

        On phones only the title stays, because the caption is below the picture.
        """
        self.panel(narrow="translate(0,0)").write(self.title, 28, 40, None, "h")
        wide = self.panel(narrow="none")
        if facts:
            wide.write(facts, END, 40, 13, "m e")
        if sentence:
            wide.write(sentence, 28, 64, size, "m")
        self.intro = sentence

    def legend(
        self, entries: Iterable[tuple[str, str]], y: float = 80.0, x: float = 28.0, low: int = 0
    ) -> int:
        """Draw a row of coloured boxes, each with its label, from `x` on: (label, class).

        Entries that do not fit into the picture's width are left out, and "…" says so. On phones
        they take several lines. Returns by how much what is below it is lower there.

        Args:
            y: of the boxes' top.
            low: by how much the legend itself is lower on phones.
        """
        start = x
        for label, class_ in entries:
            wide = 38 + 7 * len(label)
            if x + wide - 18 > END:
                self.write("…", x, y + 9, 12.5, "m")
                break
            if x - start + wide > 396:  # on phones it goes into the next line
                start, low = x, low + 18
            entry = self.panel(narrow=f"translate({28 - start:g},{low})")
            outline = "stroke:var(--line)" if class_ == "idle" else None
            entry.rect(x, y, 14, 10, class_, rx=2, style=outline)
            entry.write(label, x + 20, y + 9, 12.5, "m")
            x += wide
        return low

    def columns(
        self, left: float, right: float, narrow: float, low: int = 0
    ) -> tuple[Node, Node, Node, Node]:
        """Return panels for names, for bars, for what is written in bars, and for numbers.

        On phones they are `low` pixels lower. The bars, from `left` to `right`, are squeezed there
        to end at `narrow`, and nothing is written in them. The numbers are at the right.
        """
        k = (narrow - left) / (right - left)
        return (
            self.panel(f"translate(0,{low})"),
            self.panel(f"translate({left * (1 - k):.1f},{low}) scale({k:.4f},1)"),
            self.panel("none"),
            self.panel(f"translate({PHONE - self.width},{low})"),
        )

    def svg(
        self,
        t: float | None = None,
        smil: bool = False,
        theme: str | None = None,
        still: bool = False,
    ) -> str:
        """Return the picture as SVG.

        Args:
            t: the second to draw; None: the last one.
            smil: draw a loop that plays, instead of the moment t.
            theme: "light" or "dark" for fixed colours; None: the reader's preference.
            still: with `smil`, show the moment t in place of the loop to readers who prefer reduced
                motion, and on paper. The file needs no page around it for that.
        """
        if theme is not None and theme not in THEMES:
            raise ValueError(
                f"theme={theme!r} is unknown: expected one of {', '.join(THEMES)}, or None for the "
                "reader's preference"
            )
        t = self.duration if t is None else min(max(t, 0.0), self.duration)
        plays = smil and self.duration > 0
        body = self._body(t, self.duration if plays else None)
        style, colours = self.style, ""
        if plays and still:
            body = f'<g class="loop">{body}</g><g class="still">{self._body(t, None)}</g>'
            style += _LOOP_OR_STILL
        if theme is None:
            light, dark = f"svg{{{variables('light')}}}", f"svg{{{variables('dark')}}}"
            colours = f"{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" '
            f'role="img" font-family="{FONT}">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
            f'<style class="theme">{colours}</style>'
            f"<style>svg{{font-variant-numeric:tabular-nums}}{style}</style>"
            f"<defs>{''.join(self.definitions)}</defs>"
            f'<rect class="card" x=".5" y=".5" width="{self.width - 1}" '
            f'height="{self.height - 1}" rx="10"/>'
            f"{body}</svg>"
        )
        return text if theme is None else with_colours(text, theme)

    def _body(self, t: float, loop: float | None) -> str:
        return "".join(_element(child, t, loop) for child in self.children)

    @property
    def alt(self) -> str:
        """The picture in words."""
        return f"{self.title}. {self.description}".strip()

    def player_setup(self) -> dict[str, Any]:
        """Return the data that `mount` in player.js needs besides the SVG and the style sheet."""
        stops = [[round(stop.start, 3), round(stop.end, 3), stop.label] for stop in self.stops]
        return {
            "duration": self.duration,
            "stops": stops,
            "intro": self.intro,
            "narrow": self.narrow,
        }

    def html(self) -> str:
        """Return the picture with controls, as HTML for a notebook cell or any page.

        The same scene gives the same text, byte for byte.
        """
        loop = self.svg(smil=True)
        name = "p101-" + hashlib.sha256(loop.encode()).hexdigest()[:12]
        setup = self.player_setup() | {"css": PLAYER_CSS}
        alt, still = escape(self.alt), ""
        if self.stops:
            reduced = "(prefers-reduced-motion: reduce)"
            still = f'<source media="{reduced}" srcset="{data_uri(self.svg())}">'
        return (
            f'<figure id="{name}" class="p101" aria-label="{escape(self.title)}" '
            'data-lm-suppress-shortcuts="true" '
            f'style="margin:0;max-width:{self.width}px">'
            f'<picture>{still}<img src="{data_uri(loop)}" alt="{alt}" '
            'style="width:100%;height:auto"></picture></figure>'
            f"<script>(() => {{\n{PLAYER}\n"
            f"document.querySelectorAll('#{name}').forEach(figure => mount(figure, "
            f"{script_json(setup)}));\n}})()</script>"
        )

    def page(self) -> str:
        """Return the picture as a whole HTML page, in the reader's theme."""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{escape(self.title)}</title>"
            f"<style>body{{margin:24px auto;max-width:{self.width}px;padding:0 12px}}"
            "@media (prefers-color-scheme:dark){body{background:#0e1116}}</style></head>"
            f"<body>{self.html()}</body></html>\n"
        )

    _repr_html_ = html

    def save(self, path: str | os.PathLike) -> Path:
        """Write the scene as the kind of file that the name's ending asks for.

        .html is a page with controls. .svg plays in a loop, also as an image in a README; readers
        who prefer reduced motion see its last moment. With Chromium, .png is the last moment and
        .gif the animation, both in light colours for slides. Returns the path.
        """
        path = Path(path)
        from parallel101.laboratory.viz.chromium import gif, png

        light = partial(self.svg, theme="light")
        writers = {
            ".html": lambda: self.page().encode(),
            ".svg": lambda: self.svg(smil=True, still=True).encode(),
            ".png": lambda: png(light(), 2 * self.width, 2 * self.height),
            ".gif": lambda: gif(light, self.duration, self.width, self.height),
        }
        if path.suffix not in writers:
            ends = ", ".join(writers).replace(", .gif", " or .gif")
            raise ValueError(f"can't save a scene as {path}: expected a name that ends in {ends}")
        path.write_bytes(writers[path.suffix]())
        return path


# display and not visibility, which the animations inside set
_LOOP_OR_STILL = (
    ".still{display:none}"
    "@media (prefers-reduced-motion:reduce),print{.loop{display:none}.still{display:inline}}"
)
_HERE = Path(__file__).parent
PLAYER = (_HERE / "player.js").read_text(encoding="utf-8")
PLAYER_CSS = (_HERE / "player.css").read_text(encoding="utf-8")
for _theme in THEMES:
    PLAYER_CSS = PLAYER_CSS.replace(f"/*{_theme.upper()}*/", variables(_theme))


def check_ranks(ranks: int, most: int, instead: str = "use fewer") -> None:
    """Raise a ValueError, which says what to do instead, for more ranks than a picture can show."""
    if ranks > most:
        raise ValueError(
            f"the run has {ranks} ranks, and this picture can show up to {most}: {instead}"
        )


def check_drawn(count: int, most: int, words: str, unit: str = "") -> None:
    """Raise a ValueError unless there are 1 to `most` to draw. `words`: what there is."""
    if not 0 < count <= most:
        raise ValueError(f"{words}: expected 1 to {most}{unit} to draw")


def in_two_lines(text: str) -> list[str]:
    """Cut a text at the space that is nearest to its middle."""
    spaces = [i for i, letter in enumerate(text) if letter == " "]
    middle = min(spaces, key=lambda i: abs(i - len(text) / 2))
    return [text[:middle], text[middle + 1 :]]


def data_uri(svg: str) -> str:
    """Return an SVG as the `src` of an <img>."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def script_json(value: object) -> str:
    """Return JSON that is safe inside a <script>: it has no "</script>" and no "<!--"."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def value_at(track: tuple[str, list[tuple[float, Any]]], t: float) -> Any:
    """Return the value of a track of keyframes at second t."""
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
    """Return a float as short text, rounded to hundredths; anything else as `str` gives it."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as a piece of a path, so that many of them fit into one element."""
    x0, y0, across, down = (f"{v:.1f}".removesuffix(".0") for v in (x, y, width, height))
    return f"M{x0} {y0}h{across}v{down}h-{across}z"


def _element(node: Node, t: float, loop: float | None) -> str:
    """Return an element and its children as text, at second t or as a loop of `loop` seconds."""
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
    head = node.tag + "".join(
        f' {name}="{escape(number(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    body = escape(node.text, quote=False) if node.text is not None else ""
    body += animations + "".join(_element(child, t, loop) for child in node.children)
    return f"<{head}>{body}</{node.tag}>" if body else f"<{head}/>"


def _animation(name: str, track: tuple[str, list[tuple[float, Any]]], duration: float) -> str:
    """Return the SMIL element of one track."""
    mode, frames = track
    frames = [(min(max(t, 0.0), duration), value) for t, value in frames]
    if frames[0][0] > 0:
        frames.insert(0, (0.0, frames[0][1]))
    # the times of all but discrete tracks must end at 1
    if frames[-1][0] < duration and mode != "discrete":
        frames.append((duration, frames[-1][1]))
    times = ";".join(f"{t / duration:.5f}".rstrip("0").rstrip(".") for t, _ in frames)
    values = ";".join(
        " ".join(number(float(x)) for x in v) if isinstance(v, tuple) else number(v)
        for _, v in frames
    )
    how = "" if mode == "linear" else f' calcMode="{mode}"'
    if mode == "ease":
        splines = ";".join([".4 0 .6 1"] * (len(frames) - 1))
        how = f' calcMode="spline" keySplines="{splines}"'
    tag, target = "animate", name
    if name == "translate":
        tag, target = "animateTransform", 'transform" type="translate'
    return (
        f'<{tag} attributeName="{target}"{how} dur="{number(duration)}s" '
        f'repeatCount="indefinite" keyTimes="{times}" values="{values}"/>'
    )
