"""Helpers of the tests of drawings: spans to draw, and the bars that were drawn."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

from parallel101.laboratory.record.events import NO_GROUP, Event, EventGroup
from parallel101.laboratory.viz.scene import Scene

SVG = "{http://www.w3.org/2000/svg}"


WORLD = EventGroup("world", (0, 1), None)


def event(
    kind: str,
    rank: int,
    start: float,
    end: float,
    *,
    peer: int | None = None,
    nbytes: int = 8,
    seq: int = 0,
    group: EventGroup = WORLD,
) -> Event:
    """A message, or a collective."""
    when = start, end, "train.py:9", start
    return Event(rank, kind, peer, 0, nbytes, *when, group, seq, (nbytes // 4,), "float32")


def span(
    rank: int,
    name: str,
    start: float,
    end: float,
    seq: int = 0,
    *,
    waiting: bool = False,
    **labels: object,
) -> Event:
    made = event("span", rank, start, end, nbytes=0, seq=seq, group=NO_GROUP)
    return made._replace(where="train.py:7", name=name, args=labels, waiting=waiting)


def titled(scene: Scene, word: str) -> list[ET.Element]:
    """The rectangles whose tooltip contains this word."""
    root = ET.fromstring(scene.svg())
    return [
        rect
        for rect in root.iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None and word in title.text
    ]


Box = tuple[str, float, float, float, float]


def text_boxes(scene: Scene, t: float, narrow: bool = False, sends: bool = False) -> list[Box]:
    """(text, left, top, right, bottom) of all texts at second t, as large as in DejaVu Sans: a
    letter is 0.52 of the font size wide.

    `narrow`: as the player lays them out on a phone. `sends`: also the bars below a collective,
    on a phone, which are as high as their cursor.
    """
    found = []

    def walk(node: ET.Element, dx: float, dy: float, scale: float) -> None:
        left_out = (
            node.get("data-narrow") == "none" if narrow else "data-only-narrow" in node.attrib
        )
        if left_out:
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
            size = float(
                node.get("font-size", 19 if "h" in classes else 10 if "flagged" in classes else 14)
            )
            width = max(0.52 * len(text), 0.65) * size * scale
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

    walk(ET.fromstring(scene.svg(t)), 0.0, 0.0, 1.0)
    return found


def assert_apart(scene: Scene, t: float, narrow: bool = False, sends: bool = False) -> None:
    """No text leaves the card at second t or covers another one, and no box leaves it."""
    boxes = text_boxes(scene, t, narrow, sends)
    assert len(boxes) > 2
    width, height = scene.narrow if narrow else (scene.width, scene.height)
    for rect in [] if narrow else ET.fromstring(scene.svg(t)).iter(f"{SVG}rect"):
        x, y, across, down = (float(rect.get(k, 0)) for k in ("x", "y", "width", "height"))
        assert x + across <= width and y + down <= height, rect.attrib
    for text, left, top, right, bottom in boxes:
        assert left > 0 and top > 0 and right < width and bottom < height, text
    for (a, *one), (b, *other) in itertools.combinations(boxes, 2):
        (left, top), (right, low) = (
            map(max, zip(one[:2], other[:2])),
            map(min, zip(one[2:], other[2:])),
        )
        assert right - left < 1 or low - top < 1, (round(t, 2), a, b)


def texts(scene: Scene) -> list[str]:
    """The words of all texts, also of those with parts of another size."""
    return ["".join(text.itertext()) for text in ET.fromstring(scene.svg()).iter(f"{SVG}text")]
