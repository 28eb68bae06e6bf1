"""However many steps a picture has, the player is told of the same time that the SVG lasts."""

from __future__ import annotations

import json
import re

import pytest

from parallel101.viz.collective import collective_scene
from tests.viz.algorithms import Exchange
from tests.viz.virtual_ranks import run


@pytest.mark.parametrize("steps", [0, 1, 5, 6, 7, 11, 17, *range(18, 33), 40, 62])
def test_what_the_player_seeks_to_lies_within_the_loop(steps):
    """Past the `dur` of its animations an SVG begins anew, and would end by showing its beginning."""

    def to_and_fro(rank, n, x):
        for step in range(steps):
            yield Exchange([(1 - rank, x)], []) if step % 2 == rank else Exchange([], [1 - rank])
        return x

    scene = collective_scene(*run(to_and_fro, 2, 1))
    assert len(scene.steps) == steps
    written = set(re.findall(r'dur="(.*?)s"', scene.svg(smil=True)))
    told = json.loads(re.search(r'"duration": ([\d.]+)', scene.html())[1])
    assert {float(dur) for dur in written} == ({told} if steps else set())
