"""The engine of pictures that are grids of cells, with a row for each rank.

    from \\ to   0     1          Grid.ground     a pale box for each cell, or one area
    rank 0            96 B        Grid.names      the ranks at the left, the columns above
    rank 1     96 B               Grid.value      a cell the darker the larger its value
               ▌▌▐▐               Grid.stripe     a part of a cell, such as one rank's data
                ×2                Grid.faults     what is wrong with it

What is in a cell is decided by the pictures: ranks and chunks in matrix.py, blocks in
before_after.py, senders and receivers in matrix.py, many_ranks.py and between_ranks.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parallel101.laboratory.viz.scene import Box, Node, box

Cell = tuple[int, int]  # row and column
GONE = "gone"
MOST_CELLS = 16  # in a row; with more, a grid of lines would be all that is seen
STYLE = (
    ".err{fill:none;stroke:var(--warn);stroke-width:2}"
    ".gone{fill:var(--warn);fill-opacity:.15;stroke:var(--warn);stroke-width:1.5;"
    "stroke-dasharray:3 2}"
    ".flag{fill:var(--warn)}text.flagged{fill:var(--bg);font-size:10px;font-weight:700}"
    ".sent{fill:var(--accent)}text.on{fill:var(--bg)}"
)


class Grid(NamedTuple):
    """Cells of one size, from (left, top). `ranks`: one for each row."""

    left: float
    top: float
    width: float
    height: float
    ranks: Sequence[int]
    columns: int
    gap: float = 2.0

    @property
    def bottom(self) -> float:
        """The y below the last row."""
        return self.top + len(self.ranks) * self.height

    def inside(self, row: int, column: int) -> Box:
        """Return x, y, width and height of a cell without its gap."""
        x, y = self.left + column * self.width, self.top + row * self.height
        return x + self.gap, y + self.gap, self.width - 2 * self.gap, self.height - 2 * self.gap

    def stripe(self, row: int, column: int, k: int, stripes: int, rim: float = 0.0) -> Box:
        """Return x, y, width and height of the k-th of so many stripes in a cell.

        `rim`: by how much it is narrower, if it isn't narrow already.
        """
        x, y, width, height = self.inside(row, column)
        each = width / stripes
        return x + k * each, y, each - min(rim, 0.2 * each), height

    def faults(
        self, panel: Node, cell: Cell, faults: Sequence[str], low: float | None = None
    ) -> None:
        """Outline a cell that has a fault in one of its stripes, and draw what it is.

        `faults`: of each stripe: "" is none, GONE is missing from a sum, and other texts are
        flagged, such as "×2". `low`: of the flags below the cell's top; None: in the middle.
        """
        x, y, width, height = self.inside(*cell)
        each = width / len(faults)
        rim = min(2.5, each / 4)
        for k in (k for k, fault in enumerate(faults) if fault == GONE):
            panel.rect(x + k * each + rim, y + 2.5, each - 2 * rim, height - 5, "gone")
        if any(faults):
            panel.rect(x, y, width, height, "err", rx=2)
        y += height / 2 if low is None else low
        for k, fault in enumerate(faults):
            if fault not in ("", GONE):
                middle = x + (k + 0.5) * each
                middle = min(max(middle, x + 9.5), x + width - 9.5)
                middle = middle if width > 20 else x + width / 2
                panel.rect(middle - 9.5, y - 7, 19, 14, "flag", rx=4)
                panel.write(fault, middle, y + 3.6, None, "flagged c")

    def ground(self, panel: Node) -> None:
        """Draw the empty cells: a path for each row, or one area if the cells have no gaps."""
        if not self.gap:
            width, height = self.columns * self.width, len(self.ranks) * self.height
            panel.rect(self.left, self.top, width, height, "faint")
            return
        for row in range(len(self.ranks)):
            boxes = (box(*self.inside(row, column)) for column in range(self.columns))
            panel.path("".join(boxes), "faint")

    def names(self, panel: Node, corner: str, columns: Iterable[object] = ()) -> None:
        """Write the names of the rows and columns, and `corner` where they meet.

        Of many ranks, some have room for their names. `columns`: their names; by default the ranks.
        """
        n = len(self.ranks)
        every = 1 if n <= MOST_CELLS else 4 if n <= 32 else 8 if n <= 64 else 16
        panel.write(corner, self.left - 12, self.top - 9, 12, "m e")
        size = 13 if (named := list(columns)) else 12
        for column, name in list(enumerate(named or self.ranks))[::every]:
            panel.write(name, self.left + (column + 0.5) * self.width, self.top - 9, size, "m c")
        for row, rank in list(enumerate(self.ranks))[::every]:
            y = self.top + (row + 0.5) * self.height + 4
            panel.write(f"rank {rank}", self.left - 12, y, 12, "m e")

    def value(
        self, panel: Node, row: int, column: int, text: str, opacity: float, dark: bool
    ) -> Node:
        """Draw a cell with its value, if there is room for it, and return the cell."""
        place = self.inside(row, column)
        cell = panel.rect(*place, "sent", rx=2 if self.gap else None, fill_opacity=opacity)
        if self.width > 36:
            panel.label(text, place, "on" if dark else "", 12, 0)
        return cell


def side(size: int, longest: int, long: float, short: float) -> float:
    """Return the pixels of a matrix's side, from `short` to `long`: its square root's share.

    `longest`: the size that is `long`.
    """
    return max(short, long * math.sqrt(size / longest))


Ranges = Sequence[tuple[int, int]]  # of rows, and of columns: from, and up to before


def part_of(matrix: Box, sizes: tuple[int, int], part: Ranges) -> Box:
    """Return the place of some rows and columns of a matrix that has so many of them."""
    (x, y, width, height), ((top, low), (left, right)) = matrix, part
    down, across = height / max(sizes[0], 1), width / max(sizes[1], 1)
    return x + left * across, y + top * down, (right - left) * across, (low - top) * down
