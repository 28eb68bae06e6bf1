"""Helpers of the tests of drawings: spans to draw, and the bars that were drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from parallel101.record.events import NO_GROUP, Event
from parallel101.viz.scene import Scene

SVG = "{http://www.w3.org/2000/svg}"


def span(rank: int, name: str, start: float, end: float, seq: int = 0, *, waiting: bool = False, **labels: object) -> Event:
    return Event(rank, "span", None, 0, 0, start, end, "train.py:7", start, NO_GROUP, seq, (), "", None, name, labels, waiting)


def titled(scene: Scene, word: str) -> list[ET.Element]:
    """The rectangles whose tooltip contains this word."""
    root = ET.fromstring(scene.svg())
    return [rect for rect in root.iter(f"{SVG}rect") if (title := rect.find(f"{SVG}title")) is not None and word in title.text]
