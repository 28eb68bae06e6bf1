"""Lesson 02: the code by hand is right, the formulas are those of runs, the fit finds α and β, and
the numbers in the text and in the answers follow.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
from parallel101.cost import best_segments, closed_form
from tests.lessons.lesson import answer, definitions

VALUES = "STEPS", "BYTES", "COST", "WAYS", "ETHERNET", "LINKS", "FACTOR", "NCCL", "NODE", "LEAF"
LESSON = definitions("02_algorithms_and_cost", *VALUES)
CHAIN = answer("02_algorithms_and_cost", "chain-answer", LESSON)
MI, ALPHA, BETA = 2**20, 20e-6, 1 / 1.25e9  # ten-gigabit Ethernet


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_the_all_reduces_are_right(p):
    x = [torch.arange(2.0 * p) + 100 * r for r in range(p)]
    names = ("flat", "tree", "ring", "doubling", "doubling_all_reduce")
    run = p101.launch(
        lambda: [LESSON[name](x[dist.get_rank()]) for name in names], world_size=p, backend="sim"
    )
    for results in run.results:
        assert all(torch.equal(result, sum(x)) for result in results)


def waits_for_its_sends(x, segments):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for segment in x.chunk(segments):
        if rank > 0:
            dist.recv(segment, src=rank - 1)
        if rank < last:
            dist.send(segment, dst=rank + 1)
    return x


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (LESSON["chain"], "right values, 7.00 n"),
        (CHAIN, "right values, 1.09 n"),
        (waits_for_its_sends, "right values, 2.08 n"),  # "about 2n", the text says
        (lambda x, segments: x, "wrong values"),
    ],
    ids=["begun", "answer", "sends that wait", "nothing sent"],
)
def test_the_check_of_the_chain(fn, says, capsys):
    LESSON["check_chain"](fn)
    assert capsys.readouterr().out.startswith(says)


@pytest.mark.parametrize("m", [1, 8, 32, 256])
def test_the_chain_takes_what_the_formula_says(m):
    n = 4 * MI
    took = LESSON["seconds"](lambda x: LESSON["pipelined"](x, m), n, LESSON["ETHERNET"])
    assert took == pytest.approx((6 + m) * (ALPHA + n * BETA / m))


def chain_seconds(p, n, alpha, beta):
    """With the best number of segments."""
    return (math.sqrt((p - 2) * alpha) + math.sqrt(n * beta)) ** 2


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
    assert closed_form("all_reduce", "ring", 1024, 1024).path / 1024 * gradients / card < 6


@pytest.mark.parametrize(("p", "times"), [(8, 8.8), (1024, 250)])
def test_where_doubling_and_the_ring_take_equally_long(p, times):
    n = LESSON["crossing"]("doubling", "ring", p, ALPHA, BETA)
    assert n * BETA / ALPHA == pytest.approx(times, rel=0.03)
    took = LESSON["predict"]([n], p, ALPHA, BETA)
    assert took["doubling"][n] == pytest.approx(took["ring"][n])


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_the_costs_are_those_of_a_run(p):
    n = 64 * p
    for name, cost in LESSON["COST"].items():
        counted = LESSON["count"](LESSON[name], p, nbytes=n)
        assert cost(p) == (counted["steps"], counted["bytes on the critical path"] / n), name


def seconds_on_two_nodes(fn, cards):
    n, network = 2**16, LESSON["two_nodes"](cards)
    run = p101.launch(fn, torch.ones(n // 4), world_size=16, backend="sim", network=network)
    assert all((x == 16).all() for x in run.results)
    return run.trace.makespan * 140e9 / n


def test_the_hierarchical_all_reduce_takes_what_the_text_says():
    inside, across = LESSON["NODE"].bandwidth, LESSON["LEAF"].rail_bandwidth
    expected = 140e9 * (2 * 7 / 8 / inside + 2 * 1 / 2 / 8 / across)
    for cards in (1, 8):
        assert seconds_on_two_nodes(LESSON["hierarchical"], cards) == pytest.approx(expected)
    steps = [LESSON["count"](LESSON[name], 16)["steps"] for name in ("ring", "hierarchical")]
    assert steps == [30, 16]


def test_with_ranks_numbered_in_turns_it_is_several_times_slower():
    """A row of What breaks: the launcher gives each node every second rank."""
    order = torch.tensor([rank for i in range(8) for rank in (i, 8 + i)])

    def in_turns(x):
        mesh = DeviceMesh("cpu", order.view(2, 8), mesh_dim_names=("between", "inside"))
        mine = p101.reduce_scatter(x, group=mesh["inside"], algorithm="ring")
        mine = p101.all_reduce(mine, group=mesh["between"], algorithm="ring")
        return p101.all_gather(mine, group=mesh["inside"], algorithm="ring")

    right = seconds_on_two_nodes(LESSON["hierarchical"], 8)
    assert seconds_on_two_nodes(in_turns, 8) > 5 * right


def test_the_fit_finds_the_line_and_error_bars_are_quartiles():
    line = {n: 40e-6 + n / 2e9 for n in (4, 4096, 4**10)}
    assert LESSON["fit"](line) == pytest.approx([40e-6, 1 / 2e9])
    assert LESSON["middle"]({4: [1.0, 2.0, 3.0, 4.0, 50.0]}) == ({4: 3.0}, {4: (1.5, 27.0)})


def test_exercise_2_the_weights_along_a_chain():
    n, p, alpha, bandwidth = 140e9, 1024, 5e-6, 50e9
    m = best_segments(p, n, alpha, bandwidth)
    assert m == pytest.approx(24_000, rel=0.005) and n / m == pytest.approx(6e6, rel=0.03)
    assert chain_seconds(p, n, alpha, 1 / bandwidth) == pytest.approx(3.04, abs=0.005)
    assert closed_form("broadcast", "binomial", p, p).path / p * n / bandwidth == 28
