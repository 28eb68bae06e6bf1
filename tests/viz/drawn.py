"""Helpers of the tests of drawings: spans to draw, and the bars that were drawn."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any

from parallel101.laboratory.record.events import NO_GROUP, Event, EventGroup
from parallel101.laboratory.viz.scene import Scene

SVG = "{http://www.w3.org/2000/svg}"


WORLD = EventGroup("world", (0, 1), None)


def event(kind: str, rank: int, start: float, end: float, nbytes: int = 8, **more: Any) -> Event:
    """A message, or a collective. `more`: its other fields."""
    when = start, end, "train.py:9", start
    made = Event(rank, kind, None, 0, nbytes, *when, WORLD, 0, (nbytes // 4,), "float32")
    return made._replace(**more)


def span(
    rank: int, name: str, start: float, end: float, seq: int = 0, waiting: bool = False, **labels
) -> Event:
    about = {"where": "train.py:7", "name": name, "args": labels, "waiting": waiting}
    return event("span", rank, start, end, 0, seq=seq, group=NO_GROUP, **about)


def elements(
    scene: Scene, tag: str, class_: str = ".*", t: float | None = None
) -> list[ET.Element]:
    """The elements at second t, or the last, with this tag and a class of this form."""
    found = ET.fromstring(scene.svg(t)).iter(f"{SVG}{tag}")
    return [e for e in found if re.fullmatch(class_, e.get("class", ""))]


def titled(scene: Scene, word: str, tag: str = "rect") -> list[ET.Element]:
    """The rectangles, or other elements, whose tooltip contains this word."""
    return [e for e in elements(scene, tag) if word in e.findtext(f"{SVG}title", "")]


def title_of(element: ET.Element) -> str:
    return element.findtext(f"{SVG}title", "")


def assert_inside(scene: Scene, t: float | None = None) -> None:
    """No rectangle leaves the card."""
    for rect in elements(scene, "rect", t=t):
        x, y, across, down = (float(rect.get(k, 0)) for k in ("x", "y", "width", "height"))
        assert x + across <= scene.width and y + down <= scene.height, rect.attrib


Box = tuple[str, float, float, float, float]


def text_boxes(scene: Scene, t: float, narrow: bool = False, sends: bool = False) -> list[Box]:
    """(text, left, top, right, bottom) of all texts at second t, as large as in DejaVu Sans: a
    letter is up to 0.52 of the font size wide, or 0.6 in bold.

    `narrow`: as the player lays them out on a phone. `sends`: also the bars below a collective,
    on a phone, which are as high as their cursor.
    """
    found = []

    def walk(node: ET.Element, dx: float, dy: float, scale: float) -> None:
        if node.get("data-narrow") == "none" if narrow else "data-only-narrow" in node.attrib:
            return
        if narrow and node.get("data-narrow"):
            node.set("transform", node.get("data-narrow"))
        moved = re.search(r"translate\((\S+?),(\S+?)\)", node.get("transform", ""))
        scaled = re.search(r"scale\(([\d.]+)\)", node.get("transform", ""))  # and not of x only
        if moved:
            dx, dy = dx + scale * float(moved[1]), dy + scale * float(moved[2])
        scale *= float(scaled[1]) if scaled else 1.0
        if node.tag == f"{SVG}text" and "rotate" not in node.get("transform", ""):
            text, classes = "".join(node.itertext()), node.get("class", "").split()
            usual = 19 if "h" in classes else 10 if "flagged" in classes else 14
            size = float(node.get("font-size", usual))
            letter = 0.6 if "b" in classes else 0.52
            width = max(letter * len(text), 0.65) * size * scale
            shift = width / 2 if "c" in classes else width if "e" in classes else 0
            left = dx + scale * float(node.get("x", 0)) - shift
            y = dy + scale * float(node.get("y", 0))
            high = size * scale
            found.append((text, left, y - 0.72 * high, left + width, y + 0.2 * high))
        if sends and node.get("class") == "now":
            top, bottom = (dy + scale * float(y) for y in node.get("d")[3:].split("V"))
            found.append(("the sends", 28.0, top, 452.0, bottom))
        for child in node:
            walk(child, dx, dy, scale)

    walk(ET.fromstring(scene.svg(t, theme="dark")), 0.0, 0.0, 1.0)
    return found


def assert_apart(scene: Scene, t: float, narrow: bool = False, sends: bool = False) -> None:
    """No text leaves the card at second t or covers another one, and no box leaves it."""
    boxes = text_boxes(scene, t, narrow, sends)
    assert len(boxes) > 2
    width, height = scene.narrow if narrow else (scene.width, scene.height)
    if not narrow:
        assert_inside(scene, t)
    for text, left, top, right, bottom in boxes:
        assert left > 0 and top > 0 and right < width and bottom < height, text
    for (a, *one), (b, *other) in itertools.combinations(boxes, 2):
        across = min(one[2], other[2]) - max(one[0], other[0])
        down = min(one[3], other[3]) - max(one[1], other[1])
        assert across < 1 or down < 1, (round(t, 2), a, b)


def texts(scene: Scene, t: float | None = None) -> list[str]:
    """The words of all texts, also of those with parts of another size."""
    return ["".join(text.itertext()) for text in elements(scene, "text", t=t)]
