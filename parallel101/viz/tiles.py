"""A message as it flies: a lettered tile for each chunk in it, or its bytes where nobody knows what it holds."""

from __future__ import annotations

from parallel101.analysis.replay import History, Landing
from parallel101.record.units import human_bytes, labels
from parallel101.viz.scene import Node

STYLE = (
    ".k{stroke:var(--bg);stroke-width:2}.bad{stroke:var(--warn);stroke-width:3}.plain{fill:var(--accent)}"
    ".pack{fill:var(--bg);stroke:var(--ink);stroke-width:1.5}text.on{fill:var(--bg)}"
)
MOST = 4  #  chunks that are drawn one by one


def side_of(history: History) -> float:
    """How large a tile is: it must not hide the rank behind it."""
    return min(28.0, max(9.0, 1.15 * history.layout.node))


def add_tile(parent: Node, history: History, index: int) -> Node:
    """The tile of a message, around the origin."""
    tile, side = parent.add("g"), side_of(history)
    if not history.known:
        _bytes(tile, human_bytes(history.messages[index].nbytes), side)
    elif not history.landings[index]:
        _bytes(tile, "0 B" if history.messages[index].nbytes == 0 else "–", side)
    elif len(history.landings[index]) > MOST:
        _pack(tile, history, history.landings[index], side)
    else:
        _letters(tile, history, history.landings[index], side)
    return tile


def _bytes(tile: Node, text: str, side: float) -> None:
    font = 0.47 * side
    width = max(side, 0.65 * font * len(text) + 10)
    tile.add("rect", x=-width / 2, y=-side * 0.36, width=width, height=side * 0.72, rx=5, class_="k plain")
    if side > 12:
        tile.add("text", text, y=font * 0.36, font_size=font, class_="b c on")


def _letters(tile: Node, history: History, landings: list[Landing], side: float) -> None:
    width, font = side if len(landings) == 1 else 0.72 * side, 0.57 * side
    for k, landing in enumerate(landings):
        x, colour = (k - (len(landings) - 1) / 2) * width, landing.column % 8
        rim = "bad" if any(count > 1 for count in landing.carried) else "k"
        tile.add("rect", x=x - width / 2, y=-side / 2, width=width, height=side, rx=side * 0.21, class_=f"f{colour} {rim}")
        tile.add("text", history.columns[landing.column].label, x=x, y=font * 0.32, font_size=font, class_=f"b c o{colour}")


def _pack(tile: Node, history: History, landings: list[Landing], side: float) -> None:
    """Many chunks as one: the first and last letter over a band of all their colours."""
    text = labels([history.columns[landing.column].label for landing in landings])
    text = text if "–" in text else f"{len(landings)} chunks"
    font = 0.51 * side
    width = max(side, 0.67 * font * len(text) + 12)
    each = (width - 8) / len(landings)
    tile.add("rect", x=-width / 2, y=-side / 2, width=width, height=side, rx=6, class_="pack")
    for k, landing in enumerate(landings):
        tile.add("rect", x=-width / 2 + 4 + k * each, y=side * 0.2, width=each, height=side * 0.18, class_=f"f{landing.column % 8}")
    tile.add("text", text, y=font * 0.11, font_size=font, class_="b c")
