"""Before and after: the blocks that each rank was given and returned are those of the values,
and the sentence says what became of them.
"""

from __future__ import annotations

import re
from functools import partial

import pytest

import parallel101 as p101
from parallel101.laboratory.analysis.replay import given_blocks, replay_of, returned_blocks
from tests.viz import programs as p
from tests.viz.drawn import assert_inside, elements, texts


def names(run, which):
    """Each rank's blocks: "a0" is the part a of rank 0, "a012" a sum of three."""
    replay = replay_of(run.trace, run.results, watched=run.watched, idle=True)

    def name(block):
        if block.chunk is None:
            return "–"
        summed = "".join(str(rank) * count for rank, count in enumerate(block.counts))
        return replay.chunks[block.chunk].label + summed

    return [" ".join(map(name, row)) for row in which(replay)]


BLOCKS, ALL, ROW = ["a0 b0 c0", "a1 b1 c1", "a2 b2 c2"], ["a0", "b1", "c2"], "a0 b1 c2"
COLUMNS, SUMS = ["a0 a1 a2", "b0 b1 b2", "c0 c1 c2"], ["a012", "b012", "c012"]
TWICE, LOST = (
    partial(p.broken_ring_all_reduce, **of) for of in ({"twice": (1, 0)}, {"lost": (1, 1)})
)
CASES = {  # the sentence → the program, and the blocks before and after
    "is transposed.": (p101.all_to_all, BLOCKS, COLUMNS),
    "has become a row, and every rank has it.": (p101.all_gather, ALL, [ROW] * 3),
    "has become the row of rank 0.": (p101.gather, ALL, [ROW, "", ""]),
    "The row of rank 0 has become a column.": (
        *(p101.scatter, ["a0 b0 c0", "–", "–"], ["a0", "b0", "c0"]),
    ),
    "its sum becomes the row of one rank.": (p101.reduce_scatter, BLOCKS, SUMS),
    "every rank has the sums.": (p.ring_all_reduce, BLOCKS, [" ".join(SUMS)] * 3),
    "rank 0": (TWICE, BLOCKS, ["a0012 b012 c012"] * 3),
    "chunk c lacks rank 1's data.": (LOST, BLOCKS, ["a012 b012 c02"] * 3),
}


@pytest.mark.parametrize("sentence", CASES)
def test_blocks_are_those_of_the_values(sentence):
    fn, given, returned = CASES[sentence]
    run = p101.watch(fn, 3, backend="sim")
    assert names(run, given_blocks) == given
    assert names(run, returned_blocks) == returned
    scene = run.before_after()
    assert any(sentence in text for text in texts(scene))
    assert (">×2<" in scene.svg()) == (fn is TWICE)
    assert len(elements(scene, "rect", "gone")) == (3 if fn is LOST else 0)
    assert_inside(scene)
    written = set(re.findall(r'dur="(.*?)s"', scene.svg(smil=True)))
    assert {float(seconds) for seconds in written} == {scene.duration}
    assert scene.stops[-1].end == scene.duration
