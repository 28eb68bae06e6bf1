"""A pipeline's picture: every slot once and at its time, bubbles are exactly the waits, and its
numbers are those of the schedule.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

import parallel101 as p101
from parallel101.laboratory.analysis.overlap import seconds, union
from parallel101.laboratory.analysis.pipeline_times import planned_times, recorded_times
from parallel101.laboratory.record.events import EventGroup
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.pipeline_timeline import LEAD, LEFT, RIGHT, SWEEP, pipeline_scene
from tests.viz.drawn import elements, event, span, texts, title_of, titled

SHAPES = [
    ("gpipe", 2, 4, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 1, 3, 1),
    ("interleaved", 3, 6, 2),
    ("interleaved", 2, 4, 4),
    ("zb-h1", 4, 8, 1),
    ("zb-h2", 3, 7, 1),
]
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
OVERLAP = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,(1F2;1I1)OVERLAP_F_B,1W1,1B2\n"
COSTS = {"forward": 2.0, "input_grad": 3.0, "weight_grad": 1.0, "communication": 0.25}


def timed(name, stages, microbatches, chunks):
    size = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    return p101.schedule(name, **size).time(**COSTS)


def place(rect):
    """(left, right) of a rectangle, in pixels."""
    return float(rect.get("x")), float(rect.get("x")) + float(rect.get("width"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_the_picture_is_the_schedule(shape):
    time = timed(*shape)
    times, scene, scale = planned_times(time), time.timeline(), (RIGHT - LEFT) / time.makespan
    boxes = titled(scene, " of microbatch ")
    named = (re.match(r"stage (\d+), (.*) of microbatch (\d+)", title_of(box)) for box in boxes)
    assert Counter(found.groups() for found in named) == Counter(
        (str(a.stage), NAMES[a.kind], str(a.microbatch)) for _, a, _, _ in time.slots
    )
    drawn = sorted((place(box) for box in boxes), key=lambda p: p[0])
    expected = sorted((LEFT + slot.start * scale, LEFT + slot.end * scale) for slot in time.slots)
    for (left, right), (start, end) in zip(drawn, expected, strict=True):
        assert left == pytest.approx(start, abs=0.02) and end - 1.02 <= right <= end + 0.02
    # its numbers
    peaks, rate = time.peak_activations, f"{100 * time.bubble_rate:.1f} %"
    assert [times.peak(rank) for rank in times.ranks] == peaks
    assert f"makespan {time.makespan:.4g} · bubble rate {rate}" in texts(scene)
    assert f"held at most, by rank: {', '.join(map(str, peaks))}." in scene.description
    # hatches are the bubbles
    for rank in times.ranks:
        of_rank = [slot for slot in time.slots if slot.rank == rank]
        extent = max(slot.end for slot in of_rank) - min(slot.start for slot in of_rank)
        idle = extent - sum(slot.end - slot.start for slot in of_rank)
        hatches = [place(h) for h in titled(scene, f"rank {rank} waits: ")]
        wide = sum(right - left for left, right in hatches)
        assert wide == pytest.approx(idle * scale, abs=0.02 * (1 + len(hatches)))
        assert not any(s.start < b and s.end > a for a, b in times.bubbles(rank) for s in of_rank)
    # as it plays, the squares are the activations held
    assert scene.svg(0.0).count("f0 held") == scene.svg().count("f0 held") == sum(peaks)
    for part in (0.07, 0.31, 0.83):
        before = [[n for t, n in times.held(r) if t <= part * time.makespan] for r in times.ranks]
        playing = scene.svg(LEAD + SWEEP * part)
        assert playing.count("f0 held") == sum(held[-1] for held in before if held)
        (veil,) = re.findall(r'class="veil" transform="translate\(([\d.]+),', playing)
        assert float(veil) == pytest.approx(LEFT + part * (RIGHT - LEFT), abs=0.1)


def test_actions_that_are_computed_together_share_a_box():
    schedule = p101.Schedule.from_csv(OVERLAP)
    time = schedule.time(**COSTS)
    scene, times = time.timeline(), planned_times(time)
    assert len(titled(scene, " of microbatch ")) == 13
    assert times.bubble_rate == pytest.approx(time.bubble_rate)
    assert [times.peak(rank) for rank in times.ranks] == time.peak_activations
    together = titled(scene, "together with another action")
    forward, backward = (box for box in together if "stage 0" in title_of(box))
    assert place(forward) == place(backward) and float(forward.get("y")) < float(backward.get("y"))


def test_several_schedules_share_one_time_axis():
    gpipe, zb = timed("gpipe", 4, 8, 1), timed("zb-h1", 4, 8, 1)
    scene = pipeline_scene({"GPipe": gpipe, "ZB-H1": zb})
    assert {"GPipe", "ZB-H1", "4 ranks · 8 microbatches"} <= set(texts(scene))
    single = pipeline_scene(timed("gpipe", 2, 1, 1))
    assert "2 ranks · 1 microbatch" in texts(single)
    right = max(place(box)[1] for box in titled(scene, " of microbatch "))
    last = max(place(box)[1] for box in titled(scene, "weight gradient of"))
    assert (right - LEFT) / (RIGHT - LEFT) == pytest.approx(1.0, abs=0.01)
    assert (last - LEFT) / (RIGHT - LEFT) == pytest.approx(zb.makespan / gpipe.makespan, abs=0.01)


def test_numbers_of_interleaved_schedules_can_be_read_and_do_not_touch():
    """Two stages on each of four ranks, drawn below 1F1B: the narrowest boxes of lesson 07."""
    size = {"stages": 4, "microbatches": 8}
    pair = {"1f1b": p101.schedule("1f1b", **size).time(1, 1, 1)}
    pair["interleaved"] = p101.schedule("interleaved", **size, chunks=2).time(0.5, 0.5, 0.5)
    scene = pipeline_scene(pair)
    boxes, numbers = titled(scene, " of microbatch "), elements(scene, "text", "b .*c")
    assert len(numbers) == len(boxes) == 4 * 8 * 2 * 3
    for text, (left, right) in zip(numbers, map(place, boxes)):
        assert 10 <= float(text.get("font-size")) < (right - left - 1.5) / 0.7


def test_stages_of_a_rank_differ_in_shade():
    scene = timed("interleaved", 2, 4, 2).timeline()
    boxes = titled(scene, " of microbatch ")
    shades = {(title_of(box).partition(",")[0], "k1" in box.get("class")) for box in boxes}
    assert shades == {(f"stage {stage}", stage > 1) for stage in range(4)}
    assert "stages 0, 2" in texts(scene)
    assert any("Faded: its second stage." in text for text in texts(scene))


def test_each_stop_says_how_many_ranks_compute():
    scene = p101.schedule("gpipe", stages=2, microbatches=2).time().timeline()
    assert [stop.label for stop in scene.stops][:3] == [
        f"At {t}: {n} of 2 ranks compute." for t, n in ((1, 1), (2, 2), (3, 1))
    ]


def step(begin, wait=0.0):
    """Two stages, one microbatch: on rank 0 the forward waits for `wait` seconds inside."""
    return [
        span(0, "step", begin, begin + 9.0),
        span(0, "forward", begin, begin + 2.0, 1, microbatch=0, stage=0),
        span(0, "wait for columns", begin + 1.0, begin + 1.0 + wait, 2, waiting=True),
        span(0, "wait for gradients", begin + 2.0, begin + 6.0, 3, waiting=True),
        span(0, "backward", begin + 6.0, begin + 9.0, 4, microbatch=0, stage=0),
        span(1, "step", begin, begin + 9.0),
        span(1, "forward", begin + 2.0, begin + 4.0, 1, microbatch=0, stage=1),
        span(1, "input gradient", begin + 4.0, begin + 6.0, 2, microbatch=0, stage=1),
        span(1, "weight gradient", begin + 6.0, begin + 7.0, 3, microbatch=0, stage=1),
    ]


@pytest.mark.parametrize("evaluated", [False, True], ids=["", "then evaluated"])
@pytest.mark.parametrize("wait", [0.0, 0.5])
def test_a_recorded_step(wait, evaluated):
    after = [span(r, "forward", 40.0 + r, 41.0 + r, 9, microbatch=0, stage=r) for r in (0, 1)]
    after *= evaluated
    trace = Trace([*step(0.0), *step(20.0, wait), *after], 2, "sim")
    for times in (recorded_times(trace), recorded_times(trace, "step")):
        assert (times.makespan, len(times.slots)) == (9.0, 5), "the last step only"
        assert [seconds(union(times.bubbles(rank))) for rank in (0, 1)] == [4.0 + wait, 0.0]
        assert times.bubble_rate == pytest.approx(1 - (5.0 - wait + 5.0) / 2 / 9.0)
        assert [times.peak(rank) for rank in (0, 1)] == [1, 1]
    scene = pipeline_scene(trace)
    assert len(titled(scene, "rank 0 waits")) == 1 + bool(wait)
    assert "makespan 9 s" in scene.svg()


def test_panels_of_one_record_are_chosen_by_spans():
    events = []
    for name, begin in (("slow", 0.0), ("fast", 20.0)):
        events += [e._replace(name=name) if e.name == "step" else e for e in step(begin)]
    scene = pipeline_scene(Trace(events, 2, "sim"), "slow", "fast")
    assert {"slow", "fast"} <= set(texts(scene)) and len(titled(scene, " of microbatch ")) == 10


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_a_record_with_the_times_of_a_schedule_draws_what_was_planned(shape):
    planned, stages = planned_times(timed(*shape)), shape[1]
    group = EventGroup("pp", tuple(range(stages)), None)
    events = []
    for k, s in enumerate(planned.slots):
        labels = {"microbatch": s.microbatch, "stage": s.stage}
        events.append(span(s.rank, NAMES[s.kind], s.start, s.end, k, **labels))
    for k, (src, dst, *when) in enumerate(planned.messages):
        more = {"seq": k, "group": group}
        events.append(event("send", src, *when, peer=dst, **more))
        events.append(event("recv", dst, *when, peer=src, **more))
    recorded = recorded_times(Trace(events, stages, "sim"))
    assert recorded.slots == planned.slots
    for rank in recorded.ranks:
        assert recorded.bubbles(rank) == planned.bubbles(rank)
        assert recorded.held(rank) == planned.held(rank)
    assert len(recorded.messages) == len(planned.messages)
