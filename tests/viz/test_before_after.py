"""Before and after: the blocks that each rank was given and returned are those of the values,
and the sentence says what became of them.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.analysis.replay import given_blocks, replay_of, returned_blocks
from tests.viz import programs as p
from tests.viz.drawn import SVG


def names(run, which):
    """Each rank's blocks: "a0" is the part a of rank 0, "a012" a sum of three."""
    replay = replay_of(run.trace, run.results, watched=run.watched, idle=True)
    return [
        " ".join(
            "–"
            if b.chunk is None
            else replay.chunks[b.chunk].label + "".join(str(r) * k for r, k in enumerate(b.counts))
            for b in row
        )
        for row in which(replay)
    ]


BLOCKS = ["a0 b0 c0", "a1 b1 c1", "a2 b2 c2"]
ALL, ROW = ["a0", "b1", "c2"], "a0 b1 c2"
CASES = {
    "all-to-all": (
        *(p101.all_to_all, BLOCKS, ["a0 a1 a2", "b0 b1 b2", "c0 c1 c2"], "is transposed."),
    ),
    "all-gather": (*(p101.all_gather, ALL, [ROW] * 3, "has become a row, and every rank has it."),),
    "gather": (p101.gather, ALL, [ROW, "", ""], "has become the row of rank 0."),
    "scatter": (
        *(p101.scatter, ["a0 b0 c0", "–", "–"], ["a0", "b0", "c0"]),
        "The row of rank 0 has become a column.",
    ),
    "reduce-scatter": (
        *(p101.reduce_scatter, BLOCKS, ["a012", "b012", "c012"]),
        "its sum becomes the row of one rank.",
    ),
    "all-reduce": (
        *(p.ring_all_reduce, BLOCKS, ["a012 b012 c012"] * 3, "every rank has the sums."),
    ),
    "a part summed twice": (
        lambda x: p.broken_ring_all_reduce(x, twice=(1, 0)),
        *(BLOCKS, ["a0012 b012 c012"] * 3, "rank 0"),
    ),
    "a part lost": (
        lambda x: p.broken_ring_all_reduce(x, lost=(1, 1)),
        *(BLOCKS, ["a012 b012 c02"] * 3, "chunk c lacks rank 1's data."),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_those_of_the_values(name):
    fn, given, returned, sentence = CASES[name]
    run = p101.watch(fn, 3, backend="sim")
    assert names(run, given_blocks) == given
    assert names(run, returned_blocks) == returned
    scene = run.before_after()
    root = ET.fromstring(scene.svg())
    assert any(sentence in (text.text or "") for text in root.iter(f"{SVG}text"))
    assert (">×2<" in scene.svg()) == (name == "a part summed twice")
    assert scene.svg().count('class="gone"') == (3 if name == "a part lost" else 0)
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x")) + float(rect.get("width")) <= scene.width
    written = set(re.findall(r'dur="(.*?)s"', scene.svg(smil=True)))
    assert {float(seconds) for seconds in written} == {scene.duration}
    assert scene.stops[-1].end == scene.duration


def returns_nothing(x):
    p101.all_reduce(x)


ENDINGS = {
    "a mean": (lambda x: p101.all_reduce(x) / 4, "mean of the data of all 4 ranks in it.", ""),
    "nothing is returned": (returns_nothing, "The function returned nothing.", ">nothing<"),
    "unreadable on some ranks": (
        lambda x: p101.all_reduce(x) + dist.get_rank(),
        "so it is not judged.",
        ">can't be read<",
    ),
    "unreadable on all ranks": (
        lambda x: p101.all_gather(x) + 1,
        "so it is not judged.",
        ">can't be read<",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_sums_are_there_only_if_the_ranks_returned_them(name):
    program, ending, drawn = ENDINGS[name]
    scene = p101.watch(program, 4, backend="sim").before_after()
    assert scene.stops[-1].label.endswith(ending) and "every rank has" not in scene.stops[-1].label
    words = " ".join(text.text or "" for text in ET.fromstring(scene.svg()).iter(f"{SVG}text"))
    assert ending in words and drawn in scene.svg()
