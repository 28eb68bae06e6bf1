"""Runs that are too large to show chunk by chunk are drawn as bytes, or refused with advice."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from functools import partial

import pytest

import parallel101 as p101
from parallel101.laboratory.analysis.replay import replay_of
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.many_ranks import sending_over_time, step_facts
from tests.viz import programs as p
from tests.viz.programs import exchange, me, recorded


@pytest.mark.parametrize("n", [17, 64, 128])
def test_many_ranks_are_summed_up(n):
    trace, results = recorded(p.binomial_broadcast, n, 1) if n < 20 else without_origin(n)
    scene = collective_scene(trace, results)
    ET.fromstring(scene.svg())
    assert len(scene.stops) == math.ceil(math.log2(n))
    replay = replay_of(trace)
    assert step_facts(replay, 0)[::2] == ["1 message of 8 B", f"1 of {n} ranks sends"]
    share = sending_over_time(replay, 0.0, trace.makespan)
    assert share[0] == pytest.approx(1 / n)
    assert sum(share) / len(share) == pytest.approx((n - 1) / n / len(scene.stops), abs=0.01)


def test_the_messages_of_a_step_are_said_in_words():
    def steps(program):
        trace = without_origin(20, program)[0]
        replay = replay_of(trace)
        return [step_facts(replay, step)[1] for step in range(replay.steps)]

    assert set(steps(p.ring_all_gather)) == {"each to the rank 1 higher, modulo 20"}
    assert steps(barrier) == [f"each to the rank {k} higher, modulo 20" for k in (1, 2, 4, 8)] + [
        "each to the rank 4 lower, modulo 20"
    ]
    assert steps(p.flat_gather)[:3] == [f"each to the rank {k} lower" for k in (1, 2, 3)]
    assert "between ranks that are 2 apart" in steps(p.doubling_all_reduce)


def barrier(x):
    p101.barrier()


def without_origin(n, program=p.binomial_broadcast):
    """More ranks than an int64 can tell apart: plain numbers."""
    return recorded(program, n, 0, payload=False)


@pytest.mark.parametrize(
    ("program", "ending", "title"),
    [
        (p.ring_all_reduce, "with the data of all 17 ranks in it once.", "Ring all-reduce"),
        (
            partial(p.broken_ring_all_reduce, twice=(1, 0)),
            "has rank 0's data twice.",
            "Messages on a ring of 17 ranks",
        ),
        (
            lambda x: p101.all_reduce(p101.all_reduce(x)),
            "so the result is not judged.",
            "Messages on 17 ranks",
        ),
    ],
    ids=["right", "added twice", "not known"],
)
def test_the_result_of_more_ranks_than_are_drawn_is_judged(program, ending, title):
    scene = p101.watch(program, 17, backend="sim").animate()
    assert (
        scene.stops[-1].label.endswith(ending)
        and scene.title == title
        and ending.split()[-1] in scene.svg()
    ), scene.stops[-1].label


def test_too_many_ranks_or_messages_are_refused_with_advice():
    trace, _ = without_origin(129)
    with pytest.raises(ValueError, match=r"129 ranks.*to_chrome\(path\)"):
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
    assert (
        "There are too many ranks or chunks to draw them all."
        in collective_scene(*recorded(p.halves_all_gather, 9, 2)).svg()
    )
