"""The runs of the atlas of collectives cost what the closed forms say, with the right result."""

from __future__ import annotations

from itertools import groupby

import pytest

from parallel101 import collectives
from parallel101.cost.closed_forms import closed_form, torus_form, two_level_form
from parallel101.laboratory.publish.tools.recorded_collectives import (
    BANDWIDTH,
    ELEMENT,
    LARGE,
    LATENCY,
    NETWORKS,
    OPERATIONS,
    RANKS,
    SMALL,
    Choice,
    all_choices,
    mesh_shape,
    numbers_of,
    record,
)
from parallel101.laboratory.viz.collective_run import INSIDE_BANDWIDTH, INSIDE_LATENCY


def test_every_algorithm_is_there():
    found = {name: set() for name in OPERATIONS}
    for (operation, algorithm, ranks), runs in groupby(all_choices(), lambda choice: choice[:3]):
        found[operation].add(algorithm)
        networks = [choice.network for choice in runs]
        grid = ranks in (4, 6, 8, 16, 64)
        wanted = [name for name in NETWORKS if name != "torus" or grid]
        assert networks == (wanted if ranks < 64 else ["switch"])
    assert found == {
        name: {*textbook, *collectives.ON_A_MESH.get(name, {})}
        for name, textbook in collectives.TEXTBOOK.items()
    }
    assert {choice.ranks for choice in all_choices()} == {*range(2, 9), 16, 64} == {*RANKS}


SWITCH = [
    Choice(operation, algorithm, ranks, "switch")
    for operation, algorithms in collectives.TEXTBOOK.items()
    for algorithm in algorithms
    for ranks in (2, 5)
]
TORUS = [Choice(operation, "torus", 8, "torus") for operation in collectives.ON_A_MESH]


@pytest.mark.parametrize("choice", [*SWITCH, *TORUS], ids=str)
def test_a_run_takes_what_the_closed_form_says(choice):
    operation, algorithm, ranks, _ = choice
    found, picture = record(choice)
    for size, seconds in ((LARGE, found.seconds), (SMALL, found.seconds_small)):
        chain = {"segment_bytes": size // choice.segments} if choice.segments > 1 else {}
        nbytes = ranks if operation == "barrier" else size
        if algorithm == "torus":
            form = torus_form(operation, mesh_shape(algorithm, ranks), nbytes)
        else:
            form = closed_form(operation, algorithm, ranks, nbytes, **chain)
        assert found.steps == form.steps
        assert seconds == pytest.approx(form.seconds(LATENCY, BANDWIDTH), rel=1e-9)
        if size == LARGE:
            assert found.busiest == form.sent <= found.total
    right = "No rank can go on" if operation == "barrier" else " ends with "
    assert right in picture.intro + picture.stops[-1].label
    assert 'class="w b"' not in picture.svg(smil=True)  # a fault


def test_two_levels_take_the_time_of_both():
    choice = Choice("all_reduce", "two_level", 8, "two_nodes")
    found, form = record(choice)[0], two_level_form(mesh_shape(*choice[1:3]), LARGE)
    inside = form.inside.seconds(INSIDE_LATENCY, INSIDE_BANDWIDTH)
    across = form.across.seconds(LATENCY, BANDWIDTH)
    assert found.seconds == pytest.approx(inside + across, rel=1e-9)


def test_all_ranks_divide_the_array_into_equal_blocks():
    for choice in all_choices():
        for nbytes in (LARGE, SMALL):
            assert nbytes % (choice.ranks * ELEMENT) == nbytes % (choice.segments * ELEMENT) == 0
            assert numbers_of(choice, nbytes) * ELEMENT in (0, nbytes, nbytes // choice.ranks)
