"""Steps and bytes counted on the virtual clock equal the closed forms exactly. A bidirectional ring takes half the steps of a ring."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives
from parallel101.collectives.broadcast import SEGMENT_BYTES
from parallel101.cost.closed_forms import FORMS, Cost, closed_form, torus_all_reduce
from parallel101.mesh import split_sizes
from parallel101.sim.network import Network
from tests.collectives.cases import ROOTED

BLOCK = 3  # bytes of a block: the whole array has p of them
STEPS = Network(latency=1.0, bandwidth=math.inf)
BYTES = Network(latency=0.0, bandwidth=1.0)
LOGARITHMIC = {"binomial", "recursive_doubling", "recursive_halving", "rabenseifner", "bruck", "dissemination", "reduce_broadcast"}


def array_bytes(algorithm: str, p: int) -> int:
    return 5 * SEGMENT_BYTES // 2 // p * p if algorithm == "chain" else BLOCK * p


def roots(operation: str, p: int) -> list[int]:
    if operation not in ROOTED:
        return [0]
    return sorted({0, p // 2, p - 1}) if p <= 9 else [p // 2]


def run_all(names: list[tuple[str, str]]) -> None:
    """Each algorithm once for each of a few roots, in its own span; all ranks start at the same time."""
    p = dist.get_world_size()
    for operation, name in names:
        function = collectives.fixed(operation, vars(collectives))[name]
        shard = operation in ("gather", "all_gather")
        x = torch.ones(array_bytes(name, p) // (p if shard else 1), dtype=torch.uint8)
        for root in roots(operation, p):
            dist.barrier()
            with p101.span(f"{operation} {name} {root}"):
                if operation == "barrier":
                    function()
                else:
                    function(x, root) if operation in ROOTED else function(x)


def measured(trace: p101.Trace) -> dict[str, tuple[float, int]]:
    """For each span name: seconds from the first start to the last end, and the bytes of the rank that sent most."""
    spans, sent, starts, ends = defaultdict(list), defaultdict(int), defaultdict(list), defaultdict(list)
    for event in trace.spans():
        spans[event.rank].append(event)
        starts[event.name].append(event.start)
        ends[event.name].append(event.end)
    times = {rank: [span.start for span in mine] for rank, mine in spans.items()}
    for event in trace.events:
        if event.kind == "send":
            span = spans[event.rank][bisect_right(times[event.rank], event.posted) - 1]
            assert event.end <= span.end
            sent[span.name, event.rank] += event.nbytes
    return {name: (max(ends[name]) - min(starts[name]), max(sent[name, rank] for rank in spans)) for name in starts}


def mismatches(p: int, names: list[tuple[str, str]]) -> list:
    steps, path = (measured(p101.launch(run_all, names, world_size=p, backend="sim", network=network).trace) for network in (STEPS, BYTES))
    wrong = []
    for operation, name in names:
        expected = closed_form(operation, name, p, p if operation == "barrier" else array_bytes(name, p))
        for root in roots(operation, p):
            label = f"{operation} {name} {root}"
            (count, sent), (seconds, sent_again) = steps[label], path[label]
            if Cost(count, sent, seconds) != expected or sent_again != sent:
                wrong.append((label, p, Cost(count, sent, seconds), expected))
    return wrong


def with_nothing_in_it(names: list[tuple[str, str]]) -> None:
    for operation, name in names:
        collectives.fixed(operation, vars(collectives))[name](torch.empty(0))


def test_an_empty_array_costs_nothing():
    names = [(operation, name) for operation, name in ALL if operation != "barrier"]
    assert p101.launch(with_nothing_in_it, names, world_size=5, backend="sim").trace.events == []
    assert {closed_form(operation, name, 5, 0) for operation, name in names} == {torus_all_reduce((2, 3), 0)} == {Cost(0, 0, 0)}


ALL = [(operation, name) for operation, forms in FORMS.items() for name in forms]


def test_there_is_a_closed_form_for_every_algorithm():
    assert {op: set(forms) for op, forms in FORMS.items()} == {op: set(table) for op, table in collectives.TEXTBOOK.items()}


@pytest.mark.parametrize("p", range(2, 34))
def test_steps_and_bytes_are_those_of_the_closed_forms(p):
    assert mismatches(p, ALL) == []


@pytest.mark.parametrize("p", [64, 128, 256])
def test_steps_and_bytes_of_the_logarithmic_forms(p):
    assert mismatches(p, [(operation, name) for operation, name in ALL if name in LOGARITHMIC]) == []


def test_the_textbooks_own_numbers():
    """Some numbers written by hand: a check of the table that does not depend on our code."""
    n = 1600
    assert closed_form("broadcast", "binomial", 16, n) == Cost(4, 4 * n, 4 * n)
    assert closed_form("broadcast", "scatter_all_gather", 16, n) == Cost(4 + 15, 3000, 3000)
    assert closed_form("all_gather", "ring", 16, n) == Cost(15, 1500, 1500)
    assert closed_form("all_gather", "bruck", 16, n) == closed_form("reduce_scatter", "recursive_halving", 16, n) == Cost(4, 1500, 1500)
    assert closed_form("all_reduce", "recursive_doubling", 16, n) == Cost(4, 4 * n, 4 * n)
    assert closed_form("all_reduce", "rabenseifner", 16, n) == Cost(8, 3000, 3000)
    assert closed_form("all_reduce", "rabenseifner", 20, n).steps == 2 * 4 + 2
    assert closed_form("all_reduce", "ring", 16, n) == Cost(30, 3000, 3000)
    assert closed_form("all_to_all", "bruck", 16, n) == Cost(4, n // 2 * 4, n // 2 * 4)
    assert closed_form("all_reduce", "ring", 1, n) == Cost(0, 0, 0)
    for wrong in ((3, 1600), (2.0, 8), (2, -8)):
        with pytest.raises(ValueError, match="equal blocks"):
            closed_form("all_reduce", "ring", *wrong)
    for shape, nbytes in (((2, 2), -4), ((0, 2), 8)):
        with pytest.raises(ValueError, match="equal blocks"):
            torus_all_reduce(shape, nbytes)
    with pytest.raises(ValueError, match="no closed form for 'all_reduce' by 'brukc'"):
        closed_form("all_reduce", "brukc", 4, 1600)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_bidirectional_ring_takes_half_the_steps_where_links_go_both_ways(operation, p):
    def one(algorithm):
        x = torch.ones(BLOCK if operation == "all_gather" else BLOCK * p, dtype=torch.uint8)
        getattr(collectives, operation)(x, algorithm=algorithm)

    twice = 2 if operation == "all_reduce" else 1
    for network, unit in ((Network.ring(latency=1.0, bandwidth=math.inf), 1), (Network.ring(latency=0.0, bandwidth=1.0), BLOCK)):
        both_ways, one_way = (
            p101.launch(one, name, world_size=p, backend="sim", network=network).trace.makespan for name in ("bidirectional_ring", "ring")
        )
        assert both_ways == twice * (p // 2) * unit
        assert one_way == twice * (p - 1) * unit


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (4, 2), (1, 4), (2, 2, 3)])
def test_along_the_axes_of_a_mesh(shape):
    def run(algorithm):
        mesh = dist.device_mesh.init_device_mesh("cpu", shape)
        dist.barrier()
        with p101.span(algorithm):
            collectives.all_reduce(torch.ones(math.prod(shape) * BLOCK, dtype=torch.uint8), group=mesh, algorithm=algorithm)

    expected = torus_all_reduce(shape, math.prod(shape) * BLOCK)
    for algorithm in ["torus", "two_level"][: 2 if len(shape) == 2 else 1]:
        steps, path = (
            p101.launch(run, algorithm, world_size=math.prod(shape), backend="sim", network=network).trace for network in (STEPS, BYTES)
        )
        (count, sent), (seconds, _) = measured(steps)[algorithm], measured(path)[algorithm]
        assert Cost(count, sent, seconds) == expected


def test_a_rank_with_nothing_to_send_sends_nothing():
    def run():
        p = dist.get_world_size()
        for operation, table in collectives.TEXTBOOK.items():
            for name in table if operation != "barrier" else ():
                collectives.fixed(operation, vars(collectives))[name](torch.empty(0, 3))
        collectives.reduce_scatter(torch.ones(2), sizes=[2] + [0] * (p - 1), algorithm="direct")
        return split_sizes(0, p)

    run = p101.launch(run, world_size=4, backend="sim")
    assert run.trace.messages_sent == [0, 1, 1, 1]
