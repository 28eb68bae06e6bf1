"""Lesson 02: the code by hand is right, the table is that of the closed forms, the fit finds α
and β, and the answers are right.
"""

from __future__ import annotations

import ast
import math

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.analysis.critical_path import critical_path
from parallel101.cost import closed_form
from tests.lessons.lesson import definitions, read

LESSON = definitions(
    "02_algorithms_and_cost",
    "STEPS",
    "BYTES",
    "COST",
    "WAYS",
    "ETHERNET",
    "LINKS",
    "FACTOR",
    "NCCL",
)
# of the package
NAMES = {"tree": "reduce_broadcast", "doubling": "recursive_doubling", "ring": "ring"}


def test_nothing_is_run_or_drawn_before_its_prediction():
    """What a prediction asks for is printed as "?" first, and the cells up to the prediction
    don't contain the call.
    """
    cells = read("02_algorithms_and_cost").cells
    order = {cell.id: i for i, cell in enumerate(cells)}
    answered = {
        "problem": "seconds(fn, nbytes, ETHERNET)",
        "doubling": "p101.watch(doubling,",
        "regimes": "times(run.trace)",
        "path": "flat_reduce, ",
        "fit": "launch(ping_pong",
        "real": "launch(stopwatch",
        "bus": "bandwidths(operation, algorithm, p)",
        "bus-tree": "bandwidths('all_reduce'",
        "both-ways": "p101.watch(two_way,",
        "axes": "ON_16.items()",
        "torus": "seconds(torus,",
        "levels": "sent_between_nodes(fn, ",
        "nccl": "winner(n, 4)",
    }
    for topic, call in answered.items():
        guess = cells[order[f"{topic}-guess"]].source
        assert '"?"' in guess, topic
        assert "> **Predict.**" in cells[order[f"{topic}-guess"] - 1].source, topic
        first = next(
            i for i, cell in enumerate(cells) if cell.cell_type == "code" and call in cell.source
        )
        assert first > order[f"{topic}-guess"], topic
    assert not any(
        isinstance(node, ast.Assert)
        for cell in cells
        if cell.cell_type == "code"
        for node in ast.walk(ast.parse(cell.source))
    )


def results(fn, p, numbers=None):
    """What fn returns on each rank, where rank r's array is 100r, 100r + 1, …"""
    return p101.launch(
        lambda: fn(torch.arange(float(numbers or 2 * p)) + 100 * dist.get_rank()),
        world_size=p,
        backend="sim",
    ).results


def arrays(p, numbers=None):
    return [torch.arange(float(numbers or 2 * p)) + 100 * r for r in range(p)]


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_the_all_reduces_are_right(p):
    for name in ("flat", "tree", "ring", "doubling", "doubling_all_reduce"):
        assert all(torch.equal(r, sum(arrays(p))) for r in results(LESSON[name], p)), name
    assert all(
        torch.equal(r, torch.cat(arrays(p))) for r in results(LESSON["two_way_all_gather"], p)
    )


@pytest.mark.parametrize("p", [3, 5])
def test_both_ways_on_an_odd_number_of_ranks(p):
    assert all(
        torch.equal(r, torch.cat(arrays(p))) for r in results(LESSON["two_way_all_gather"], p)
    )


def test_the_code_by_hand_sends_the_messages_that_were_watched():
    for mine, theirs, p in (
        ("doubling_all_reduce", "doubling", 8),
        ("two_way_all_gather", "two_way", 6),
    ):
        seen = p101.watch(LESSON[theirs], world_size=p, backend="sim")
        assert LESSON["same_messages"](LESSON[mine], seen) == "the same messages as the package's"


def test_algorithms_for_tori_and_nodes_are_right():
    for name in ("two_level", "badly_placed_ring"):
        assert all(torch.equal(r, sum(arrays(8))) for r in results(LESSON[name], 8)), name
    for name in ("rows_then_columns", "torus"):
        assert all(torch.equal(r, torch.cat(arrays(16))) for r in results(LESSON[name], 16)), name


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_the_table_is_that_of_the_closed_forms(p):
    for name, algorithm in NAMES.items():
        steps, part = LESSON["COST"][name](p)
        assert (steps, part * 64 * p) == closed_form("all_reduce", algorithm, p, 64 * p)[::2]
    counted = LESSON["count"](LESSON["flat"], p, nbytes=64 * p)
    assert LESSON["COST"]["flat"](p) == (
        counted["steps"],
        counted["bytes on the critical path"] / (64 * p),
    )


def test_where_two_lines_cross_they_take_equally_long():
    n = LESSON["crossing"]("doubling", "ring", 8, 20e-6, 1 / 1.25e9)
    times = LESSON["predict"]([n], 8, 20e-6, 1 / 1.25e9)
    assert times["doubling"][n] == pytest.approx(times["ring"][n]) and n == pytest.approx(
        8.8 * 25_000
    )


def test_the_fit_finds_the_line_and_error_bars_are_quartiles():
    line = {n: 40e-6 + n / 2e9 for n in (4, 4096, 4**10)}
    assert LESSON["fit"](line) == pytest.approx([40e-6, 1 / 2e9])
    assert LESSON["middle"]({4: [1.0, 2.0, 3.0, 4.0, 50.0]}) == ({4: 3.0}, {4: (1.5, 27.0)})


def test_a_tree_wins_small_arrays_and_a_ring_large_ones_and_more_nodes_favour_the_tree():
    winner = LESSON["winner"]
    assert [winner(n, 4) for n in (2**10, 2**22, 2**32)] == ["tree LL", "tree LL128", "ring Simple"]
    assert winner(2**32, 128) == "tree Simple" and winner(2**22, 128) == "tree LL128"


@pytest.mark.parametrize(("late", "seconds", "computing"), [(1, 10, 3), (7, 7, 0)])
def test_a_late_rank_lies_on_the_critical_path_or_has_slack(late, seconds, computing):
    links = p101.Network(**LESSON["STEPS"])
    path = critical_path(
        p101.launch(LESSON["flat_reduce"], late, world_size=8, backend="sim", network=links).trace
    )
    assert (path.seconds(), path.messages, path.seconds("compute")) == (seconds, 7, computing)


def milliseconds(algorithm, network):
    return 1e3 * LESSON["seconds"](
        lambda x: p101.all_reduce(x, algorithm=algorithm), 4 * 2**20, network
    )


def test_exercise_1_two_measurements_of_a_link():
    beta = (110e-6 - 11e-6) / (1e6 - 1e3)
    alpha = 11e-6 - 1e3 * beta
    assert (
        1e-9 / beta == pytest.approx(10.1, abs=0.05)
        and alpha == pytest.approx(10.9e-6, abs=1e-8)
        and alpha / beta == pytest.approx(110e3, rel=0.01)
    )


def test_exercise_2_rabenseifner_on_a_switch_and_on_a_ring():
    neighbours = p101.Network.ring(latency=20e-6, bandwidth=1.25e9)
    found = [
        milliseconds(algorithm, network)
        for network in (LESSON["ETHERNET"], neighbours)
        for algorithm in ("rabenseifner", "ring")
    ]
    assert found == pytest.approx([5.99, 6.15, 11.11, 6.15], abs=0.006)


def test_exercise_3_one_number_on_many_ranks():
    for p in (16, 32):
        ring, doubling = (
            LESSON["count"](LESSON[name], p, nbytes=4)["steps"] for name in ("ring", "doubling")
        )
        assert doubling == math.log2(p) and ring <= 2 * (p - 1)


def test_exercise_4_all_to_all_on_a_ring_of_links():
    wires = p101.Network.ring(latency=0.0, bandwidth=1.0)

    def trace(fn, algorithm):
        return p101.launch(
            lambda: fn(torch.ones(128), algorithm=algorithm),
            world_size=8,
            backend="sim",
            network=wires,
        ).trace

    gathered, turned = (
        trace(p101.all_gather, "bidirectional_ring"),
        trace(p101.all_to_all, "direct"),
    )
    assert (gathered.bytes_sent[0], turned.bytes_sent[0]) == (3584, 448)
    assert (gathered.makespan, turned.makespan) == (2048, 512)


def test_exercise_5_a_matrix_on_a_torus():
    nbytes = 16384 * 8192 * 2
    assert p101.cost.all_gather(nbytes, 4, "TPU v4p").seconds == pytest.approx(2.98e-3, rel=0.002)
    assert p101.cost.all_gather(nbytes, [4, 4, 4], "TPU v4p").seconds == pytest.approx(
        0.99e-3, rel=0.005
    )
    assert [
        round(p101.cost.memory("all_gather", nbytes, axes).before / 1e6, 1)
        for axes in (4, [4, 4, 4])
    ] == [67.1, 4.2]
