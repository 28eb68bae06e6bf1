"""Lesson 02: the code by hand is right, the tables are those of the closed forms, the fit finds α
and β, the numbers in the text are those of runs, and the answers are right.
"""

from __future__ import annotations

import ast
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
from parallel101.cost import best_segments, closed_form
from tests.lessons.lesson import INSTALL, answer, definitions, read

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
    "NODE",
    "LEAF",
)
CHAIN = answer("02_algorithms_and_cost", "chain-answer", LESSON)
MI = 2**20
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
        "chain": "partial(pipelined, ",
        "fit": "launch(ping_pong",
        "bus": "bandwidths(operation, algorithm, p)",
        "levels": "leaving(run, n)",
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
        if cell.cell_type == "code" and cell.id != INSTALL
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


def test_the_code_by_hand_sends_the_messages_that_were_watched():
    seen = p101.watch(LESSON["doubling"], world_size=8, backend="sim")
    said = LESSON["same_messages"](LESSON["doubling_all_reduce"], seen)
    assert said == "the same messages as the package's"


@pytest.mark.parametrize(("fn", "says"), [(LESSON["chain"], "7.00 n"), (CHAIN, "1.09 n")])
def test_the_check_of_the_chain_tells_a_pipeline_from_one_message_after_another(fn, says, capsys):
    LESSON["check_chain"](fn)
    assert capsys.readouterr().out == f"right values, {says} on the critical path of 8 ranks\n"


def test_a_chain_that_waits_for_its_sends_costs_twice_as_much(capsys):
    def chain(x, segments):
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        for segment in x.chunk(segments):
            if rank > 0:
                dist.recv(segment, src=rank - 1)
            if rank < last:
                dist.send(segment, dst=rank + 1)
        return x

    LESSON["check_chain"](chain)
    assert "right values, 2.08 n" in capsys.readouterr().out
    LESSON["check_chain"](lambda x, segments: x)
    assert "wrong values" in capsys.readouterr().out


@pytest.mark.parametrize("m", [1, 8, 32, 256])
def test_the_chain_takes_what_the_formula_says(m):
    alpha, beta, n = 20e-6, 1 / 1.25e9, 4 * MI
    took = LESSON["seconds"](lambda x: LESSON["pipelined"](x, m), n, LESSON["ETHERNET"])
    assert took == pytest.approx((6 + m) * (alpha + n * beta / m))


def chain_seconds(p, n, alpha, beta):
    """With the best number of segments."""
    return (math.sqrt((p - 2) * alpha) + math.sqrt(n * beta)) ** 2


def test_the_best_chain_is_as_the_text_says():
    alpha, beta = 20e-6, 1 / 1.25e9
    assert best_segments(8, 4 * MI, alpha, 1 / beta) == 32
    assert chain_seconds(8, 4 * MI, alpha, beta) == pytest.approx(4.74e-3, rel=1e-3)
    assert chain_seconds(8, 64 * MI, alpha, beta) / (64 * MI * beta) == pytest.approx(
        1.10, abs=0.005
    )


@pytest.mark.parametrize("p", [64, 1024])
@pytest.mark.parametrize(("times", "wins"), [(0.8, False), (1.25, True)])
def test_the_chain_beats_scatter_and_all_gather_for_many_bytes_only(p, times, wins):
    alpha, bandwidth = 5e-6, 50e9
    n = times * 4 * (p - 2) * alpha * bandwidth
    other = closed_form("broadcast", "scatter_all_gather", p, p)
    took = other.steps * alpha + other.path / p * n / bandwidth
    assert (chain_seconds(p, n, alpha, 1 / bandwidth) < took) is wins


def test_the_large_numbers_at_the_beginning():
    gradients, card = 2 * 70e9, 400e9 / 8
    assert 1023 * gradients / card / 60 == pytest.approx(48, abs=0.5)
    assert closed_form("all_reduce", "ring", 1024, 1024).path / 1024 * gradients / card < 6


@pytest.mark.parametrize(("p", "times"), [(8, 9), (1024, 250)])
def test_the_border_in_the_takeaway(p, times):
    assert LESSON["crossing"]("doubling", "ring", p, 1.0, 1.0) == pytest.approx(times, rel=0.03)


def hierarchical_in_seconds(fn, cards):
    n = 2**16
    network = LESSON["two_nodes"](cards)
    run = p101.launch(fn, torch.ones(n // 4), world_size=16, backend="sim", network=network)
    assert all((x == 16).all() for x in run.results)
    return run.trace.makespan * 140e9 / n


def test_the_hierarchical_all_reduce_takes_what_the_text_says():
    inside, across = LESSON["NODE"].bandwidth, LESSON["LEAF"].rail_bandwidth
    expected = 140e9 * (2 * 7 / 8 / inside + 2 * 1 / 2 / 8 / across)
    for cards in (1, 8):
        took = hierarchical_in_seconds(LESSON["hierarchical"], cards)
        assert took == pytest.approx(expected)
    steps = [
        p101.launch(
            LESSON[name],
            torch.ones(16),
            world_size=16,
            backend="sim",
            network=p101.Network(**LESSON["STEPS"]),
        ).trace.makespan
        for name in ("ring", "hierarchical")
    ]
    assert steps == [30, 16]


def test_with_ranks_numbered_in_turns_it_is_several_times_slower():
    """A row of What breaks: the launcher gives each node every second rank."""
    order = torch.tensor([rank for i in range(8) for rank in (i, 8 + i)])

    def in_turns(x):
        names = ("between", "inside")
        mesh = DeviceMesh("cpu", order.view(2, 8), mesh_dim_names=names)
        mine = p101.reduce_scatter(x, group=mesh["inside"], algorithm="ring")
        mine = p101.all_reduce(mine, group=mesh["between"], algorithm="ring")
        return p101.all_gather(mine, group=mesh["inside"], algorithm="ring")

    right = hierarchical_in_seconds(LESSON["hierarchical"], 8)
    assert hierarchical_in_seconds(in_turns, 8) > 5 * right


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


def test_exercise_2_the_weights_along_a_chain():
    n, p, alpha, bandwidth = 140e9, 1024, 5e-6, 50e9
    m = best_segments(p, n, alpha, bandwidth)
    assert m == pytest.approx(24_000, rel=0.005) and n / m == pytest.approx(6e6, rel=0.03)
    assert chain_seconds(p, n, alpha, 1 / bandwidth) == pytest.approx(3.04, abs=0.005)
    assert closed_form("broadcast", "binomial", p, p).path / p * n / bandwidth == 28
