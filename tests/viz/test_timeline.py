"""The timeline draws every span and message at its time in the record."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.rows import LEFT, RIGHT
from parallel101.laboratory.viz.timeline import timeline_scene
from tests.viz import programs as p
from tests.viz.drawn import SVG, event, span, titled
from tests.viz.programs import recorded


def test_positions_of_spans():
    trace = Trace(
        [span(0, "forward", 1.0, 3.0, microbatch=2), span(1, "backward", 2.0, 5.0)], 2, "sim"
    )
    scene = timeline_scene(trace)
    (forward,), (backward,) = titled(scene, "forward"), titled(scene, "backward")
    scale = (RIGHT - LEFT) / 4.0
    assert float(forward.get("x")) == pytest.approx(LEFT, abs=0.1)
    assert float(forward.get("width")) == pytest.approx(2 * scale, abs=1)
    assert float(backward.get("x")) == pytest.approx(LEFT + scale, abs=0.1)
    assert float(backward.get("y")) > float(forward.get("y"))
    assert forward.find(f"{SVG}title").text == "forward (microbatch=2): 2 s at train.py:7"
    assert (forward.get("class"), backward.get("class")) == ("f0", "f1")


def test_a_span_inside_another_is_one_lane_below():
    trace = Trace(
        [
            span(0, "step", 0.0, 4.0),
            span(0, "forward", 1.0, 2.0, 1),
            span(0, "backward", 2.0, 4.0, 2),
        ],
        1,
        "sim",
    )
    scene = timeline_scene(trace)
    step, forward, backward = (
        float(titled(scene, name)[0].get("y")) for name in ("step", "forward", "backward")
    )
    assert step < forward == backward


def test_messages_and_arrows():
    trace, _ = recorded(p.ring_all_reduce, 4, 8, uneven=True)
    scene = timeline_scene(trace)
    assert len(titled(scene, "send to")) == len(titled(scene, "recv from")) == 24
    (arrows,) = [
        path
        for path in ET.fromstring(scene.svg()).iter(f"{SVG}path")
        if path.get("class") == "arrow"
    ]
    assert arrows.get("d").count("M") == 24
    assert re.search(
        r" at \S*programs\.py:\d+$",
        titled(scene, "send to rank 1: 16 B")[0].find(f"{SVG}title").text,
    )


def test_collectives_have_their_own_bars():
    scene = timeline_scene(Trace([event("all_reduce", 0, 0.0, 0.001, nbytes=1024)], 1, "gloo"))
    (bar,) = titled(scene, "all_reduce: 1 KiB, 1 ms at train.py:9")
    assert bar.get("class") == "collective"


def test_narrow_events_share_a_bar():
    events = [span(0, "tiny", t / 1e6, (t + 0.5) / 1e6, t) for t in range(10_000)] + [
        span(0, "long", 0.02, 1.0, 10_000)
    ]
    scene = timeline_scene(Trace(events, 1, "gloo"))
    assert len(scene.svg()) < 30_000
    assert titled(scene, "× tiny")


@pytest.mark.parametrize("n", [1, 2, 16, 33, 128])
def test_any_number_of_ranks_up_to_the_limit(n):
    scene = timeline_scene(Trace([span(r, "forward", 0.0, 1.0 + r) for r in range(n)], n, "sim"))
    ET.fromstring(scene.svg())
    assert len(titled(scene, "forward")) == n


def test_an_empty_record_and_too_many_ranks():
    assert "Nothing was recorded." in timeline_scene(Trace([], 2, "gloo")).svg()
    with pytest.raises(ValueError, match=r"129 ranks.*to_chrome"):
        timeline_scene(Trace([], 129, "sim"))


def test_calls_that_have_not_finished_are_named():
    def program():
        works = [dist.irecv(torch.zeros(3), (dist.get_rank() + 1) % 4, tag=k) for k in range(3)]
        for work in works:
            work.wait()

    with pytest.raises(p101.DeadlockError) as raised:
        p101.launch(program, world_size=4, backend="sim")
    trace = raised.value.trace
    timeline, animation = timeline_scene(trace).svg(), collective_scene(trace)
    first = "12 receives had not finished when the run ended; the first was posted by rank 0 at "
    assert first in timeline and __file__ in timeline and "12 unfinished" in timeline
    assert animation.title == "Unfinished calls on 4 ranks" and first in animation.intro
    assert "4 ranks · sim · 0 messages · 12 unfinished" in animation.svg()
