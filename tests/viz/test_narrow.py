"""On a phone the panels are stacked: no text overlaps other text, the bars of the sends, or the
edge of the card.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch

from parallel101.laboratory.viz.collective import collective_scene
from tests.viz import programs as p
from tests.viz.drawn import SVG
from tests.viz.programs import exchange, me, recorded

Box = tuple[float, float, float, float]  # left, top, right, bottom


def placed(transform: str, box: Box) -> Box:
    """A box, moved as a panel's `data-narrow` says."""
    dx, dy = map(float, re.match(r"translate\((.*?),(.*?)\)", transform).groups())
    scale = [float(s) for s in re.findall(r"[\d.]+", transform.partition("scale")[2])] or [1.0]
    sx, sy = scale[0], scale[-1]
    return box[0] * sx + dx, box[1] * sy + dy, box[2] * sx + dx, box[3] * sy + dy


def extent(text: ET.Element) -> Box:
    """The box of a text in DejaVu Sans, the widest of the usual fonts: a letter is 0.52 of the
    font size wide.
    """
    x, y, size = (
        float(text.get(name, default)) for name, default in (("x", 0), ("y", 0), ("font-size", 14))
    )
    width, classes = 0.52 * size * len(text.text), text.get("class", "").split()
    left = x - (width / 2 if "c" in classes else width if "e" in classes else 0)
    return left, y - 0.75 * size, left + width, y + 0.25 * size


def texts_and_sends(scene, t: float) -> list[tuple[str, Box]]:
    """The texts at second t that are not in a circle or a cell, and the bars of the sends, as
    on a phone.
    """
    found = []
    for panel in ET.fromstring(scene.svg(t)):
        where = panel.get("data-narrow", "none")
        if where != "none":
            found += [
                (text.text, placed(where, extent(text)))
                for text in panel.iter(f"{SVG}text")
                if "m" in text.get("class", "").split()
            ]
            for cursor in (path for path in panel.iter(f"{SVG}path") if path.get("class") == "now"):
                top, bottom = map(float, re.findall(r"[\d.]+", cursor.get("d"))[1:])
                found.append(("the sends", placed(where, (28, top, 932, bottom))))
    return found


def ordinary_values(x):
    """An exchange with both neighbours, of values that do not carry their origin."""
    rank, n = me()
    neighbours, value = [(rank + 1) % n, (rank - 1) % n], torch.tensor([1.5])
    exchange([(r, value) for r in neighbours], [(r, value) for r in neighbours])


@pytest.mark.parametrize("uneven", [False, True], ids=["sim", "as on gloo"])
@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize(
    "program",
    [p.ring_all_reduce, p.binomial_broadcast, ordinary_values],
    ids=["ring", "tree", "bytes"],
)
def test_texts_do_not_overlap_on_a_phone(program, n, uneven):
    scene = collective_scene(*recorded(program, n, 1 if n > 8 else n, uneven=uneven))
    for t in (0.0, scene.duration):
        boxes = texts_and_sends(scene, t)
        assert "the sends" in [text for text, _ in boxes]
        width, height = scene.narrow
        for i, (text, (left, top, right, bottom)) in enumerate(boxes):
            assert left > 8 and top > 8 and right < width - 8 and bottom < height - 8, text
            for other, (left_, top_, right_, bottom_) in boxes[:i]:
                assert left > right_ or left_ > right or top > bottom_ or top_ > bottom, (
                    text,
                    other,
                )
