"""Draws a collective as two matrices, before and after: each rank's blocks, in order.

    before   a0 b0 c0        after   a0 a1 a2       the blocks fly to their new places;
             a1 b1 c1    ──▶         b0 b1 b2       an all-to-all is a transposition
             a2 b2 c2                c0 c1 c2

What the blocks are is computed in `laboratory.analysis.replay`, from what each rank returned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from parallel101.laboratory.analysis.replay import (
    ChunkPart,
    Replay,
    given_blocks,
    is_transposed,
    replay_of,
    returned_blocks,
)
from parallel101.laboratory.analysis.verdict import lacks
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.viz.captions import Captions, draw_caption, matrix_sentence
from parallel101.laboratory.viz.grid import GONE, Cell, Grid
from parallel101.laboratory.viz.grid import STYLE as MARKS
from parallel101.laboratory.viz.scene import Box, Node, Scene, Stop, check_ranks

MOST_RANKS, MOST_BLOCKS = 16, 16
WIDTH, TOP = 384.0, 124.0  # of a matrix; TOP is the y of the first row
LEFTS = 92.0, 548.0
# seconds: before the first row moves, for a row, for all rows, for the end
LEAD, LONGEST, STEPS, LAST = 0.6, 1.4, 14.0, 1.6
STYLE = (
    ".unused{fill:none;stroke:var(--line);stroke-dasharray:3 3}.small .flight{transform:none}"
    "text.over{fill:var(--ink);stroke:var(--bg);stroke-width:3;paint-order:stroke}"
)


def before_after_scene(
    trace: Trace,
    results: Sequence[Any] | None,
    watched: Sequence[int] | None,
    title: str | None = None,
) -> Scene:
    """Draw what each rank was given and what it returned, block by block.

    Args:
        trace, results, watched: of a run of `parallel101.watch`, with up to 16 ranks.
        title: above the picture; None: the collective, if the values prove which it was.

    Returns:
        A Scene with one stop for each rank, in which the blocks that it was given move to where
        they were returned.

    Raises:
        ValueError: the run was not watched, or has too many ranks or blocks.
    """
    replay = replay_of(trace, results, watched=watched, idle=True)
    given, returned = given_blocks(replay), returned_blocks(replay)
    n, most = len(replay.ranks), max(map(len, [*given, *returned]))
    check_ranks(n, MOST_RANKS, "use fewer ranks, or run.animate()")
    if most > MOST_BLOCKS:
        raise ValueError(
            f"a rank has {most} blocks, and this picture can show up to {MOST_BLOCKS}: use fewer "
            "ranks, or run.animate()"
        )
    captions = Captions(replay)
    text, wrong = matrix_sentence(captions, given, returned), bool(captions.verdict.faults)
    numbered = any(len(chunk.stripes) > 1 for chunk in replay.chunks)
    notes = ["A letter is a part of the data" + ", a number the rank it came from" * numbered + "."]
    notes += ["Stripes are the ranks whose data is summed."] * replay.sums
    notes += ["Red: what a sum lacks, or contains twice."] * (replay.sums and wrong)
    unused = any(block.chunk is None for row in given for block in row)
    notes += ["Dashed: values that are not used."] * unused
    width, height = min(64.0, WIDTH / most), min(44.0, 300.0 / n)
    high = n * height
    scene = Scene(960, math.ceil(TOP + high + 26 + 18 * len(notes)), title or captions.title, text)
    scene.narrow = (480, math.ceil(TOP + 2 * high + 36 + 18 * len(notes)))
    scene.style += MARKS + STYLE
    scene.head(captions.size, "")
    below = scene.panel(narrow=f"translate(0,{scene.narrow[1] - scene.height})")
    below.lines(notes, 28, TOP + high + 28, 18, 12, "m")
    before = scene.panel(narrow="translate(0,-34)")
    after = scene.panel(narrow=f"translate({LEFTS[0] - LEFTS[1]},{high + 10:g})")
    old, new = (Grid(left, TOP, width, height, replay.ranks, most) for left in LEFTS)
    _frame(before, old, replay, "before", given)
    _frame(after, new, replay, "after", returned)
    places: dict[tuple[int | None, int], Cell] = {}
    for row, blocks in enumerate(given):
        for column, block in enumerate(blocks):
            places[block.chunk, replay.ranks[row]] = row, column
            _block(before, replay, block, old.inside(row, column))
    moving: dict[int, list[tuple[Cell, ChunkPart]]] = defaultdict(list)
    cells = {(row, k): of for row, blocks in enumerate(returned) for k, of in enumerate(blocks)}
    for origin in replay.ranks:  # a sum counts by its summands
        for cell, block in cells.items():
            if block.counts and block.counts[origin] and (block.chunk, origin) in places:
                moving[origin].append((cell, block))
    step = min(LONGEST, STEPS / max(len(moving), 1))
    scene.duration = round(LEAD + step * len(moving) + LAST, 2)
    scene.intro = "What each rank was given."
    sentences = scene.panel(narrow="none")
    draw_caption(sentences, scene.intro, (0.0, LEAD))
    ends = [LEAD + (k + 1) * step for k in range(len(moving) - 1)] + [scene.duration]
    for (origin, flights), begin, end in zip(moving.items(), [LEAD, *ends], ends):
        last, rows = end == scene.duration, sorted({replay.ranks[row] for (row, _), _ in flights})
        words = f"What rank {origin} was given goes to {ranks_text(rows, replay.ranks)}."
        if rows == [origin]:
            words = f"Rank {origin} keeps its data."
        if is_transposed(given, returned):
            place = replay.ranks.index(origin)
            words = f"Row {place} becomes column {place}: "
            words += f"rank {origin} has one block for each rank."
        landed = begin + 0.75 * step
        draw_caption(sentences, words, (begin, landed + 0.5 if last else end))
        stop = Stop(begin, end, f"{words} {text}") if last else Stop(begin, end - 0.03, words)
        scene.stops.append(stop)
        for to, block in flights:
            (x, y), (x0, y0) = new.inside(*to)[:2], old.inside(*places[block.chunk, origin])[:2]
            group = after.add("g", class_="flight").show((begin, scene.duration + 1))
            group.key("translate", (begin, (x0 - x, y0 - y)), (landed, (0.0, 0.0)), mode="ease")
            if _summed(replay, block):
                assert block.chunk is not None
                stripes = replay.chunks[block.chunk].stripes
                stripe = new.stripe(*to, stripes.index(origin), len(stripes), rim=1.2)
                group.rect(*stripe, f"f{block.chunk % 8}")
            else:
                _block(group, replay, block, new.inside(*to))
        if last:
            draw_caption(sentences, text, (landed + 0.5, scene.duration + 1), wrong=wrong)
    if not moving:
        scene.stops.append(Stop(LEAD, scene.duration, text))
        draw_caption(sentences, text, (LEAD, scene.duration + 1), wrong=wrong)
    sums = after.add("g").show((scene.duration - LAST, scene.duration + 1))
    for cell, block in cells.items():
        if _summed(replay, block):  # its letter, and what it lacks or contains more than once
            assert block.chunk is not None
            x, y, width, tall = new.inside(*cell)
            of, chunk = block.counts, replay.chunks[block.chunk]
            gone = lacks(replay, replay.ranks[cell[0]], block.chunk)
            flags = [f"×{of[r]}" if of[r] > 1 else GONE if r in gone else "" for r in chunk.stripes]
            twice = any(of[rank] > 1 for rank in chunk.stripes)
            room = tall > 30  # for the flags below the letter
            new.faults(sums, cell, flags, tall - 10 if room else None)
            if not twice or room:
                inside = x, y, width, tall * (0.56 if twice else 1.0)
                sums.label(chunk.label, inside, "b over", min(15.0, 0.62 * tall), 0)
    return scene


def _frame(panel: Node, grid: Grid, replay: Replay, name: str, rows: list[list[ChunkPart]]) -> None:
    """Draw the name of a matrix, its ranks, and a pale box for each block."""
    panel.write(name, grid.left, TOP - 12, 15, "b")
    for row, (rank, blocks) in enumerate(zip(replay.ranks, rows)):
        y = TOP + (row + 0.5) * grid.height + 4
        panel.write(f"rank {rank}", grid.left - 10, y, 12.5, "m e")
        for column, block in enumerate(blocks):
            if block.chunk is not None:
                panel.rect(*grid.inside(row, column), "faint", rx=4)
        if not blocks:
            unreadable = replay.origins[rank] is None and replay.results[rank] is not None
            what = "can't be read" if name == "after" and unreadable else "nothing"
            panel.write(what, grid.left + 6, y, 12, "m")


def _block(parent: Node, replay: Replay, block: ChunkPart, place: Box) -> None:
    """Draw a block at its place, in the colour of its chunk."""
    if block.chunk is None:
        parent.rect(*place, "unused", rx=4)
        return
    chunk, colour = replay.chunks[block.chunk], block.chunk % 8
    several = len(chunk.stripes) > 1 and 1 in block.counts
    parent.rect(*place, f"f{colour}", rx=4)
    text = f"{chunk.label}{block.counts.index(1)}" if several else chunk.label
    parent.label(text, place, f"b o{colour}", min(15.0, 0.62 * place[3]), 0)


def _summed(replay: Replay, block: ChunkPart) -> bool:
    """Return whether a block has a stripe for each rank whose data belongs in it."""
    return replay.sums and block.chunk is not None and len(replay.chunks[block.chunk].stripes) > 1
