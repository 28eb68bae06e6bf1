"""What lies between each two ranks, as squares of ranks × ranks: the seconds that one waited for another, the bytes that it sent.

waits, for     0      1             from, to    0      1
rank 0              210 ms          rank 0             16 KiB
rank 1        2 ms                  rank 1     16 KiB
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallel101.viz.scene import Scene, box

TOP, SIDE, MIDDLES = 116.0, 340.0, (280.0, 744.0)  # the squares: their top, their largest width, the x of their centres
STYLE = ".sent{fill:var(--accent)}text.on{fill:var(--bg)}"
MOST_RANKS = 128


class Square(NamedTuple):
    """One number for each two ranks."""

    title: str
    corner: str  # what a row and a column are, such as "from \\ to"
    values: Sequence[Sequence[float]]  # a row for each rank
    text: Callable[[float], str]  # a value in words


def between_ranks_scene(title: str, squares: Sequence[Square]) -> Scene:
    """Draw one or two squares side by side, a cell the darker the larger its value. Zeros are left empty.

    Raises:
        ValueError: more than 128 ranks.
    """
    n = len(squares[0].values)
    if n > MOST_RANKS:
        raise ValueError(f"the run has {n} ranks, and this picture can show up to {MOST_RANKS}")
    cell = min(64.0, SIDE / n)
    words = " ".join(f"{square.title}: {_largest(square)}." for square in squares)
    scene = Scene(960, math.ceil(TOP + n * min(cell, 44.0) + 28), title, words)
    scene.style += STYLE
    scene.add("text", title, x=28, y=40, class_="h")
    for square, middle in zip(squares, MIDDLES):
        _draw(scene, square, middle, cell, min(cell, 44.0))
    return scene


def _draw(scene: Scene, square: Square, middle: float, width: float, height: float) -> None:
    n = len(square.values)
    left, gap = middle - n * width / 2, 2.0 if n <= 16 else 0.5
    every = 1 if n <= 16 else 8  # of a large square, label every eighth row and column
    scene.add("text", square.title, x=left, y=TOP - 34, font_size=14, class_="b")
    scene.add("text", square.corner, x=left - 12, y=TOP - 9, font_size=12, class_="m e")
    most = max((value for row in square.values for value in row), default=0.0) or 1.0
    for rank in range(n):
        y = TOP + rank * height
        if rank % every == 0:
            scene.add("text", rank, x=left + (rank + 0.5) * width, y=TOP - 9, font_size=12, class_="m c")
            scene.add("text", f"rank {rank}", x=left - 12, y=y + height / 2 + 4, font_size=12, class_="m e")
        row = "".join(box(left + c * width + gap, y + gap, width - 2 * gap, height - 2 * gap) for c in range(n))
        scene.add("path", d=row, class_="faint")
        for column, value in enumerate(square.values[rank]):
            if value > 0:
                _cell(scene, square, rank, column, value / most, left + column * width, y, width, height, gap)


def _cell(scene: Scene, square: Square, rank: int, column: int, share: float, x: float, y: float, width: float, height: float, gap: float):
    value = square.text(square.values[rank][column])
    place = {"x": x + gap, "y": y + gap, "width": width - 2 * gap, "height": height - 2 * gap}
    scene.add("rect", **place, rx=2, class_="sent", fill_opacity=0.12 + 0.78 * share).add("title", f"{rank}, {column}: {value}")
    if width > 36:
        size = min(12.0, (width - 6) / (0.58 * len(value)))
        scene.add("text", value, x=x + width / 2, y=y + height / 2 + 4, font_size=size, class_="c on" if share > 0.5 else "c")


def _largest(square: Square) -> str:
    value, row, column = max((value, r, c) for r, values in enumerate(square.values) for c, value in enumerate(values))
    return f"the most is {square.text(value)}, rank {row} and rank {column}" if value else "nothing"
