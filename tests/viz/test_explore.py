"""The explorer: every control starts a run, each run is drawn, and an error is shown in place of the picture."""

from __future__ import annotations

import pytest

from parallel101 import autograd
from parallel101.viz.explore import LINKS, MOST_RANKS, OPERATIONS, ROOT, Explorer


@pytest.fixture(scope="module")
def explorer():
    return Explorer(backend="sim")


def shown(explorer: Explorer) -> str:
    """The plain-text form of the picture: the repr of the run's record."""
    return explorer.picture.outputs[0]["data"]["text/plain"]


def test_every_operation_and_algorithm_runs_and_is_drawn(explorer):
    explorer.ranks.value = 4
    for operation in OPERATIONS:
        explorer.operation.value = operation
        assert explorer.algorithm.options == tuple(autograd.algorithms(operation))
        assert explorer.root.disabled == (operation not in ROOT)
        for algorithm in explorer.algorithm.options:
            explorer.algorithm.value = algorithm
            assert "<figure" in explorer.html and shown(explorer).startswith("<Trace of 4 ranks on sim"), (operation, algorithm)


def test_ranks_root_size_and_links_change_the_run(explorer):
    explorer.operation.value, explorer.algorithm.value, explorer.links.value = "broadcast", "flat", "switch"
    explorer.ranks.value = 7
    assert "6 messages, 6 s" in shown(explorer)
    explorer.root.value = 6
    assert "rank 6 starts" in explorer.html.lower()
    explorer.ranks.value = 3  # so there is no rank 6
    assert explorer.root.value == 2 and "2 messages, 2 s" in shown(explorer)
    explorer.operation.value, explorer.algorithm.value, explorer.ranks.value = "all_gather", "bidirectional_ring", 8
    explorer.links.value = "ring, one way"
    one_way = shown(explorer)
    explorer.links.value = "ring, both ways"
    assert "56 messages, 4 s" in shown(explorer) and shown(explorer) != one_way
    explorer.numbers.value = 1
    assert "<figure" in explorer.html


def test_the_run_has_as_many_numbers_as_the_slider_says(explorer):
    explorer.operation.value, explorer.ranks.value = "all_gather", 2
    explorer.numbers.value = 48
    assert f"{2 * 48 * 8} B" in explorer.html
    explorer.ranks.value = 16  # with room for 40 numbers each
    assert explorer.numbers.max == explorer.numbers.value == 40
    assert " 5 KiB" in explorer.html and 16 * 40 * 8 == 5 * 1024
    explorer.ranks.value = 2
    assert explorer.numbers.max == 48
    explorer.numbers.value = 8


def test_switching_back_to_gloo_lowers_the_number_of_ranks(explorer):
    explorer.operation.value, explorer.ranks.value = "barrier", MOST_RANKS["sim"]
    explorer.ranks.value = 2
    explorer.backend.value = "gloo"
    assert explorer.ranks.max == MOST_RANKS["gloo"] and explorer.links.disabled
    assert shown(explorer).startswith("<Trace of 2 ranks on gloo")
    explorer.backend.value = "sim"


def test_an_error_is_shown_in_place_of_the_picture(explorer, monkeypatch):
    monkeypatch.setattr(explorer, "program", lambda: lambda x: 1 // 0)
    explorer.numbers.value += 1
    assert "ZeroDivisionError" in explorer.html and "<figure" not in explorer.html


def test_a_page_without_a_kernel_gets_the_picture(explorer):
    data, _ = explorer._repr_mimebundle_()
    assert data["text/html"] == explorer.html
    assert "application/vnd.jupyter.widget-view+json" in data


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"operation": "allreduce"}, "operation='allreduce' is unknown: expected one of 'broadcast'"),
        ({"algorithm": "star"}, "algorithm='star' is unknown: expected one of 'reduce_broadcast'"),
        ({"backend": "mpi"}, "backend='mpi' is unknown: expected one of 'gloo', 'sim'"),
        ({"ranks": 99}, "ranks=99: expected a whole number from 1 to 8"),
        ({"ranks": 0}, "ranks=0: expected a whole number from 1 to 8"),
        ({"ranks": 17, "backend": "sim"}, "ranks=17: expected a whole number from 1 to 16"),
        ({"ranks": 2.5}, r"ranks=2\.5: expected a whole number"),
        ({"numbers": 49}, "numbers=49: expected a whole number from 1 to 48"),
        ({"numbers": 48, "ranks": 16, "backend": "sim"}, "numbers=48: expected a whole number from 1 to 40"),
        ({"root": 4}, "root=4: expected a whole number from 0 to 3"),
        ({"links": "mesh"}, f"links='mesh' is unknown: expected one of {', '.join(map(repr, LINKS))}"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Explorer(**wrong)
