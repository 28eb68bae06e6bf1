"""Activations over a step: layers add up to what was held, and the peak names its microbatches."""

from __future__ import annotations

import re

import pytest

from parallel101.laboratory.analysis.held_over_time import MOST_POINTS, held_over_time
from parallel101.laboratory.viz.memory_over_step import activations_scene
from parallel101.trainers.memory import Activations, Change, Kept, Phase
from tests.viz.drawn import elements, texts, title_of, titled


def counted(*program):
    """An Activations of ("F", microbatch, bytes) and ("B", microbatch), each in a phase."""
    found, held, numbers = Activations(), 0, {}
    for kind, microbatch, *nbytes in program:
        found.phases.append(Phase({"F": "forward", "B": "backward"}[kind], microbatch))
        if nbytes:
            numbers[microbatch] = len(found.kept)
            found.kept.append(Kept(nbytes[0], "layer", found.phases[-1], "float32", (nbytes[0],)))
        number = numbers[microbatch]
        held += found.kept[number].nbytes * (1 if nbytes else -1)
        found.changes.append(Change(number, bool(nbytes), len(found.phases) - 1, held))
    return found


ONE_F_ONE_B = counted(("F", 0, 30), ("F", 1, 50), ("B", 0), ("F", 2, 20), ("B", 1), ("B", 2))


def test_layers_add_up_to_what_is_held_and_the_first_peak_counts():
    of = held_over_time(ONE_F_ONE_B)
    assert [sum(layer) for layer in zip(*of.layers.values())] == [0, 30, 80, 50, 70, 20, 0]
    assert of.layers[1] == [0, 0, 50, 50, 50, 0, 0]
    place, most, parts = of.peak
    assert (place, most, parts) == (pytest.approx(1.5 / 6), 80, {0: 30, 1: 50})
    assert [(phase.name, start) for phase, start, _ in of.phases][1] == ("forward", 1 / 6)


def test_changes_outside_of_phases_belong_to_the_one_before():
    one = Kept(8, "", Phase(""), "float32", (2,))
    plain = Activations([one, one], [Change(0, True, 0, 8), Change(0, False, 0, 0)])
    assert held_over_time(plain).layers == {None: [0, 8, 0]}
    late = counted(("F", 0, 30), ("B", 0))
    late.changes[-1] = late.changes[-1]._replace(phase=0)
    assert held_over_time(late).places == pytest.approx([0, 1 / 6, 2 / 6])


def test_of_many_points_the_highest_are_drawn():
    many = counted(*[step for i in range(1000) for step in (("F", i, i % 7 + 1), ("B", i))])
    of = held_over_time(many)
    assert len(of.places) <= MOST_POINTS + 1 and of.peak[1] == 7
    assert max(map(sum, zip(*of.layers.values()))) == 7


def test_the_picture_has_a_layer_for_each_microbatch_and_names_the_peaks():
    scene = activations_scene([ONE_F_ONE_B, counted(("F", 0, 8), ("B", 0))])
    assert [*filter(None, map(title_of, elements(scene, "path")))] == [
        # the lowest covers the others
        *(f"microbatch {i}: at most {nbytes} B" for i, nbytes in ((2, 20), (1, 50), (0, 30))),
        "microbatch 0: at most 8 B",
    ]
    said = texts(scene)
    assert {"peak 80 B: microbatches 0, 1", "peak 8 B: microbatch 0", "rank 1"} <= {*said}
    letters = [text for text in said if re.fullmatch(r"[FB]\d", text)]
    assert letters[:6] == ["F0", "F1", "B0", "F2", "B1", "B2"]


def test_equal_bytes_are_equally_high_on_all_ranks():
    half = counted(("F", 0, 40), ("B", 0))
    areas = titled(activations_scene({"a": ONE_F_ONE_B, "b": half}), "microbatch", "path")
    tops = [[float(y) for y in re.findall(r"V([\d.]+)", area.get("d"))] for area in areas]
    first, second = (max(tops[k]) - min(tops[k]) for k in (2, -1))
    assert first / 30 == pytest.approx(second / 40, rel=0.02)


def test_one_rank_or_none():
    assert "peak" in activations_scene(ONE_F_ONE_B).svg()
    assert "no activations" in activations_scene(Activations()).svg()
