"""Timelines and lanes draw every span and message of a record at its time, and say how much of
the communication overlaps with compute.
"""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.analysis.overlap import (
    TimeWindow,
    intersection,
    seconds,
    time_breakdown,
    time_windows,
    union,
)
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz import rows, timeline
from parallel101.laboratory.viz.between_ranks import traffic_scene
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.rows import legend_entries, span_colours
from parallel101.laboratory.viz.timeline import lanes_scene, timeline_scene
from tests.viz import programs as p
from tests.viz.drawn import assert_inside, elements, event, span, texts, title_of, titled
from tests.viz.programs import recorded


def message(kind, rank, peer, start, end, nbytes=8, seq=0):
    return event(kind, rank, start, end, nbytes, peer=peer, seq=seq)


def step(overlap):
    """Four seconds of backward, which overlap with `overlap` of the message's two seconds; then
    a wait, then the optimizer.
    """
    start = 4.0 - overlap
    return [
        span(0, "step", 0.0, 7.0),
        span(0, "backward", 0.0, 4.0, 1, microbatch=2),
        message("send", 0, 1, start, start + 2.0),
        span(0, "synchronize", 4.0, 6.0, 2, waiting=True),
        span(0, "optimizer", 6.0, 7.0, 3),
        span(1, "step", 0.0, 7.0),
        message("recv", 1, 0, start, start + 2.0),
    ]


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0, 2.0])
def test_overlap_of_a_message_with_compute(overlap):
    trace = Trace(step(overlap), 2, "gloo")
    (window,) = time_windows(trace, ["step"])
    assert time_breakdown(window, 0) == pytest.approx((5.0, 2.0, overlap, 2.0))
    assert time_breakdown(window, 1) == pytest.approx((0.0, 2.0, 0.0, 7.0))
    scene, facts = lanes_scene(trace, "step"), "2 ranks · gloo · as recorded"
    assert {f"{overlap / 2:.0%}", facts, "7 s"} <= {*texts(scene)}
    assert f"{facts} · 7 s" in texts(lanes_scene(trace))
    of_ranks = "Compute by rank: 5 s, 0 µs. Communication that overlaps with compute"
    assert scene.description == f"step: 7 s. {of_ranks}: {overlap / 2:.0%}, 0%."


OTHERS = {  # what isn't compute or communication
    "lengths are told, and data hides": (
        (4.0, 1.0, 1.0, 1.0),
        span(0, "lengths", 0.0, 1.0, waiting=True),
        message("send", 0, 1, 0.0, 1.0, 8),
        span(0, "attention", 1.0, 5.0, 1),
        message("send", 0, 1, 1.0, 2.0, 4096, 1),
    ),
    "a wait inside compute": (
        (2.0, 3.0, 1.0, 2.0),
        span(0, "forward", 0.0, 4.0),
        span(0, "wait for weights", 1.0, 3.0, 1, waiting=True),
        message("recv", 0, 1, 0.0, 3.0),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_counts_as_compute_and_as_communication(name):
    expected, *events = OTHERS[name]
    window = TimeWindow("", 0.0, max(e.end for e in events), events)
    assert time_breakdown(window, 0) == pytest.approx(expected)
    small = "(8 B): the ranks agree on lengths. Overlap doesn't count them.<"
    assert (small in lanes_scene(Trace(events, 2, "sim")).svg()) == ("lengths" in name)


@pytest.mark.parametrize("seed", range(5))
def test_intervals_agree_with_counting_moments(seed):
    noise = random.Random(seed)
    starts = [noise.choices(range(40), k=8) for _ in range(2)]
    one, other = ([(a, a + noise.randrange(1, 6)) for a in of] for of in starts)
    moments, others = ({t for a, b in of for t in range(a, b)} for of in (one, other))
    assert seconds(union(one)) == len(moments)
    assert seconds(intersection(union(one), union(other))) == len(moments & others)


@pytest.mark.parametrize("picture", ["lanes", "timeline"])
def test_every_event_is_a_bar_at_its_time(picture):
    trace = Trace(step(1.0), 2, "gloo")
    scene = lanes_scene(trace, "step") if picture == "lanes" else timeline_scene(trace)
    scale = ((timeline.BESIDE if picture == "lanes" else rows.RIGHT) - rows.LEFT) / 7.0
    bars = []
    for name, start, end, class_ in (
        ("backward (", 0.0, 4.0, "f1"),
        ("send to rank 1", 3.0, 5.0, "send"),
        ("recv from rank 0", 3.0, 5.0, "recv"),
        ("synchronize", 4.0, 6.0, "idle"),
    ):
        (bar,) = titled(scene, name)
        assert float(bar.get("x")) == pytest.approx(rows.LEFT + start * scale, abs=0.1)
        assert float(bar.get("width")) == pytest.approx((end - start) * scale, abs=1)
        assert bar.get("class") == class_
        bars.append(bar)
    backward, send, received = (float(bar.get("y")) for bar in bars[:3])
    assert received > send > backward
    if picture == "timeline":  # inside another: a lane below
        assert backward > float(titled(scene, "step:")[0].get("y"))
    assert title_of(bars[0]) == "backward (microbatch=2): 4 s at train.py:7"


def test_panels_share_one_scale_and_take_the_last_span_of_their_name():
    times = {"slow": [(0.0, 1.0), (2.0, 10.0)], "fast": [(20.0, 22.0)]}
    times["forward"] = [(2.0, 9.0), (20.0, 22.0), (30.0, 31.0)]
    events = [span(0, name, *when, k) for name, of in times.items() for k, when in enumerate(of)]
    trace = Trace(sorted(events, key=lambda e: (e.start, -e.end)), 1, "sim")
    scene = lanes_scene(trace, "slow", "fast")
    assert {"8 s", "2 s"} <= {*texts(scene)} and "31 s" not in texts(scene)
    assert "31 s" not in texts(traffic_scene(trace, within="fast"))
    widths = [float(bar.get("width")) for bar in titled(scene, "forward")]
    assert len(widths) == 2 and widths[0] / widths[1] == pytest.approx(7 / 2, rel=0.02)


@pytest.mark.parametrize("n", [1, 2, 16, 33, 128])
def test_any_number_of_ranks(n):
    events = [span(r, "forward", 0.0, 1.0 + r, microbatch=0) for r in range(n)]
    pairs = [(r, (r + 1) % n, k) for r in range(n) for k in range(9)]
    events += [message("send", r, to, 0.1 * k, 1.0, seq=k) for r, to, k in pairs]
    for draw in (timeline_scene, *[lanes_scene] * (n <= timeline.FEW_RANKS)):
        scene = draw(Trace(events, n, "sim"))
        assert len(titled(scene, "forward")) == n
        assert_inside(scene)
        ET.fromstring(scene.svg(theme="dark"))


def test_messages_have_arrows_and_collectives_their_own_bars():
    trace, _ = recorded(p.ring_all_reduce, 4, 8, uneven=True)
    scene = timeline_scene(trace)
    sends = titled(scene, "send to")
    assert len(sends) == len(titled(scene, "recv from")) == 24
    (arrows,) = elements(scene, "path", "arrow")
    assert arrows.get("d").count("M") == 24
    told = title_of(titled(scene, "send to rank 1: 16 B")[0])
    assert re.search(r" at \S*programs\.py:\d+$", told)
    scene = timeline_scene(Trace([event("all_reduce", 0, 0.0, 0.001, 1024)], 1, "gloo"))
    (bar,) = titled(scene, "all_reduce: 1 KiB, 1 ms at train.py:9")
    assert bar.get("class") == "collective"


def test_narrow_events_share_a_bar():
    events = [span(0, "tiny", t / 1e6, (t + 0.5) / 1e6, t) for t in range(5_000)]
    scene = timeline_scene(Trace([*events, span(0, "long", 0.02, 1.0, 10_000)], 1, "gloo"))
    assert len(scene.svg()) < 30_000 and titled(scene, "× tiny")


def test_colours_of_spans_are_the_same_in_every_picture():
    names = ["layer forward", "forward", "gradient ready", "backward", "layer backward"]
    names += ["optimizer", "mine"]
    first = span_colours([span(0, name, 0.0, 1.0) for name in names])
    for some in (names[::-1], names[2:5]):
        colours = span_colours([span(0, name, 0.0, 1.0) for name in some])
        own = colours.pop("mine", None)
        assert colours == {name: first[name] for name in colours} and own not in colours.values()
    entries = legend_entries([], first)
    assert len({colour for _, colour in entries}) == len(entries) == 5


def test_numbers_waits_and_small_messages_are_explained():
    events = [
        *(span(0, "forward", 2.0 * k, 2.0 * k + 2, k, microbatch=k) for k in range(2)),
        span(0, "layer forward", 4.0, 4.2, 2, layer="3"),
        span(0, "agree", 4.2, 6.0, 3, waiting=True),
        span(0, "wait for gradients", 4.2, 4.2, 4, waiting=True),
        message("send", 0, 1, 4.3, 5.9, 8),
        message("send", 0, 1, 1.0, 3.0, 4096),
    ]
    trace = Trace(events, 2, "gloo")
    said = {"forward, microbatch 0", "forward, microbatch 1", "3", "agree"}
    said |= {"A number in a bar is its microbatch (forward) or its layer (layer forward)."}
    small = "Small messages (8 B): the ranks agree on the number of samples, the loss and errors."
    for draw, more in ((lanes_scene, " Overlap doesn't count them."), (timeline_scene, "")):
        assert said | {small + more} <= {*texts(draw(trace))}
        assert not titled(draw(trace), "wait for gradients")
    plain = lanes_scene(Trace([span(0, "forward", 0.0, 1.0)], 1, "sim")).svg()
    assert "A number in a bar" not in plain and "Small messages" not in plain
    assert "Nothing was recorded." in timeline_scene(Trace([], 2, "gloo")).svg()
    ET.fromstring(lanes_scene(Trace([], 2, "gloo")).svg())


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
