"""What the collective view can't show chunk by chunk is drawn as bytes, or refused with advice."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from parallel101.viz.collective import collective_scene
from tests.viz import algorithms as a
from tests.viz.virtual_ranks import run


@pytest.mark.parametrize("n", [17, 32, 64])
def test_many_ranks_are_drawn_as_bytes_or_small(n):
    trace, results = run(a.binomial_broadcast, n, 1, payload=n < 20) if n < 20 else run_without_origin(n)
    scene = collective_scene(trace, results)
    ET.fromstring(scene.svg())
    assert len(scene.steps) == math.ceil(math.log2(n))


def run_without_origin(n):
    """More ranks than an int64 can tell apart: plain numbers."""
    return run(lambda rank, n, x: a.binomial_broadcast(rank, n, [1]), n, 0, payload=False)


def test_too_much_is_refused_with_advice():
    trace, _ = run_without_origin(65)
    with pytest.raises(ValueError, match=r"65 ranks.*run\.timeline\(\)"):
        collective_scene(trace)

    def chatter(rank, n, x):
        for _ in range(1001):
            yield a.Exchange([(1 - rank, [1])], [1 - rank])
        return []

    trace, _ = run(chatter, 2, 1, payload=False)
    with pytest.raises(ValueError, match="2002 messages"):
        collective_scene(trace)
    with pytest.raises(ValueError, match="results has 1 entries for 2 ranks"):
        collective_scene(trace, [None])


def test_more_chunks_than_letters_are_drawn_as_bytes():
    trace, results = run(a.direct_all_to_all, 9, 18)
    assert "chunk" in collective_scene(trace, results).svg()
    halves = run(a.bidirectional_all_gather, 9, 2)
    assert "More ranks or chunks than can be drawn" in collective_scene(*halves).svg()
