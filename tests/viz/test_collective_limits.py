"""Runs that are too large to show chunk by chunk are drawn as bytes, or refused with advice."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from parallel101.viz.collective import collective_scene
from tests.viz import programs as p
from tests.viz.programs import exchange, me, recorded


@pytest.mark.parametrize("n", [17, 32, 64])
def test_many_ranks_are_drawn_as_bytes_or_small(n):
    trace, results = recorded(p.binomial_broadcast, n, 1) if n < 20 else without_origin(n)
    scene = collective_scene(trace, results)
    ET.fromstring(scene.svg())
    assert len(scene.stops) == math.ceil(math.log2(n))


def without_origin(n):
    """More ranks than an int64 can tell apart: plain numbers."""
    return recorded(p.binomial_broadcast, n, 0, payload=False)


def test_too_many_ranks_or_messages_are_refused_with_advice():
    trace, _ = without_origin(65)
    with pytest.raises(ValueError, match=r"65 ranks.*run\.timeline\(\)"):
        collective_scene(trace)

    def chatter(x):
        peer = 1 - me()[0]
        for _ in range(1001):
            exchange([(peer, x)], [(peer, x)])

    trace, _ = recorded(chatter, 2, 1, payload=False)
    with pytest.raises(ValueError, match="2002 messages"):
        collective_scene(trace)
    with pytest.raises(ValueError, match="results has 1 entries for 2 ranks"):
        collective_scene(trace, [None])


def test_more_chunks_than_letters_are_drawn_as_bytes():
    assert "chunk" in collective_scene(*recorded(p.pairwise_all_to_all, 9, 18)).svg()
    assert "There are too many ranks or chunks to draw them all." in collective_scene(*recorded(p.halves_all_gather, 9, 2)).svg()
