"""Draws a collective as two matrices, before and after: each rank's blocks, in order.

    before   a0 b0 c0        after   a0 a1 a2       the blocks fly to their new places;
             a1 b1 c1    ──▶         b0 b1 b2       an all-to-all is a transposition
             a2 b2 c2                c0 c1 c2

What the blocks are is computed in `laboratory.analysis.rank_blocks`, from what each rank returned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parallel101.laboratory.analysis.rank_blocks import (
    ChunkPart,
    given_blocks,
    is_transposed,
    returned_blocks,
)
from parallel101.laboratory.analysis.replay import Replay, replay_of
from parallel101.laboratory.analysis.unwritten import Watched
from parallel101.laboratory.analysis.verdict import lacks
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.viz.captions import Captions, fitted
from parallel101.laboratory.viz.matrix import STYLE as MARKS
from parallel101.laboratory.viz.scene import Node, Point, Scene, Stop

MOST_RANKS, MOST_BLOCKS = 16, 16
WIDTH, TOP, GAP = 384.0, 124.0, 2.0  # of a matrix; TOP is the y of the first row
LEFTS = 92.0, 548.0
# seconds: before the first row moves, for a row, for all rows, for the end
LEAD, LONGEST, STEPS, LAST = 0.6, 1.4, 14.0, 1.6


def before_after_scene(
    trace: Trace, results: Sequence[Any] | None, watched: Watched | None, title: str | None = None
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
    if n > MOST_RANKS or most > MOST_BLOCKS:
        raise ValueError(
            f"the run has {n} ranks with up to {most} blocks each, and this picture can show up to "
            f"{MOST_RANKS} ranks and {MOST_BLOCKS} blocks: use fewer ranks, or run.animate()"
        )
    captions = Captions(replay)
    text, wrong = result_text(replay, captions, given, returned), bool(captions.verdict.faults)
    cell = min(64.0, WIDTH / most), min(44.0, 300.0 / n)
    notes = [
        "A letter is a part of the data"
        + (", a number the rank it came from." if _numbered(replay) else ".")
    ]
    notes += ["Stripes are the ranks whose data is summed."] * replay.sums
    notes += ["Red: what a sum lacks, or contains twice."] * (replay.sums and wrong)
    notes += ["Dashed: values that are not used."] * any(
        block.chunk is None for row in given for block in row
    )
    high = n * cell[1]
    scene = Scene(960, math.ceil(TOP + high + 26 + 18 * len(notes)), title or captions.title, text)
    scene.narrow = (480, math.ceil(TOP + 2 * high + 36 + 18 * len(notes)))
    scene.style += (
        MARKS
        + ".unused{fill:none;stroke:var(--line);stroke-dasharray:3 3}.small .flight{transform:none}"
    )
    scene.style += "text.over{fill:var(--ink);stroke:var(--bg);stroke-width:3;paint-order:stroke}"
    scene.panel(narrow="translate(0,0)").write(scene.title, 28, 40, None, "h")
    scene.panel(narrow="none").write(captions.size, 932, 40, 13, "m e")
    below = scene.panel(narrow=f"translate(0,{scene.narrow[1] - scene.height})")
    for k, note in enumerate(notes):
        below.write(note, 28, TOP + high + 28 + 18 * k, 12, "m")
    before, after = (
        scene.panel(narrow="translate(0,-34)"),
        scene.panel(narrow=f"translate({LEFTS[0] - LEFTS[1]},{high + 10:g})"),
    )
    for panel, left, name, rows in (
        (before, LEFTS[0], "before", given),
        (after, LEFTS[1], "after", returned),
    ):
        _frame(panel, replay, left, name, rows, cell)
    places: dict[tuple[int | None, int], Point] = {}
    for i, (rank, row) in enumerate(zip(replay.ranks, given)):
        for k, block in enumerate(row):
            places[block.chunk, rank] = (LEFTS[0] + k * cell[0], TOP + i * cell[1])
            _block(before, replay, block, places[block.chunk, rank], cell)
    moving = _flights(replay, returned, places, cell)
    step = min(LONGEST, STEPS / max(len(moving), 1))
    scene.duration = round(LEAD + step * len(moving) + LAST, 2)
    scene.intro = "What each rank was given."
    _sentence(scene, scene.intro, 0.0, LEAD)
    for number, (origin, flights) in enumerate(moving.items()):
        begin, last = LEAD + number * step, number == len(moving) - 1
        words = _row_text(replay, origin, flights, is_transposed(given, returned))
        landed = begin + 0.75 * step
        _sentence(scene, words, begin, landed + 0.5 if last else begin + step)
        scene.stops.append(
            Stop(
                begin,
                scene.duration if last else begin + step - 0.03,
                f"{words} {text}" if last else words,
            )
        )
        for flight in flights:
            (x, y), (x0, y0) = flight.to, places[flight.block.chunk, origin]
            group = after.add("g", class_="flight").show((begin, scene.duration + 1))
            group.key("translate", (begin, (x0 - x, y0 - y)), (landed, (0.0, 0.0)), mode="ease")
            if _summed(replay, flight.block):
                colour = (flight.block.chunk or 0) % 8
                group.add(
                    "rect",
                    **_stripe(replay, flight.block, (x, y), cell, origin),
                    class_=f"f{colour}",
                )
            else:
                _block(group, replay, flight.block, (x, y), cell)
        if last:
            _sentence(scene, text, landed + 0.5, scene.duration + 1, wrong)
    if not moving:
        scene.stops.append(Stop(LEAD, scene.duration, text))
        _sentence(scene, text, LEAD, scene.duration + 1, wrong)
    sums = after.add("g").show((scene.duration - LAST, scene.duration + 1))
    for i, (rank, row) in enumerate(zip(replay.ranks, returned)):
        for k, block in enumerate(row):
            if _summed(replay, block):
                _marks(sums, replay, rank, block, (LEFTS[1] + k * cell[0], TOP + i * cell[1]), cell)
    return scene


class Flight(NamedTuple):
    """A block on its way to a place in what `rank` returned."""

    rank: int
    block: ChunkPart  # as it was returned
    to: Point


def _flights(
    replay: Replay,
    returned: list[list[ChunkPart]],
    places: Mapping[tuple[int | None, int], Point],
    cell: Point,
) -> dict[int, list[Flight]]:
    """Return the blocks in the ranks' results, by the rank that was given them.

    A block that is a sum counts by its summands.
    """
    found: dict[int, list[Flight]] = {rank: [] for rank in replay.ranks}
    for i, (rank, row) in enumerate(zip(replay.ranks, returned)):
        for k, block in enumerate(row):
            for origin, count in enumerate(block.counts):
                if count and (block.chunk, origin) in places:
                    found[origin].append(
                        Flight(rank, block, (LEFTS[1] + k * cell[0], TOP + i * cell[1]))
                    )
    return {origin: flights for origin, flights in found.items() if flights}


def _sentence(scene: Scene, text: str, begin: float, end: float, wrong: bool = False) -> None:
    group, (size, lines) = (
        scene.panel(narrow="none").add("g").show((begin, end)),
        fitted(text, 904, wrong),
    )
    for k, line in enumerate(lines):
        group.write(line, 28, 64 if len(lines) == 1 else 59 + 16 * k, size, "w b" if wrong else "m")


def _row_text(replay: Replay, origin: int, flights: Sequence[Flight], transposed: bool) -> str:
    to = sorted({flight.rank for flight in flights})
    if transposed:
        place = replay.ranks.index(origin)
        return f"Row {place} becomes column {place}: rank {origin} has one block for each rank."
    return (
        f"Rank {origin} keeps its data."
        if to == [origin]
        else f"What rank {origin} was given goes to {ranks_text(to, replay.ranks)}."
    )


def result_text(
    replay: Replay,
    captions: Captions,
    given: list[list[ChunkPart]],
    returned: list[list[ChunkPart]],
) -> str:
    """Return a sentence that says what happened to the matrix."""
    first, operation = replay.ranks[0], captions.operation
    holder = next(
        (
            rank
            for rank, row in zip(replay.ranks, given)
            if len(row) > 1 or row[0].chunk is not None
        ),
        first,
    )
    receiver = next((rank for rank, row in zip(replay.ranks, returned) if row), first)
    verdict = captions.verdict
    if all(result is None for result in replay.results):
        return "The function returned nothing."
    if verdict.faults or verdict.mean or verdict.unreadable:
        return verdict.sentence()
    if is_transposed(given, returned):
        return "Each column has become a row: the matrix of blocks is transposed."
    if operation == "all-gather":
        return "The column of blocks has become a row, and every rank has it."
    if operation == "gather":
        return f"The column of blocks has become the row of rank {receiver}."
    if operation == "scatter":
        return f"The row of rank {holder} has become a column."
    if operation == "reduce-scatter":
        return "Each column is added up, and its sum becomes the row of one rank."
    if operation == "all-reduce":
        return "Each column is added up, and every rank has the sums."
    return verdict.sentence()


def _numbered(replay: Replay) -> bool:
    """Return whether the same letter came from several ranks."""
    return any(len(chunk.stripes) > 1 for chunk in replay.chunks)


def _frame(
    scene: Node, replay: Replay, left: float, name: str, rows: list[list[ChunkPart]], cell: Point
) -> None:
    scene.write(name, left, TOP - 12, 15, "b")
    for i, (rank, row) in enumerate(zip(replay.ranks, rows)):
        y = TOP + i * cell[1]
        scene.write(f"rank {rank}", left - 10, y + cell[1] / 2 + 4, 12.5, "m e")
        for k, block in enumerate(row):
            if block.chunk is not None:
                scene.add("rect", **_inside((left + k * cell[0], y), cell), rx=4, class_="faint")
        if not row:
            what = (
                "can't be read"
                if name == "after"
                and replay.terms[rank] is None
                and replay.results[rank] is not None
                else "nothing"
            )
            scene.write(what, left + 6, y + cell[1] / 2 + 4, 12, "m")


def _inside(at: Point, cell: Point) -> dict[str, float]:
    return {
        "x": at[0] + GAP,
        "y": at[1] + GAP,
        "width": cell[0] - 2 * GAP,
        "height": cell[1] - 2 * GAP,
    }


def _block(parent: Node, replay: Replay, block: ChunkPart, at: Point, cell: Point) -> None:
    """Draw a block at its place, in the colour of its chunk."""
    place = _inside(at, cell)
    if block.chunk is None:
        parent.add("rect", **place, rx=4, class_="unused")
        return
    chunk, colour = replay.chunks[block.chunk], block.chunk % 8
    text = (
        f"{chunk.label}{block.counts.index(1)}"
        if len(chunk.stripes) > 1 and 1 in block.counts
        else chunk.label
    )
    parent.add("rect", **place, rx=4, class_=f"f{colour}")
    _label(parent, text, place, f"b c o{colour}")


def _label(
    parent: Node, text: str, place: dict[str, float], class_: str, middle: float = 0.5
) -> None:
    size = min(15.0, 0.62 * place["height"], 1.35 * place["width"] / len(text))
    y = place["y"] + middle * place["height"] + 0.35 * size
    parent.write(text, place["x"] + place["width"] / 2, y, size, class_)


def _summed(replay: Replay, block: ChunkPart) -> bool:
    """Return whether a block has a stripe for each rank whose data belongs in it."""
    return replay.sums and block.chunk is not None and len(replay.chunks[block.chunk].stripes) > 1


def _stripe(
    replay: Replay, block: ChunkPart, at: Point, cell: Point, origin: int
) -> dict[str, float]:
    """Return the place of one rank's data in a sum."""
    assert block.chunk is not None
    place, stripes = _inside(at, cell), replay.chunks[block.chunk].stripes
    each = place["width"] / len(stripes)
    return place | {
        "x": place["x"] + stripes.index(origin) * each,
        "width": each - min(1.2, 0.2 * each),
    }


def _marks(
    parent: Node, replay: Replay, rank: int, block: ChunkPart, at: Point, cell: Point
) -> None:
    """Draw the letter of a sum, and what it lacks or contains more than once."""
    assert block.chunk is not None
    place, chunk, twice = (
        _inside(at, cell),
        replay.chunks[block.chunk],
        [r for r, count in enumerate(block.counts) if count > 1],
    )
    missing = lacks(replay, rank, block.chunk)
    for origin in missing:
        parent.add("rect", **_stripe(replay, block, at, cell, origin), class_="gone")
    if twice or missing:
        parent.add("rect", **place, rx=4, class_="err")
    if not twice or place["height"] > 30:
        _label(parent, chunk.label, place, "b c over", middle=0.28 if twice else 0.5)
    for origin in twice:
        stripe = _stripe(replay, block, at, cell, origin)
        x = min(
            max(stripe["x"] + stripe["width"] / 2, place["x"] + 9.5),
            place["x"] + place["width"] - 9.5,
        )
        y = place["y"] + place["height"] - (10 if place["height"] > 30 else place["height"] / 2)
        parent.rect(x - 9.5, y - 7, 19, 14, "flag", rx=4)
        parent.write(f"×{block.counts[origin]}", x, y + 3.6, None, "flagged c")
