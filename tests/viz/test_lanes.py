"""The lanes show the record's spans and messages, and how much of the communication overlaps
with compute.
"""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from parallel101.laboratory.analysis.overlap import (
    TimeWindow,
    intersection,
    seconds,
    time_breakdown,
    time_windows,
    union,
)
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.between_ranks import traffic_scene
from parallel101.laboratory.viz.lanes import LEFT, MOST_RANKS, RIGHT, lanes_scene
from parallel101.laboratory.viz.rows import legend_entries, span_colours
from parallel101.laboratory.viz.timeline import timeline_scene
from tests.viz.drawn import SVG, event, span, titled


def message(kind, rank, peer, start, end, nbytes=8, seq=0):
    return event(kind, rank, start, end, peer=peer, nbytes=nbytes, seq=seq)


def step(overlap):
    """Four seconds of backward, which overlap with `overlap` of the message's two seconds; then
    a wait, then the optimizer.
    """
    start = 4.0 - overlap
    return [
        span(0, "step", 0.0, 7.0),
        span(0, "backward", 0.0, 4.0, 1),
        message("send", 0, 1, start, start + 2.0),
        span(0, "synchronize", 4.0, 6.0, 2, waiting=True),
        span(0, "optimizer", 6.0, 7.0, 3),
        span(1, "step", 0.0, 7.0),
        message("recv", 1, 0, start, start + 2.0),
    ]


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0, 2.0])
def test_overlap_of_a_message_with_compute(overlap):
    (window,) = time_windows(Trace(step(overlap), 2, "gloo"), ["step"])
    breakdown = time_breakdown(window, 0)
    assert breakdown == pytest.approx((5.0, 2.0, overlap, 2.0))
    assert time_breakdown(window, 1) == pytest.approx((0.0, 2.0, 0.0, 7.0))
    scene = lanes_scene(Trace(step(overlap), 2, "gloo"), "step")
    assert f">{overlap / 2:.0%}<" in scene.svg()
    assert ">2 ranks · gloo · as recorded<" in scene.svg() and ">7 s<" in scene.svg()
    whole = lanes_scene(Trace(step(overlap), 2, "gloo"))
    assert ">2 ranks · gloo · as recorded · 7 s<" in whole.svg()
    assert scene.description == (
        "step: 7 s. Compute by rank: 5 s, 0 µs. Communication that overlaps with compute: "
        f"{overlap / 2:.0%}, 0%."
    )


def exchange():
    """Lengths are told before anything is computed; then a message of data hides completely."""
    return [
        span(0, "lengths", 0.0, 1.0, waiting=True),
        message("send", 0, 1, 0.0, 1.0, 8),
        span(0, "attention", 1.0, 5.0, 1),
        message("send", 0, 1, 1.0, 2.0, 4096, 1),
    ]


def test_the_exchange_of_lengths_is_not_counted_as_communication():
    trace = Trace(exchange(), 2, "sim")
    assert time_breakdown(time_windows(trace)[0], 0) == pytest.approx((4.0, 1.0, 1.0, 1.0))
    drawn = lanes_scene(trace).svg()
    assert ">100%<" in drawn
    assert "(8 B): the ranks agree on lengths. Overlap doesn't count them.<" in drawn


def test_a_wait_inside_compute_is_not_compute():
    inside = [
        span(0, "forward", 0.0, 4.0),
        span(0, "wait for weights", 1.0, 3.0, 1, waiting=True),
        message("recv", 0, 1, 0.0, 3.0),
    ]
    assert time_breakdown(TimeWindow("", 0.0, 4.0, inside), 0) == pytest.approx(
        (2.0, 3.0, 1.0, 2.0)
    )


@pytest.mark.parametrize("seed", range(5))
def test_intervals_agree_with_counting_moments(seed):
    noise = random.Random(seed)
    pieces = [
        [(a, a + noise.randrange(1, 6)) for a in noise.choices(range(40), k=8)] for _ in range(2)
    ]
    moments = [{t for a, b in of for t in range(a, b)} for of in pieces]
    assert seconds(union(pieces[0])) == len(moments[0])
    assert seconds(intersection(union(pieces[0]), union(pieces[1]))) == len(moments[0] & moments[1])


def test_positions_of_bars():
    scene = lanes_scene(Trace(step(1.0), 2, "gloo"), "step")
    scale = (RIGHT - LEFT) / 7.0
    (backward,), (sent,), (received,) = (
        titled(scene, "backward"),
        titled(scene, "send to rank 1"),
        titled(scene, "recv from rank 0"),
    )
    assert float(backward.get("x")) == pytest.approx(LEFT, abs=0.1)
    assert float(backward.get("width")) == pytest.approx(4 * scale, abs=1)
    assert float(sent.get("x")) == pytest.approx(LEFT + 3 * scale, abs=0.1)
    assert float(received.get("y")) > float(sent.get("y")) > float(backward.get("y"))
    assert [wait.get("class") for wait in titled(scene, "synchronize")] == ["idle"]


def test_panels_share_one_scale_and_take_the_last_span_of_their_name():
    events = [
        span(0, "slow", 0.0, 1.0),
        span(0, "slow", 2.0, 10.0, 1),
        span(0, "forward", 2.0, 10.0, 2),
    ]
    events += [
        span(0, "fast", 20.0, 22.0, 3),
        span(0, "forward", 20.0, 22.0, 4),
        span(0, "forward", 30.0, 31.0, 5),
    ]
    events[2] = events[2]._replace(end=9.0)
    scene = lanes_scene(Trace(events, 1, "sim"), "slow", "fast")
    assert all(f">{t} s<" in scene.svg() for t in (8, 2)) and "31 s<" not in scene.svg()
    assert "31 s<" not in traffic_scene(Trace(events, 1, "sim"), within="fast").svg()
    widths = [float(bar.get("width")) for bar in titled(scene, "forward")]
    assert len(widths) == 2 and widths[0] / widths[1] == pytest.approx(7 / 2, rel=0.02)


@pytest.mark.parametrize("theme", ["light", "dark", None])
@pytest.mark.parametrize("n", [1, 2, MOST_RANKS])
def test_any_number_of_ranks_in_any_theme(n, theme):
    events = [span(r, "forward", 0.0, 1.0 + r, microbatch=0) for r in range(n)]
    events += [
        message("send", r, (r + 1) % n, 0.1 * k, 1.0, seq=k) for r in range(n) for k in range(9)
    ]
    scene = lanes_scene(Trace(events, n, "sim"))
    root = ET.fromstring(scene.svg(theme=theme))
    assert len(titled(scene, "forward")) == n
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("y")) + float(rect.get("height")) <= scene.height


def test_colours_of_spans_are_the_same_in_every_picture():
    names = [
        "layer forward",
        "forward",
        "gradient ready",
        "backward",
        "layer backward",
        "optimizer",
        "mine",
    ]
    drawn = [
        span_colours([span(0, name, 0.0, 1.0) for name in some])
        for some in (names, names[::-1], names[2:5])
    ]
    assert all(
        colours[name] == drawn[0][name] for colours in drawn for name in colours if name != "mine"
    )
    assert drawn[0]["mine"] not in [colour for name, colour in drawn[0].items() if name != "mine"]
    entries = legend_entries([], drawn[0])
    assert len({colour for _, colour in entries}) == len(entries) == 5


def test_unknown_spans_and_too_many_ranks_are_refused():
    with pytest.raises(
        ValueError, match=r"no span is called 'stp': the record has backward, optimizer"
    ):
        lanes_scene(Trace(step(0.0), 2, "gloo"), "stp")
    with pytest.raises(ValueError, match=r"17 ranks.*run\.timeline"):
        lanes_scene(Trace([], 17, "sim"))
    ET.fromstring(lanes_scene(Trace([], 2, "gloo")).svg())


def test_numbers_waits_and_small_messages_are_explained():
    events = [
        *(span(0, "forward", 2.0 * k, 2.0 * k + 2, k, microbatch=k) for k in range(2)),
        span(0, "layer forward", 4.0, 4.2, 2, layer="3"),
        span(0, "agree", 4.2, 6.0, 3, waiting=True),
        span(0, "wait for gradients", 4.2, 4.2, 4, waiting=True),
        message("send", 0, 1, 4.3, 5.9, 8),
        message("send", 0, 1, 1.0, 3.0, 4096),
    ]
    small = "Small messages (8 B): the ranks agree on the number of samples, the loss and errors."
    trace = Trace(events, 2, "gloo")
    not_counted = " Overlap doesn't count them."
    for scene, more in ((lanes_scene(trace), not_counted), (timeline_scene(trace), "")):
        texts = [text.text for text in ET.fromstring(scene.svg()).iter(f"{SVG}text")]
        assert {"forward, microbatch 0", "forward, microbatch 1", "3", "agree"} <= set(texts)
        assert (
            "A number in a bar is its microbatch (forward) or its layer (layer forward)." in texts
        )
        assert small + more in texts
        assert not titled(scene, "wait for gradients")
    plain = lanes_scene(Trace([span(0, "forward", 0.0, 1.0)], 1, "sim")).svg()
    assert "A number in a bar" not in plain and "Small messages" not in plain
