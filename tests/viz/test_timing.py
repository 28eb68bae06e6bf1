"""The player gets the same duration as the SVG, for any number of steps."""

from __future__ import annotations

import json
import re

import pytest

from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.collective import collective_scene
from tests.viz.programs import exchange, me, recorded


def back_and_forth(x):
    rank, _ = me()
    for step in range(62):
        exchange([(1 - rank, x)], []) if step % 2 == rank else exchange([], [(1 - rank, x)])
    return x


@pytest.mark.parametrize("steps", [0, 1, 5, 6, 7, 11, 17, *range(18, 33), 40, 62])
def test_the_player_and_the_loop_have_the_same_duration(steps):
    """After the `dur` of its animations an SVG starts again, so a longer player would end with
    the first moment.
    """
    trace, results = recorded(back_and_forth, 2, 1)
    # each message takes a second
    beginning = Trace([event for event in trace.events if event.end <= steps], 2, "sim")
    scene = collective_scene(beginning, results)
    assert len(scene.stops) == steps
    written = set(re.findall(r'dur="(.*?)s"', scene.svg(smil=True)))
    duration = json.loads(re.search(r'"duration": ([\d.]+)', scene.html())[1])
    assert {float(dur) for dur in written} == ({duration} if steps else set())
