"""The right half of the collective view: ranks × chunks, one stripe in a cell for each rank whose data is in it.

A stripe too many ("×2") and a stripe that is missing from what a rank returned are drawn as the errors they are.
"""

from __future__ import annotations

import math
from collections import defaultdict

from parallel101.analysis.columns import Counts
from parallel101.analysis.replay import START, History
from parallel101.analysis.verdict import lacks
from parallel101.viz.scene import Node, Scene, box, number
from parallel101.viz.tempo import Tempo

LEFT, WIDTH, MIDDLE, HEIGHT = 520.0, 412.0, 254.0, 272.0  #  of the cells; MIDDLE is the y of their centre
GAP = 3.0
STYLE = (
    ".mv{fill:var(--bg);fill-opacity:.85;stroke:var(--ink);stroke-width:1.5}.err{fill:none;stroke:var(--warn);stroke-width:2}"
    ".gone{fill:var(--warn);fill-opacity:.15;stroke:var(--warn);stroke-width:1.5;stroke-dasharray:3 2}"
    ".flag{fill:var(--warn)}text.flagged{fill:var(--bg);font-size:10px;font-weight:700}"
)
NARROW = "translate(-408,352) scale(.94)"  #  room for the words at its left, and for those below it


class Matrix:
    """Geometry of the cells: a row for each rank that took part, a column for each chunk."""

    def __init__(self, history: History):
        self.history = history
        self.rows = {rank: i for i, rank in enumerate(history.ranks)}
        columns = max(len(history.columns), 1)
        self.cell_width = min(103.0, WIDTH / columns)
        self.cell_height = min(56.0, HEIGHT / len(history.ranks))
        self.left = LEFT + (WIDTH - self.cell_width * columns) / 2
        self.top = MIDDLE - self.cell_height * len(history.ranks) / 2
        self.bottom = MIDDLE + self.cell_height * len(history.ranks) / 2
        self.gap = GAP if self.cell_height > 20 else 1.5

    def corner(self, rank: int, column: int) -> tuple[float, float]:
        return self.left + column * self.cell_width + self.gap, self.top + self.rows[rank] * self.cell_height + self.gap

    @property
    def inner(self) -> tuple[float, float]:
        return self.cell_width - 2 * self.gap, self.cell_height - 2 * self.gap

    def stripe(self, column: int, origin: int) -> tuple[float, float]:
        """(x within the cell, width) of the stripe for a rank's data."""
        stripes = self.history.columns[column].stripes
        width = self.inner[0] / len(stripes)
        return stripes.index(origin) * width, width

    def stripes(self, x: float, y: float, column: int, counts: Counts, apart: bool = False) -> str:
        """A path of a chunk's stripes: each `apart`, or those side by side as one (the lines between them are drawn over the column)."""
        stripes, path, k = self.history.columns[column].stripes, "", 0
        width = self.inner[0] / len(stripes)
        apart = apart and width > 3
        rim = 1.2 if apart else 0.0
        while k < len(stripes):
            run = k
            while run < len(stripes) and counts[stripes[run]] and not (apart and run > k):
                run += 1
            if run > k:
                path += box(x + k * width + rim / 2, y, (run - k) * width - rim, self.inner[1])
            k = max(run, k + 1)
        return path


def draw_matrix(scene: Scene, history: History, tempo: Tempo) -> None:
    """Add ranks × chunks, and what flies between the rows."""
    scene.style += STYLE
    matrix = Matrix(history)
    panel = scene.panel(narrow=NARROW)
    _frame(panel, matrix)
    marks = Node("g")
    _cells(panel, marks, matrix, tempo)
    _separators(panel, matrix)
    panel.children.append(marks)
    _missing(marks, matrix, tempo)
    _bands(scene, panel, matrix, tempo)
    panel.add("text", _legend(history), x=LEFT + WIDTH / 2, y=matrix.bottom + 24, font_size=12, class_="m c")


def _frame(panel: Node, matrix: Matrix) -> None:
    history, (width, height) = matrix.history, matrix.inner
    panel.add("text", "chunk", x=matrix.left - 12, y=matrix.top - 9, font_size=12, class_="m e")
    for c, column in enumerate(history.columns):
        panel.add("text", column.label, x=matrix.left + (c + 0.5) * matrix.cell_width, y=matrix.top - 9, font_size=13, class_="m c")
    for rank in history.ranks:
        panel.add("text", f"rank {rank}", x=matrix.left - 12, y=matrix.corner(rank, 0)[1] + height / 2 + 4, font_size=12, class_="m e")
        for c in range(len(history.columns)):
            x, y = matrix.corner(rank, c)
            panel.add("rect", x=x, y=y, width=width, height=height, rx=2, class_="faint")


def _cells(panel: Node, marks: Node, matrix: Matrix, tempo: Tempo) -> None:
    """Every state of every cell, those that come and go together in one group."""
    history = matrix.history
    together: dict[tuple[float, float], list[tuple[int, int, Counts]]] = defaultdict(list)
    for (rank, column), states in history.cells.items():
        returned = history.returned[rank] if history.returned else None
        if returned is not None:  # in the end only what the rank returned is left
            last = returned.get(column, (0,) * history.trace.world_size)
            states = [*states, (float(history.steps), last)] if last != states[-1][1] else states
        states = states if history.steps else [(START, states[-1][1])]
        for (begin, counts), (end, _) in zip(states, [*states[1:], (math.inf, ())], strict=True):
            if any(counts) and begin != end:
                together[tempo.at(begin), tempo.at(end)].append((rank, column, counts))
    for span, cells in sorted(together.items()):
        group, errors = _during(panel, span, tempo), Node("g")
        for column in sorted({c for _, c, _ in cells}):
            path = "".join(matrix.stripes(*matrix.corner(rank, c), c, counts) for rank, c, counts in cells if c == column)
            group.add("path", d=path, class_=f"f{column % 8}")
        for rank, column, counts in cells:
            _mark_errors(errors, matrix, rank, column, counts)
        if errors.children:
            _during(marks, span, tempo).children += errors.children


def _during(parent: Node, span: tuple[float, float], tempo: Tempo) -> Node:
    group = parent.add("g")
    return group if span[0] <= 0 and span[1] > tempo.duration else group.show(span)


def _separators(panel: Node, matrix: Matrix) -> None:
    """The thin lines between the stripes, through all the rows of each column."""
    path, narrowest = "", matrix.cell_width
    for c, column in enumerate(matrix.history.columns):
        x = matrix.left + c * matrix.cell_width + matrix.gap
        width = matrix.inner[0] / len(column.stripes)
        narrowest = min(narrowest, width)
        path += "".join(f"M{number(round(x + k * width, 2))} {matrix.top:.1f}V{matrix.bottom:.1f}" for k in range(1, len(column.stripes)))
    if path:
        panel.add("path", d=path, style="stroke:var(--bg)", stroke_width=min(1.2, 0.3 * narrowest))


def _mark_errors(group: Node, matrix: Matrix, rank: int, column: int, counts: Counts) -> None:
    """What is in a sum more than once, and sums of elements that do not belong together."""
    doubled = [origin for origin in matrix.history.columns[column].stripes if counts[origin] > 1]
    mixed = matrix.history.columns[column].mixed
    if not doubled and not mixed:
        return
    (x, y), (width, height) = matrix.corner(rank, column), matrix.inner
    group.add("rect", x=x, y=y, width=width, height=height, rx=2, class_="err")
    flags = [("?", x + width / 2)] if mixed else []
    for origin in doubled:
        dx, stripe = matrix.stripe(column, origin)
        flags.append((f"×{counts[origin]}", min(max(x + dx + stripe / 2, x + 9.5), x + width - 9.5) if width > 20 else x + width / 2))
    for text, middle in flags:
        group.add("rect", x=middle - 9.5, y=y + height / 2 - 7, width=19, height=14, rx=4, class_="flag")
        group.add("text", text, x=middle, y=y + height / 2 + 3.6, class_="flagged c")


def _missing(marks: Node, matrix: Matrix, tempo: Tempo) -> None:
    """The stripes that are not in what a rank returned."""
    group = marks.add("g")
    if tempo.duration:
        group.show((tempo.reveal, tempo.duration + 1))
    for rank, column in matrix.history.cells:
        gone = lacks(matrix.history, rank, column)
        (x, y), (width, height) = matrix.corner(rank, column), matrix.inner
        if gone:
            group.add("rect", x=x, y=y, width=width, height=height, rx=2, class_="err")
        for origin in gone:
            dx, stripe = matrix.stripe(column, origin)
            rim = min(2.5, stripe / 4)
            group.add("rect", x=x + dx + rim, y=y + 2.5, width=stripe - 2 * rim, height=height - 5, class_="gone")


def _bands(scene: Scene, panel: Node, matrix: Matrix, tempo: Tempo) -> None:
    """What a message carries, on its way from the sender's row to the receiver's. Those that go equally far move as one."""
    history, (width, height) = matrix.history, matrix.inner
    scene.definitions.append(
        f'<clipPath id="cells"><rect y="{matrix.top - 2:.1f}" width="960" height="{matrix.bottom - matrix.top + 4:.1f}"/></clipPath>'
    )
    moving = panel.add("g", clip_path="url(#cells)")
    last, first = history.ranks[-1], history.ranks[0]
    wraps = history.layout.kind == "ring" and len(history.ranks) > 2 and history.layout.order == history.ranks
    for step in range(history.steps):
        step_group = moving.add("g").show((tempo.start(step), tempo.land(step)))
        groups: dict[float, Node] = {}
        for i in history.in_step(step):
            m = history.messages[i]
            for landing in history.landings[i]:
                (x, y0), (_, y1) = matrix.corner(m.src, landing.column), matrix.corner(m.dst, landing.column)
                routes = [(y0, y1 - y0)]
                if wraps and (m.src, m.dst) in ((last, first), (first, last)):  # out at one end of the column and in at the other
                    down = matrix.cell_height if m.src == last else -matrix.cell_height
                    routes = [(y0, down), (y1 - down, down)]
                for y, far in routes:
                    group = groups.get(round(far, 1))
                    if group is None:
                        group = groups[round(far, 1)] = step_group.add("g")
                        begin, end = tempo.start(step), tempo.land(step)
                        group.key("translate", (begin, (0.0, 0.0)), (end, (0.0, far)), mode="ease")
                    group.add("rect", x=x - 1, y=y - 1, width=width + 2, height=height + 2, rx=3, class_="mv")
                    group.add("path", d=matrix.stripes(x, y, landing.column, landing.carried, apart=True), class_=f"f{landing.column % 8}")


def _legend(history: History) -> str:
    if history.sums:
        return (
            "One stripe: one rank's data is in it. Full cell: finished."
            if len(history.columns) > 1
            else "One stripe: one rank's data is in it."
        )
    if any(len(column.stripes) > 1 for column in history.columns):
        return "One stripe: the part that came from one rank."
    return "Full cell: this rank has it."
