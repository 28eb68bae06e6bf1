"""A pipeline's picture: every slot once and at its time, bubbles are exactly the waits, and its
numbers are those of the schedule.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.analysis.overlap import seconds, union
from parallel101.laboratory.analysis.pipeline_times import planned_times, recorded_times
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.pipeline_timeline import LEAD, LEFT, RIGHT, SWEEP, pipeline_scene
from parallel101.spans import wait_span
from tests.viz.drawn import SVG, span, texts, titled

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
    return p101.schedule(name, stages=stages, microbatches=microbatches, chunks=chunks).time(
        **COSTS
    )


def place(rect):
    """(left, right) of a rectangle, in pixels."""
    return float(rect.get("x")), float(rect.get("x")) + float(rect.get("width"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_slot_is_drawn_once_at_its_time(shape):
    time = timed(*shape)
    scene = time.timeline()
    boxes = titled(scene, " of microbatch ")
    named = Counter(
        re.match(r"stage (\d+), (.*) of microbatch (\d+)", box.find(f"{SVG}title").text).groups()
        for box in boxes
    )
    assert named == Counter(
        (str(a.stage), NAMES[a.kind], str(a.microbatch)) for _, a, _, _ in time.slots
    )
    scale = (RIGHT - LEFT) / time.makespan
    drawn = sorted((place(box) for box in boxes), key=lambda p: p[0])
    expected = sorted((LEFT + slot.start * scale, LEFT + slot.end * scale) for slot in time.slots)
    for (left, right), (start, end) in zip(drawn, expected, strict=True):
        assert left == pytest.approx(start, abs=0.02) and end - 1.02 <= right <= end + 0.02


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_the_numbers_are_the_schedules(shape):
    time = timed(*shape)
    times, scene = planned_times(time), time.timeline()
    assert (times.makespan, times.bubble_rate) == pytest.approx((time.makespan, time.bubble_rate))
    assert [times.peak(rank) for rank in times.ranks] == time.peak_activations
    assert f"makespan {time.makespan:.4g} · bubble rate {100 * time.bubble_rate:.1f} %" in texts(
        scene
    )
    assert scene.svg().count('class="f0 held"') == sum(time.peak_activations)
    assert (
        f"Activations held at most, by rank: {', '.join(map(str, time.peak_activations))}."
        in scene.description
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_hatches_are_the_bubbles(shape):
    time = timed(*shape)
    times, scale = planned_times(time), (RIGHT - LEFT) / time.makespan
    hatches = titled(time.timeline(), " waits: ")
    for rank in times.ranks:
        of_rank = [slot for slot in time.slots if slot.rank == rank]
        extent = max(slot.end for slot in of_rank) - min(slot.start for slot in of_rank)
        idle = extent - sum(slot.end - slot.start for slot in of_rank)
        mine = [place(h) for h in hatches if h.find(f"{SVG}title").text.startswith(f"rank {rank} ")]
        assert sum(right - left for left, right in mine) == pytest.approx(
            idle * scale, abs=0.02 * (1 + len(mine))
        )
        assert seconds(times.bubbles(rank)) == pytest.approx(idle)
        for start, end in times.bubbles(rank):
            assert not any(slot.start < end and slot.end > start for slot in of_rank)


def test_actions_that_are_computed_together_share_a_box():
    schedule = p101.Schedule.from_csv(OVERLAP)
    time = schedule.time(**COSTS)
    scene, times = time.timeline(), planned_times(time)
    assert len(titled(scene, " of microbatch ")) == 13
    assert times.bubble_rate == pytest.approx(time.bubble_rate)
    assert [times.peak(rank) for rank in times.ranks] == time.peak_activations
    forward, backward = (
        box
        for box in titled(scene, "together with another action")
        if "stage 0" in box.find(f"{SVG}title").text
    )
    assert place(forward) == place(backward) and float(forward.get("y")) < float(backward.get("y"))


def test_several_schedules_share_one_time_axis():
    gpipe, zb = timed("gpipe", 4, 8, 1), timed("zb-h1", 4, 8, 1)
    scene = pipeline_scene({"GPipe": gpipe, "ZB-H1": zb})
    assert {"GPipe", "ZB-H1", "4 ranks · 8 microbatches"} <= set(texts(scene))
    right = max(place(box)[1] for box in titled(scene, " of microbatch "))
    last = max(place(box)[1] for box in titled(scene, "weight gradient of"))
    assert (right - LEFT) / (RIGHT - LEFT) == pytest.approx(1.0, abs=0.01)
    assert (last - LEFT) / (RIGHT - LEFT) == pytest.approx(zb.makespan / gpipe.makespan, abs=0.01)


def test_the_facts_of_one_microbatch_are_in_the_singular():
    assert "2 ranks · 1 microbatch" in texts(pipeline_scene(timed("gpipe", 2, 1, 1)))


def test_numbers_of_interleaved_schedules_can_be_read_and_do_not_touch():
    """Two stages on each of four ranks, drawn below 1F1B: the narrowest boxes of lesson 07."""
    pair = {
        name: p101.schedule(name, stages=4, microbatches=8, chunks=chunks).time(
            1 / chunks, 1 / chunks, 1 / chunks
        )
        for name, chunks in (("1f1b", 1), ("interleaved", 2))
    }
    scene = pipeline_scene(pair)
    boxes = titled(scene, " of microbatch ")
    numbers = [
        text
        for text in ET.fromstring(scene.svg()).iter(f"{SVG}text")
        if text.get("class", "").startswith("b ") and text.get("class").endswith(" c")
    ]
    assert len(numbers) == len(boxes) == 4 * 8 * 2 * 3
    for text, rect in zip(numbers, boxes):
        left, right = place(rect)
        size = float(text.get("font-size"))
        assert size >= 10 and 0.7 * size + 1.5 < right - left


def test_stages_of_a_rank_differ_in_shade():
    scene = timed("interleaved", 2, 4, 2).timeline()
    shades = {"stage 0": set(), "stage 2": set()}
    for box in titled(scene, " of microbatch "):
        stage = box.find(f"{SVG}title").text.partition(",")[0]
        shades.setdefault(stage, set()).add("k1" in box.get("class"))
    assert shades == {"stage 0": {False}, "stage 1": {False}, "stage 2": {True}, "stage 3": {True}}
    assert "stages 0, 2" in texts(scene)
    assert any("Faded: its second stage." in text for text in texts(scene))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_as_it_plays_the_squares_are_the_activations_held(shape):
    time = timed(*shape)
    times, scene = planned_times(time), time.timeline()
    assert (
        scene.svg(0.0).count("f0 held")
        == scene.svg().count("f0 held")
        == sum(time.peak_activations)
    )
    for part in (0.07, 0.31, 0.52, 0.83):
        now = part * time.makespan
        held = sum(
            ([count for moment, count in times.held(rank) if moment <= now] or [0])[-1]
            for rank in times.ranks
        )
        assert scene.svg(LEAD + SWEEP * part).count("f0 held") == held
        drawn = ET.fromstring(scene.svg(LEAD + SWEEP * part))
        (veil,) = (rect for rect in drawn.iter(f"{SVG}rect") if rect.get("class") == "veil")
        assert float(veil.get("transform")[10:].split(",")[0]) == pytest.approx(
            LEFT + part * (RIGHT - LEFT), abs=0.1
        )


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
    after = [
        span(rank, "forward", 40.0 + rank, 41.0 + rank, 9, microbatch=0, stage=rank)
        for rank in range(2 * evaluated)
    ]
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
    events = [e._replace(name="slow") if e.name == "step" else e for e in step(0.0)]
    events += [e._replace(name="fast") if e.name == "step" else e for e in step(20.0)]
    scene = pipeline_scene(Trace(events, 2, "sim"), "slow", "fast")
    assert {"slow", "fast"} <= set(texts(scene)) and len(titled(scene, " of microbatch ")) == 10


def carried_out(schedule):
    """Each action takes its time, and then sends what the neighbouring stage waits for."""
    rank = dist.get_rank()
    last, links, arriving, leaving = max(schedule.placement), {}, {}, []
    seconds_of = {"F": 2.0, "B": 4.0, "I": 3.0, "W": 1.0}

    def route(action):
        """(stage that its result goes to, rank that has that stage), or None."""
        stage = action.stage + (1 if action.kind == "F" else -1)
        goes = action.kind != "W" and 0 <= stage <= last
        return (stage, schedule.placement[stage]) if goes else None

    for _, action in schedule.parts():
        link = (min(action.stage, (route(action) or (-1, 0))[0]), action.kind == "F")
        if route(action) and link not in links:
            links[link] = dist.new_group([schedule.placement[link[0] + k] for k in (0, 1)])
    for sender, action in schedule.parts():
        if route(action) and route(action)[1] == rank != sender:
            stage = route(action)[0]
            link = links[min(action.stage, stage), action.kind == "F"]
            arriving[stage, action.kind == "F", action.microbatch] = dist.irecv(
                torch.empty(1), sender, link
            )
    for action in (action for actor, action in schedule.parts() if actor == rank):
        work = arriving.pop((action.stage, action.kind == "F", action.microbatch), None)
        if work is not None and action.kind != "W":
            what = "activations" if action.kind == "F" else "gradients"
            with wait_span(f"wait for {what}", microbatch=action.microbatch):
                work.wait()
        with p101.span(NAMES[action.kind], microbatch=action.microbatch, stage=action.stage):
            p101.compute(seconds_of[action.kind])
        if route(action) and route(action)[1] != rank:
            link = links[min(action.stage, route(action)[0]), action.kind == "F"]
            leaving.append(dist.isend(torch.zeros(1), route(action)[1], link))
    for work in leaving:
        work.wait()
    p101.barrier()  # whose messages are not the pipeline's


@pytest.mark.parametrize(
    "shape",
    [shape for shape in SHAPES if shape[1] > 1],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_a_run_of_a_schedule_draws_what_was_planned(shape):
    name, stages, microbatches, chunks = shape
    schedule = p101.schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    network = p101.Network(latency=0.0, bandwidth=float("inf"))
    trace = p101.launch(
        carried_out, schedule, world_size=stages, backend="sim", network=network
    ).trace
    planned, recorded = planned_times(schedule.time(2.0, 3.0, 1.0)), recorded_times(trace)
    assert recorded.slots == planned.slots
    assert [recorded.bubbles(rank) for rank in recorded.ranks] == [
        planned.bubbles(rank) for rank in planned.ranks
    ]
    between = {
        part
        for rank, part in schedule.parts()
        for other in (part.stage + 1,)
        if schedule.placement.get(other, rank) != rank
    }
    assert len(recorded.messages) == 2 * len([part for part in between if part.kind == "F"])


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match=r"the record has no pipeline: .*; its spans are: load\."):
        pipeline_scene(Trace([span(0, "load", 0.0, 1.0)], 1, "sim"))
    with pytest.raises(
        ValueError, match=r"within='step': names of spans choose parts of one record"
    ):
        pipeline_scene(timed("1f1b", 2, 2, 1), "step")
    with pytest.raises(ValueError, match="2 pipelines have 100 ranks together: expected 1 to 96"):
        pipeline_scene(dict.fromkeys("ab", timed("1f1b", 50, 50, 1)))
    with pytest.raises(ValueError, match="0 ranks together"):
        pipeline_scene({})
