"""Draws which blocks of each matrix a rank holds, before and after each collective of a product.

                A[I, J_X]    B[J_X, K]     multiply          AllReduce_X
    rank 0      [a| . ]      [ a ]         [a: 1 of 2]       [ a ]
                             [ . ]
    rank 1      [ . |b]      [ . ]         [a: 1 of 2]       [ a ]

There is a row for each rank, and a column for each array as it changes. A box is the whole matrix.
The part that the rank holds is filled, with a colour and a letter for each block. A block with only
some terms of its sum is filled in part.

analysis/held_blocks.py finds what a block is from its values, so a forgotten sum or a wrong dim is
drawn as it happened.
"""

from __future__ import annotations

import math
import re

from parallel101.laboratory.analysis.held_blocks import (
    HeldRectangle,
    RecordedProduct,
    bytes_by_step,
    columns_of,
    parts_of,
)
from parallel101.laboratory.record.units import human_bytes
from parallel101.laboratory.viz.grid import part_of, side
from parallel101.laboratory.viz.palette import CHUNK
from parallel101.laboratory.viz.scene import Box, Node, Scene

LEFT, RIGHT, TOP = 112.0, 948.0, 150.0
WIDEST, LONG, SHORT = 280.0, 92.0, 20.0  # of a column; the longest side of a box, and the shortest
MOST_RANKS, MOST_COLUMNS = 16, 9
MOST_NARROW = 3  # columns that a phone shows at once


def sharding_scene(run: RecordedProduct, *, title: str | None = None) -> Scene:
    """Draw which blocks the ranks held, before and after each step.

    Args:
        run: what `parallel101.sharding.run` returned.
        title: of the picture.

    Returns:
        A still Scene. Under each collective are the bytes of the rank that sent most, counted in
        the record.

    Raises:
        ValueError: more than 16 ranks, more than 9 columns, or an array of more than two dims.
    """
    plan, columns = run.plan, list(columns_of(run))
    ranks = len(run.held)
    if ranks > MOST_RANKS or len(columns) > MOST_COLUMNS:
        raise ValueError(
            f"the run has {ranks} ranks and {len(columns)} arrays to draw: expected at most "
            f"{MOST_RANKS} ranks and {MOST_COLUMNS} arrays. print(run) shows the steps"
        )
    for column in columns:
        if not 1 <= len(column.array.dims) <= 2:
            raise ValueError(
                f"{column.array} has {len(column.array.dims)} dims: expected one or two to draw"
            )
    across = min(WIDEST, (RIGHT - LEFT) / len(columns))
    row = 104.0 if ranks <= 4 else 74.0
    large = min(across - 26, row - 16, LONG)
    text = f"{' · '.join(map(str, plan.operands))} → {plan.result}"
    drawn = [[parts_of(run, column, rank) for rank in range(ranks)] for column in columns]
    known = [part for of in drawn for parts in of for part in parts if part.cell is not None]
    counts = {count for part in known for count in part.counts}
    words = run.verdict
    for column, of in zip(columns, drawn):
        by_rank = []
        for rank, parts in enumerate(of):
            names = "".join("?" if p.cell is None else letters(p.cell) for p in parts) or "nothing"
            short = [list(part.counts) for part in parts if set(part.counts) != {1}]
            by_rank.append(f"rank {rank} {names}" + (f" (terms {short[0]})" if short else ""))
        words += f" {column.title or 'At first'}, {column.array}: {', '.join(by_rank)}."
    scene = Scene(960, math.ceil(TOP + ranks * row + 30), title or text, words)
    scene.style += (
        ".cut{stroke:var(--bg);stroke-width:1}.outline{fill:none;stroke:var(--line)}"
        ".lack{fill:url(#hatching)}.bad{fill:none;stroke:var(--warn);stroke-width:2}"
        ".due{fill:none;stroke:var(--warn);stroke-dasharray:4 3}"
        "text.many{fill:var(--warn);font-weight:700;stroke:var(--bg);stroke-width:3;"
        "paint-order:stroke}"
        ".strange{fill:var(--warn);fill-opacity:.25}.sep{stroke:var(--line);stroke-dasharray:2 4}"
    )
    # on a phone, the columns move together, and the verdict is the caption below
    narrow = len(columns) <= MOST_NARROW
    head = scene.panel(narrow="translate(0,0)")
    facts = " · ".join(f"{axis} = {p}" for axis, p in plan.mesh.items())
    if title:
        head.write(title, 28, 40, None, "h")
    else:
        subscripts(head, text, 28, 40, 19, class_="h")
    right = scene.panel(narrow="translate(-480,24)")
    right.write(f"{facts} · {run.run.backend}", 932, 40, 13, "m e")
    wide, look = scene.panel(narrow="none"), "w" if run.wrong else "m"
    subscripts(wide, run.verdict, 28, 64, 13.5, class_=look)
    sent = bytes_by_step(run.run.trace) if run.run.trace is not None else {}
    dashed, longest = False, max(plan.sizes.values())
    for k, column in enumerate(columns):
        x = LEFT + k * across
        panel = scene.panel(narrow=f"translate({LEFT + k * (480 - LEFT) / len(columns) - x:.1f},0)")
        if column.state and (k == 0 or column.state != columns[k - 1].state):
            panel.add("line", x1=x - 6, x2=x - 6, y1=84, y2=TOP + ranks * row - 8, class_="sep")
        subscripts(panel, column.title or "at first", x, 96, 13, "b" if column.title else "m")
        subscripts(panel, str(column.array), x, 116, 13)
        nbytes = sent.get(column.state - 1) if not run.program else None
        if nbytes is not None:
            told = f"{human_bytes(nbytes)} a rank" if nbytes else "no message"
            panel.write(told, x, 134, 12, "m")
        extents = [plan.sizes[dim] for dim in column.array.dims]
        # of the whole matrix: rows, and columns
        whole = (extents[0], extents[1]) if len(extents) == 2 else (1, extents[0])
        for rank, at in enumerate(plan.coordinates()):
            parts, y = drawn[k][rank], TOP + rank * row
            length, depth = (side(n, longest, large, SHORT) for n in whole[::-1])
            matrix = x, y, length, depth
            block = run.held[rank][column.state].get(column.array.name)
            shape = tuple(getattr(block, "shape", ()))
            title = f"rank {rank}: {column.array}, shape {shape} of {tuple(extents)}"
            panel.rect(*matrix, "outline", title=title)
            due = [(of.start, of.stop) for of in column.array.block(plan.sizes, plan.mesh, at)]
            held = due = [(0, 1)] * (len(due) == 1) + due
            if parts:
                both = [p.rows for p in parts], [p.columns for p in parts]
                held = [(min(a for a, _ in of), max(b for _, b in of)) for of in both]
            place, sizes = matrix, whole
            if held[0][1] > whole[0] or held[1][1] > whole[1]:  # larger: with its own sides
                sizes = held[0][1], held[1][1]
                most = max(longest, *sizes)
                length, depth = (side(n, most, large, SHORT) for n in sizes[::-1])
                place = x, y, length, depth
            wrong = rank in run.wrong and k == len(columns) - 1
            if wrong and held != due:
                panel.rect(*part_of(matrix, whole, due), "due")
                dashed = True
            for part in parts:
                draw_part(panel, part, part_of(place, sizes, [part.rows, part.columns]))
            if wrong:
                left, top, width, height = part_of(place, sizes, held)
                panel.rect(left - 3, top - 3, width + 6, height + 6, "bad", rx=3)
            terms_held = parts[0].counts if parts else (1,)
            if min(terms_held) < 1 and all(part.counts == terms_held for part in parts):
                terms = f"{sum(count > 0 for count in terms_held)} of {len(terms_held)}"
                look = "w" if wrong else "m"
                panel.lines((terms, "terms"), x + place[2] + 8, y + 11, 14, 11, look)
    for rank, at in enumerate(plan.coordinates()):
        y = TOP + rank * row + large / 2
        head.write(f"rank {rank}", 28, y, 13, "b")
        head.write(", ".join(f"{axis} {i}" for axis, i in at.items()), 28, y + 16, 11.5, "m")
    signs = "Letter and colour: which block of the matrix."
    signs += " Stripes: the terms of its sum." * bool(counts - {1})
    signs += " Hatched: missing." * (0 in counts)
    signs += " ×2: added twice." * (max(counts, default=1) > 1)
    signs += " Dashed: the block that the rank should hold." * dashed
    foot = scene.panel(narrow="none" if narrow else "translate(0,0)")
    foot.write(signs, 28, scene.height - 18, 12.5, "m")
    if narrow:
        scene.narrow, scene.intro = (480, scene.height - 20), f"{run.verdict} {signs}"
    return scene


def draw_part(scene: Node, part: HeldRectangle, place: Box) -> None:
    if part.cell is None:
        scene.rect(*place, "strange")
        scene.label("?", place, "w", 11, 0)
        return
    (x, y, width, height), letter = place, letters(part.cell)
    colour, whole = part.cell % len(CHUNK), set(part.counts) == {1}
    # a stripe for each term of the sum, along the longer side
    n, along = 1 if whole else len(part.counts), width >= height
    wide, tall = (width / n, height) if along else (width, height / n)
    stripes = [(x + k * wide * along, y + k * tall * (not along), wide, tall) for k in range(n)]
    for count, stripe in zip((1,) if whole else part.counts, stripes):
        scene.rect(*stripe, f"cut f{colour}" if count else "lack")
        if count > 1:
            scene.label(f"×{count}", stripe, "many", 11, 9)
    if not whole:
        scene.rect(*place, "outline")
    # the letter goes into the first
    first = next((k for k, count in enumerate(part.counts) if count), 0)
    scene.label(letter, stripes[first if not whole else 0], f"o{colour}", 12, 10)


def letters(cell: int) -> str:
    """Return the letters of a cell: a to z, then aa, ab, …."""
    return (letters(cell // 26 - 1) if cell >= 26 else "") + chr(ord("a") + cell % 26)


def subscripts(scene: Node, text: str, x: float, y: float, size: float, class_: str = "") -> None:
    """Write a text in which _X and _{X,K} are lower and smaller."""
    line = scene.add("text", x=x, y=y, font_size=size, class_=class_)
    lowered = False
    for k, word in enumerate(re.split(r"_(\{[^}]*\}|[A-Za-z0-9]+)", text)):
        if word:
            below = bool(k % 2)
            look = {"dy": size * 0.25 * (below - lowered), "style": "white-space:pre"}
            look["font_size"] = size * (0.72 if below else 1)
            line.add("tspan", word.strip("{}") if below else word, **look)
            lowered = below
