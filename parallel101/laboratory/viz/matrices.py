"""Draws how the matrices of a model are cut along a mesh axis, and which collectives that needs.

    layers.0.weight                layers.1.weight
          256                            64
    64  [ 0 | 1 ]                 256  [   0   ]
    column                             [   1   ]
                                        row

A matrix is drawn as x @ Wᵀ uses it: inputs down, outputs across. A block has the colour and the
number of the rank that holds it. "Row" means that forward sums the outputs over the ranks, and
"column" that backward sums the gradients of the inputs.

Names, shapes and sizes come from a trainer's layout.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from parallel101.laboratory.viz.grid import part_of, side
from parallel101.laboratory.viz.palette import CHUNK
from parallel101.laboratory.viz.scene import Node, Scene, check_drawn

# the first row of cells, cells in a row, and the width of a cell
TOP, ACROSS, CELL = 96.0, 4, 226.0
LONG, SHORT = 140.0, 30.0  # the longest side of any matrix, and the shortest
MOST = 24
COLLECTIVES = {  # style → (in forward, in backward)
    "column": ("", "all-reduce input gradient"),
    "row": ("all-reduce outputs", ""),
    "column_gather": ("all-gather outputs", "all-reduce input gradient"),
}
SEQUENCE_PARALLEL = {
    "column": ("all-gather inputs", "reduce-scatter input gradient"),
    "row": ("reduce-scatter outputs", "all-gather gradient"),
    "column_gather": ("all-gather inputs and outputs", "reduce-scatter input gradient"),
}
SAME = {"vocabulary embedding": "row", "vocabulary head": "column"}  # need the same collectives


class PlacedParameter(Protocol):
    """A parameter: `trainer.layout.entries` has one by name."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def placements(self) -> Mapping[str, Any]: ...


class CutMatrix(NamedTuple):
    """Parameters of one shape, all cut in the same way, which are drawn as one matrix.

    Their modules differ only in their numbers.
    """

    name: str  # the numbers of its modules as *, if there are several
    times: int  # how many such parameters
    rows: int  # as drawn
    columns: int
    cut: str = ""  # "rows", "columns", or "" if every rank holds all of it
    blocks: tuple[tuple[int, int], ...] = ()  # (position on the axis, size), in order
    style: str = ""
    # the collectives that forward and backward need, in words
    needs: tuple[str, ...] = ()


def matrices_scene(
    entries: Mapping[str, PlacedParameter],
    styles: Mapping[str, object] | None = None,
    *,
    sequence_parallel: bool = False,
    axis: str = "tp",
    title: str = "How the matrices are cut",
) -> Scene:
    """Draw the matrices of a model, each cut into the blocks that the ranks hold.

    The collectives that its style needs are beside it.

    Args:
        entries: name of a parameter → its shape and its placements by axis:
            `trainer.layout.entries`. A parameter of two dims with "embed" in its name is taken for
            an embedding, any other for the weight of a linear layer.
        styles: name of a module, in which `*` matches any part → its style. Without it, a
            linear layer cut along dim 0 counts as "column", and one cut along dim 1 as "row".
        sequence_parallel: whether the trainer was built so: then there are reduce-scatters and
            all-gathers instead of all-reduces.
        axis: of the mesh.
        title: of the picture.

    Returns:
        A still Scene. Matrices that differ only in the number of their layer are drawn once. A side
        is as long as the square root of its size, so that small ones can be seen.

    Raises:
        ValueError: there is no matrix, or there are more than 24.
    """
    collectives = SEQUENCE_PARALLEL if sequence_parallel else COLLECTIVES
    known = (styles or {}).items()
    drawn: dict[tuple, list[CutMatrix]] = {}  # those that are alike, in the order of the model
    for name, entry in entries.items():
        if len(entry.shape) != 2:
            continue
        module = name.rpartition(".")[0]
        given = (of for pattern, of in known if fnmatch.fnmatchcase(module, pattern))
        style = str(next(given, "")).partition("(")[0]
        shard = entry.placements.get(axis)
        dim, parts = getattr(shard, "dim", None), getattr(shard, "parts", 1)
        sizes = getattr(shard, "sizes", ())
        # a table, in which a token chooses a row, and not a matrix of a linear layer
        lookup = "embed" in module
        rows, columns = entry.shape if lookup else reversed(entry.shape)
        cut = "" if dim is None else "rows" if (dim == 0) == lookup else "columns"
        if cut and not style:
            style = "vocabulary" if lookup else "column" if dim == 0 else "row"
        if style == "vocabulary":
            style += " embedding" if lookup else " head"
        matrix = CutMatrix(name, 1, rows, columns)
        if cut:
            blocks = tuple((k, size // parts) for k, size in enumerate(sizes)) * parts
            both = zip(("forward", "backward"), collectives.get(SAME.get(style, style), ()))
            needs = tuple(f"{when}: {what}" for when, what in both if what)
            matrix = CutMatrix(name, 1, rows, columns, cut, blocks, style, needs)
        key = re.sub(r"(?<![^.])\d+(?![^.])", "*", name), *matrix[2:]
        drawn.setdefault(key, []).append(matrix)
    found = [
        of[0]._replace(name=name, times=len(of)) if len(of) > 1 else of[0]
        for (name, *_), of in drawn.items()
    ]
    check_drawn(len(found), MOST, f"the layout has {len(found)} different matrices")
    longest = max(max(m.rows, m.columns) for m in found)
    sides = {n: side(n, longest, LONG, SHORT) for m in found for n in (m.rows, m.columns)}
    grid = [found[i : i + ACROSS] for i in range(0, len(found), ACROSS)]
    heights = [
        max(side(m.rows, longest, LONG, SHORT) + 16 * len(m.needs) for m in row) + 84
        for row in grid
    ]
    words = " ".join(matrix_text(m) for m in found)
    scene = Scene(960, math.ceil(TOP + sum(heights) + 10), title, words)
    scene.style += (
        ".cut{stroke:var(--bg);stroke-width:1.5}.whole{fill:var(--faint);stroke:var(--line)}"
    )
    ranks = max(len({position for position, _ in m.blocks}) for m in found)
    sentence = (
        "As x @ Wᵀ uses them: inputs down, outputs across. A block's number is the position of "
        f"its rank along {axis}."
    )
    more = "Grey: every rank holds all of it. " * any(not m.cut for m in found)
    if sum(m.times for m in found if m.style == "column") > 1:
        more += "Column layers with the same input share one collective. "
    more += "Sides are not to scale."
    scene.head(f"{axis} · {ranks} rank{'s' * (ranks != 1)}" if ranks else axis, sentence, 13.5)
    scene.panel(narrow="none").write(more, 28, 82, 13, "m")
    scene.intro = f"{sentence} {more}"
    y, low = TOP + 8, 56.0
    for row, high in zip(grid, heights):
        for i, matrix in enumerate(row):  # on phones two in a row
            panel = scene.panel(
                narrow=f"translate({-CELL * (i - i % 2):g},{low + high * (i // 2) - y:g})"
            )
            _matrix(panel, matrix, sides, 28 + CELL * i, y)
        y += high
        low += high * -(-len(row) // 2)
    scene.narrow = (480, math.ceil(low + 10))
    return scene


def matrix_text(m: CutMatrix) -> str:
    """Return the numbers of a matrix, for the picture's alternative text."""
    how = f"{m.cut} cut into {sizes_text(m)} ({m.style})" if m.cut else "whole on every rank"
    more = "".join(f"; {what}" for what in m.needs)
    return f"{m.name}: {m.rows} × {m.columns}, {how}{more}."


def sizes_text(m: CutMatrix) -> str:
    """Return the sizes of the blocks: "64 + 64", or "8 × 32"."""
    sizes = [size for _, size in m.blocks]
    if len(set(sizes)) == 1 and len(sizes) > 2:
        return f"{len(sizes)} × {sizes[0]}"
    if len(sizes) > 4:
        return f"{len(sizes)} parts of {min(sizes)} to {max(sizes)}"
    return " + ".join(map(str, sizes))


def _matrix(scene: Node, m: CutMatrix, sides: Mapping[int, float], left: float, top: float) -> None:
    width, tall = sides[m.columns], sides[m.rows]
    x, y = left + 34, top + 54
    several, name = f"  × {m.times}" if m.times > 1 else "", m.name.removesuffix(".weight")
    name = name if len(name) <= 24 else f"…{name[-23:]}"
    scene.write(name + several, left, top + 14, 13.5, "b")
    words = f"{m.style.partition(' ')[0]}: {sizes_text(m)} {m.cut}" if m.cut else "not cut"
    scene.write(words, left, top + 31, 12, "m")
    scene.write(m.columns, x + width / 2, y - 5, 11, "m c")
    scene.write(m.rows, x - 5, y + tall / 2 + 4, 11, "m e")
    if not m.cut:
        scene.rect(x, y, width, tall, "whole", title=matrix_text(m))
    at, whole = 0, sum(size for _, size in m.blocks)
    for position, size in m.blocks:
        rows, columns = (0, whole), (at, at + size)
        part = (rows, columns) if m.cut == "columns" else (columns, rows)
        place = part_of((x, y, width, tall), (whole, whole), part)
        title = f"position {position}: {size} of {whole} {m.cut} of {m.name}"
        scene.rect(*place, f"cut f{position % len(CHUNK)}", title=title)
        scene.label(position, place, f"o{position % len(CHUNK)}", 11.5, 11)
        at += size
    scene.lines(m.needs, left, y + tall + 17, 16, 11, "m")
