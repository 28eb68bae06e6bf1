"""The right half of the collective view: what each rank holds.

If the contents of messages are unknown, it shows only how many bytes moved.

    chunk     a      b      c             from \\ to    0     1
    rank 0  ▌▐    ▌▌▐▐     ▐                       0        96 B
    rank 1  ▌     ▌▌▐▐    ▌▐                       1  96 B

On the left, ranks × chunks: a cell has one stripe for each rank whose data is in it. A stripe that
was added twice ("×2") and a stripe that is missing from what a rank returned are drawn as errors.
On the right, source × destination, with bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from parallel101.laboratory.analysis.chunks import Counts
from parallel101.laboratory.analysis.replay import START, Replay
from parallel101.laboratory.analysis.verdict import lacks
from parallel101.laboratory.record.units import human_bytes
from parallel101.laboratory.viz.grid import MOST_CELLS, Grid
from parallel101.laboratory.viz.scene import Node, Scene, box, number
from parallel101.laboratory.viz.timing import Timing

# of the cells; MIDDLE is the y of their centre
LEFT, WIDTH, MIDDLE, HEIGHT = 520.0, 412.0, 254.0, 272.0
GAP = 3.0
STYLE = (
    ".mv{fill:var(--bg);fill-opacity:.85;stroke:var(--ink);stroke-width:1.5}"
    ".err{fill:none;stroke:var(--warn);stroke-width:2}"
    ".gone{fill:var(--warn);fill-opacity:.15;stroke:var(--warn);stroke-width:1.5;"
    "stroke-dasharray:3 2}"
    ".flag{fill:var(--warn)}text.flagged{fill:var(--bg);font-size:10px;font-weight:700}"
    ".sent{fill:var(--accent)}"
)
NARROW = "translate(-408,352) scale(.94)"  # leaves room for the text at its left and below it


class CellGrid:
    """The geometry of the cells: a row for each rank that took part, a column for each chunk."""

    def __init__(self, replay: Replay):
        self.replay = replay
        self.rows = {rank: i for i, rank in enumerate(replay.ranks)}
        columns = max(len(replay.chunks), 1)
        self.cell_width = min(103.0, WIDTH / columns)
        self.cell_height = min(56.0, HEIGHT / len(replay.ranks))
        self.left = LEFT + (WIDTH - self.cell_width * columns) / 2
        self.top = MIDDLE - self.cell_height * len(replay.ranks) / 2
        self.bottom = MIDDLE + self.cell_height * len(replay.ranks) / 2
        self.gap = GAP if self.cell_height > 20 else 1.5

    @property
    def grid(self) -> Grid:
        ranks, columns = self.replay.ranks, len(self.replay.chunks)
        return Grid(
            self.left, self.top, self.cell_width, self.cell_height, ranks, columns, self.gap
        )

    def corner(self, rank: int, chunk: int) -> tuple[float, float]:
        return self.grid.inside(self.rows[rank], chunk)[:2]

    @property
    def inner(self) -> tuple[float, float]:
        return self.cell_width - 2 * self.gap, self.cell_height - 2 * self.gap

    def stripe(self, chunk: int, origin: int) -> tuple[float, float]:
        """Return (x inside the cell, width) of the stripe for a rank's data."""
        stripes = self.replay.chunks[chunk].stripes
        width = self.inner[0] / len(stripes)
        return stripes.index(origin) * width, width

    def stripes(self, x: float, y: float, chunk: int, counts: Counts, apart: bool = False) -> str:
        """Return the path of a chunk's stripes.

        Unless they are drawn `apart`, neighbouring stripes are one box: `_separators` draws the
        lines.
        """
        stripes, path, k = self.replay.chunks[chunk].stripes, "", 0
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


def draw_matrix(scene: Scene, replay: Replay, timing: Timing, legend: Sequence[str]) -> None:
    """Add ranks × chunks, and the data that moves between the rows.

    The lines of `legend` are below.
    """
    scene.style += STYLE
    matrix = CellGrid(replay)
    panel = scene.panel(narrow=NARROW)
    _frame(panel, matrix)
    marks = Node("g")
    _cells(panel, marks, matrix, timing)
    _separators(panel, matrix)
    panel.children.append(marks)
    _missing(marks, matrix, timing)
    _bands(scene, panel, matrix, timing)
    for k, line in enumerate(legend):
        panel.write(line, LEFT + WIDTH / 2, matrix.bottom + 24 + 16 * k, 12, "m c")


def _frame(panel: Node, matrix: CellGrid) -> None:
    replay = matrix.replay
    matrix.grid.names(panel, "chunk", [chunk.label for chunk in replay.chunks])
    for row in range(len(replay.ranks)):
        for column in range(len(replay.chunks)):
            panel.rect(*matrix.grid.inside(row, column), "faint", rx=2)


def _cells(panel: Node, marks: Node, matrix: CellGrid, timing: Timing) -> None:
    """Draw every state of every cell. States with the same begin and end share a group."""
    replay = matrix.replay
    together: dict[tuple[float, float], list[tuple[int, int, Counts]]] = defaultdict(list)
    for (rank, chunk), states in replay.cells.items():
        returned = replay.returned[rank] if replay.returned else None
        if returned is not None:  # at the end, only what the rank returned is shown
            last = returned.get(chunk, (0,) * replay.trace.world_size)
            states = [*states, (float(replay.steps), last)] if last != states[-1][1] else states
        states = states if replay.steps else [(START, states[-1][1])]
        for (begin, counts), (end, _) in zip(states, [*states[1:], (math.inf, ())], strict=True):
            if any(counts) and begin != end:
                together[timing.at(begin), timing.at(end)].append((rank, chunk, counts))
    for span, cells in sorted(together.items()):
        group, errors = _during(panel, span, timing), Node("g")
        for chunk in sorted({c for _, c, _ in cells}):
            path = "".join(
                matrix.stripes(*matrix.corner(rank, c), c, counts)
                for rank, c, counts in cells
                if c == chunk
            )
            group.path(path, f"f{chunk % 8}")
        for rank, chunk, counts in cells:
            _mark_errors(errors, matrix, rank, chunk, counts)
        if errors.children:
            _during(marks, span, timing).children += errors.children


def _during(parent: Node, span: tuple[float, float], timing: Timing) -> Node:
    group = parent.add("g")
    return group if span[0] <= 0 and span[1] > timing.duration else group.show(span)


def _separators(panel: Node, matrix: CellGrid) -> None:
    """Draw the thin lines between stripes, through all rows of a column."""
    path, narrowest = "", matrix.cell_width
    for c, chunk in enumerate(matrix.replay.chunks):
        x = matrix.left + c * matrix.cell_width + matrix.gap
        width = matrix.inner[0] / len(chunk.stripes)
        narrowest = min(narrowest, width)
        path += "".join(
            f"M{number(round(x + k * width, 2))} {matrix.top:.1f}V{matrix.bottom:.1f}"
            for k in range(1, len(chunk.stripes))
        )
    if path:
        panel.add("path", d=path, style="stroke:var(--bg)", stroke_width=min(1.2, 0.3 * narrowest))


def _mark_errors(group: Node, matrix: CellGrid, rank: int, chunk: int, counts: Counts) -> None:
    """Flag data that was added more than once, and sums of elements from different positions."""
    doubled = [origin for origin in matrix.replay.chunks[chunk].stripes if counts[origin] > 1]
    mixed = matrix.replay.chunks[chunk].mixed
    if not doubled and not mixed:
        return
    (x, y), (width, height) = matrix.corner(rank, chunk), matrix.inner
    group.rect(x, y, width, height, "err", rx=2)
    flags = [("?", x + width / 2)] if mixed else []
    for origin in doubled:
        dx, stripe = matrix.stripe(chunk, origin)
        flags.append(
            (
                f"×{counts[origin]}",
                min(max(x + dx + stripe / 2, x + 9.5), x + width - 9.5)
                if width > 20
                else x + width / 2,
            )
        )
    for text, middle in flags:
        group.rect(middle - 9.5, y + height / 2 - 7, 19, 14, "flag", rx=4)
        group.write(text, middle, y + height / 2 + 3.6, None, "flagged c")


def _missing(marks: Node, matrix: CellGrid, timing: Timing) -> None:
    """Draw the stripes that are missing from what a rank returned."""
    group = marks.add("g")
    if timing.duration:
        group.show((timing.reveal, timing.duration + 1))
    for rank, chunk in matrix.replay.cells:
        gone = lacks(matrix.replay, rank, chunk)
        (x, y), (width, height) = matrix.corner(rank, chunk), matrix.inner
        if gone:
            group.rect(x, y, width, height, "err", rx=2)
        for origin in gone:
            dx, stripe = matrix.stripe(chunk, origin)
            rim = min(2.5, stripe / 4)
            group.rect(x + dx + rim, y + 2.5, stripe - 2 * rim, height - 5, "gone")


def _bands(scene: Scene, panel: Node, matrix: CellGrid, timing: Timing) -> None:
    """Draw the data of each message, sliding from the sender's row to the receiver's.

    Data that slides equally far shares a group.
    """
    replay, (width, height) = matrix.replay, matrix.inner
    scene.definitions.append(
        f'<clipPath id="cells"><rect y="{matrix.top - 2:.1f}" width="960" '
        f'height="{matrix.bottom - matrix.top + 4:.1f}"/></clipPath>'
    )
    moving = panel.add("g", clip_path="url(#cells)")
    last, first = replay.ranks[-1], replay.ranks[0]
    wraps = (
        replay.topology.kind == "ring"
        and len(replay.ranks) > 2
        and replay.topology.order == replay.ranks
    )
    for step in range(replay.steps):
        step_group = moving.add("g").show((timing.start(step), timing.arrival(step)))
        groups: dict[float, Node] = {}
        for i in replay.in_step(step):
            m = replay.messages[i]
            for landing in replay.landings[i]:
                (x, y0), (_, y1) = (
                    matrix.corner(m.src, landing.chunk),
                    matrix.corner(m.dst, landing.chunk),
                )
                routes = [(y0, y1 - y0)]
                # leaves at one end of the column and enters at the other
                if wraps and (m.src, m.dst) in ((last, first), (first, last)):
                    down = matrix.cell_height if m.src == last else -matrix.cell_height
                    routes = [(y0, down), (y1 - down, down)]
                for y, far in routes:
                    group = groups.get(round(far, 1))
                    if group is None:
                        group = groups[round(far, 1)] = step_group.add("g")
                        begin, end = timing.start(step), timing.arrival(step)
                        group.key("translate", (begin, (0.0, 0.0)), (end, (0.0, far)), mode="ease")
                    group.rect(x - 1, y - 1, width + 2, height + 2, "mv", rx=3)
                    group.path(
                        matrix.stripes(x, y, landing.chunk, landing.carried, apart=True),
                        f"f{landing.chunk % 8}",
                    )


def draw_traffic(scene: Scene, replay: Replay, timing: Timing, note: Iterable[str]) -> None:
    """Add the matrix of bytes, a row for each sender.

    The note below it says why the contents are not shown.
    """
    scene.style += STYLE
    panel = scene.panel(narrow=NARROW)
    n = len(replay.ranks)
    width, height = min(103.0, WIDTH / n), min(56.0, HEIGHT / n)
    left, top = LEFT + (WIDTH - width * n) / 2, MIDDLE - height * n / 2
    place = {rank: i for i, rank in enumerate(replay.ranks)}
    grid = Grid(left, top, width, height, replay.ranks, n, gap=2.0 if n <= MOST_CELLS else 0.5)
    grid.names(panel, "from \\ to", every=1 if n <= MOST_CELLS else 8)
    grid.ground(panel)
    # by (src, dst): the bytes sent after each step
    totals: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for step in range(replay.steps):
        for i in replay.in_step(step):
            m = replay.messages[i]
            so_far = totals[m.src, m.dst][-1][1] if totals[m.src, m.dst] else 0
            totals[m.src, m.dst].append((step, so_far + m.nbytes))
    most = max((states[-1][1] for states in totals.values()), default=1) or 1
    for (src, dst), states in sorted(totals.items()):
        for (step, nbytes), (until, _) in zip(
            states, [*states[1:], (replay.steps, 0)], strict=True
        ):
            if step == until:
                continue
            end = timing.arrival(until) if until < replay.steps else timing.duration + 1
            group, share = panel.add("g").show((timing.arrival(step), end)), nbytes / most
            text, opacity = human_bytes(nbytes), 0.15 + 0.75 * share
            grid.value(group, place[src], place[dst], text, opacity, share > 0.5)
    if replay.messages:
        for k, line in enumerate(note):
            panel.write(line, LEFT + WIDTH / 2, MIDDLE + height * n / 2 + 20 + 16 * k, 12, "m c")
