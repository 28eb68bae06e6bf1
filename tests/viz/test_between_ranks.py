"""Who sends to whom: the squares hold the bytes and messages of the record, and the sentence
their range.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.viz.drawn import assert_inside, titled


def tree():
    p101.broadcast(torch.ones(8), algorithm="binomial")
    dist.all_reduce(torch.ones(1))


NOT_RECORDED = "The messages inside torch's own all_reduce are not"
SENTENCES = {
    1: f"No rank sends a message. {NOT_RECORDED} recorded.",
    4: f"2 of 4 ranks send to 1 to 2 others, 32 B to 64 B in 1 to 2 messages. {NOT_RECORDED}",
    40: "ranks send to 1 to 6 others, 32 B to 192 B in 1 to 6 messages. The messages inside",
}


@pytest.mark.parametrize("n", SENTENCES)
def test_squares_and_sentence(n):
    run = p101.launch(tree, world_size=n, backend="sim")
    scene = run.traffic()
    assert SENTENCES[n] in scene.svg()
    assert len(titled(scene, "32 B")) == len(titled(scene, ": 1")) == n - 1
    assert len(titled(scene, "0, 1: 32 B")) == (n > 1)
    assert_inside(scene)
    if n == 1:
        all_gather = partial(p101.all_gather, algorithm="ring")
        ring = p101.launch(lambda: all_gather(torch.ones(2)), world_size=3, backend="sim")
        assert "Each rank sends to 1 other, 16 B in 2 messages." in ring.traffic().svg()
        assert "the most is 16 B, for each of 3 pairs of ranks" in ring.traffic().description


def in_spans():
    rank = dist.get_rank()
    for _ in range(2):
        with p101.span("one way"):
            p101.broadcast(torch.ones(8), src=0, algorithm="binomial")
    if rank == 2:
        with p101.span("never"):
            p101.compute(1.0)
    p101.reduce(torch.ones(4), dst=0, algorithm="binomial")


def test_only_what_was_sent_in_the_last_span_of_a_name():
    run = p101.launch(in_spans, world_size=3, backend="sim")
    assert len(titled(run.traffic(), "0, 1: 64 B")) == 1
    scene = run.traffic(within="one way")
    assert "1 of 3 ranks send to 2 others, 64 B in 2 messages. Only the last span" in scene.svg()
    for pair, count in {"0, 1": 2, "0, 2": 2, "1, 0": 0, "2, 0": 0}.items():
        assert len(titled(scene, f"{pair}: ")) == count
    assert "No rank sends a message. Only the last span" in run.traffic(within="never").svg()
    with pytest.raises(ValueError, match="no span is called 'dispatch'"):
        run.traffic(within="dispatch")
