"""Activations over a step: layers add up to what was held, and the peak names its microbatches."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from parallel101.laboratory.analysis.held_over_time import MOST_POINTS, held_over_time
from parallel101.laboratory.viz.memory_over_step import activations_scene
from parallel101.trainers.memory import Activations, Change, Kept, Phase
from tests.viz.drawn import SVG


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


@pytest.mark.parametrize("theme", ["light", "dark", None])
def test_the_picture_has_a_layer_for_each_microbatch_and_names_the_peaks(theme):
    scene = activations_scene([ONE_F_ONE_B, counted(("F", 0, 8), ("B", 0))])
    root = ET.fromstring(scene.svg(theme=theme))
    titles = [path.findtext(f"{SVG}title") for path in root.iter(f"{SVG}path")]
    assert [title for title in titles if title] == [  # the lowest covers the others
        *("microbatch 2: at most 20 B", "microbatch 1: at most 50 B", "microbatch 0: at most 30 B"),
        "microbatch 0: at most 8 B",
    ]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"peak 80 B: microbatches 0, 1", "peak 8 B: microbatch 0", "rank 1"} <= set(texts)
    assert [text for text in texts if re.fullmatch(r"[FB]\d", text)][:6] == [
        *("F0", "F1", "B0", "F2", "B1", "B2")
    ]


def test_equal_bytes_are_equally_high_on_all_ranks():
    half = counted(("F", 0, 40), ("B", 0))
    root = ET.fromstring(activations_scene({"a": ONE_F_ONE_B, "b": half}).svg())
    tops = [
        [float(y) for y in re.findall(r"V([\d.]+)", path.get("d"))]
        for path in root.iter(f"{SVG}path")
        if path.find(f"{SVG}title") is not None
    ]
    first, second = tops[2], tops[-1]
    assert (max(first) - min(first)) / 30 == pytest.approx(
        (max(second) - min(second)) / 40, rel=0.02
    )


def test_one_rank_or_none():
    assert "peak" in activations_scene(ONE_F_ONE_B).svg()
    assert "no activations" in activations_scene(Activations()).svg()
