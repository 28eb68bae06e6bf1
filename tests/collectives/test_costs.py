"""Steps and bytes counted on the virtual clock equal the closed forms exactly: on a switch, on
rings, on tori and on nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives
from parallel101.collectives.segments import best_segments
from parallel101.cost.closed_forms import (
    FORMS,
    RINGS,
    Cost,
    closed_form,
    torus_form,
    two_level_form,
)
from parallel101.laboratory.sim.network import Network
from parallel101.mesh import split_sizes
from tests.collectives.cases import ROOTED

BLOCK = 3  # bytes of a block: the whole array has p of them
STEPS = {"latency": 1.0, "bandwidth": math.inf}  # the makespan is the number of steps
BYTES = {"latency": 0.0, "bandwidth": 1.0}  # the bytes on the critical path
NETWORKS = {
    "switch": Network,
    "ring": Network.ring,
    "one_way_ring": partial(Network.ring, bidirectional=False),
}
LOGARITHMIC = {"binomial", "recursive_doubling", "recursive_halving", "rabenseifner", "bruck"}
LOGARITHMIC |= {"dissemination", "reduce_broadcast"}


def array_bytes(algorithm: str, p: int) -> int:
    """Enough for two segments and more on a chain of three ranks."""
    return 1_500_000 // p * p if algorithm == "pipelined_chain" else BLOCK * p


def roots(operation: str, p: int, links: str = "switch") -> list[int]:
    if operation not in ROOTED or links != "switch":  # on a one-way ring the root matters
        return [0]
    return sorted({0, p // 2, p - 1}) if p <= 9 else [p // 2]


def run_all(names: list[tuple[str, str]], links: str) -> None:
    """Each algorithm once for each of a few roots, in its own span; all ranks start at the same
    time.
    """
    p = dist.get_world_size()
    for operation, name in names:
        function = collectives.fixed(operation, vars(collectives))[name]
        shard = operation in ("gather", "all_gather")
        x = torch.ones(array_bytes(name, p) // (p if shard else 1), dtype=torch.uint8)
        for root in roots(operation, p, links):
            dist.barrier()
            with p101.span(f"{operation} {name} {root}"):
                if operation == "barrier":
                    function()
                else:
                    function(x, root) if operation in ROOTED else function(x)


def by_span(trace: p101.Trace, prefix: str = "") -> dict[str, tuple[float, list[int]]]:
    """For each name of a span with this prefix: seconds from the first start to the last end, and
    the bytes that each rank sent.
    """
    spans, sent = defaultdict(list), defaultdict(int)
    for event in trace.spans():
        if event.name.startswith(prefix):
            spans[event.rank].append(event)
    starts = {rank: [span.start for span in mine] for rank, mine in spans.items()}
    for event in trace.events:
        if event.kind == "send":
            span = spans[event.rank][bisect_right(starts[event.rank], event.posted) - 1]
            if event.end <= span.end:
                sent[span.name, event.rank] += event.nbytes
    return {
        of_name[0].name: (
            max(span.end for span in of_name) - min(span.start for span in of_name),
            [sent[of_name[0].name, rank] for rank in range(trace.world_size)],
        )
        for of_name in zip(*spans.values())
    }


def sim(*program, **options) -> p101.Trace:
    return p101.launch(*program, backend="sim", **options).trace


def measured(trace: p101.Trace) -> dict[str, tuple[float, int]]:
    """For each name of a span: its seconds, and the bytes of the rank that sent most."""
    return {name: (seconds, max(sent)) for name, (seconds, sent) in by_span(trace).items()}


def mismatches(p: int, names: list[tuple[str, str]], links: str = "switch") -> list:
    """The algorithms that a run on these links contradicts.

    Where there is no closed form, only the bytes that a rank sends count.
    """
    steps, path = (
        measured(sim(run_all, names, links, world_size=p, network=NETWORKS[links](**speed)))
        for speed in (STEPS, BYTES)
    )
    wrong = []
    for operation, name in names:
        nbytes = p if operation == "barrier" else array_bytes(name, p)
        expected = form(operation, name, p, nbytes, links)
        for root in roots(operation, p, links):
            label = f"{operation} {name} {root}"
            (count, sent), (seconds, sent_again) = steps[label], path[label]
            if (expected.steps, expected.path) == (None, None):
                count = seconds = None
            if Cost(count, sent, seconds) != expected or sent_again != sent:
                wrong.append((label, p, Cost(count, sent, seconds), expected))
    return wrong


def form(operation: str, name: str, p: int, nbytes: int, links: str) -> Cost:
    """The closed form, with None for steps and path where these links have none."""
    try:
        return closed_form(operation, name, p, nbytes, links)
    except ValueError:
        return closed_form(operation, name, p, nbytes)._replace(steps=None, path=None)


ALL = [(operation, name) for operation, forms in FORMS.items() for name in forms]


def test_there_is_a_closed_form_for_every_algorithm():
    assert {op: set(forms) for op, forms in FORMS.items()} == {
        op: set(table) for op, table in collectives.TEXTBOOK.items()
    }


@pytest.mark.parametrize("p", [*range(2, 6), 7, 8, 13])
def test_steps_and_bytes_are_those_of_the_closed_forms(p):
    assert mismatches(p, ALL) == []


@pytest.mark.parametrize("links", RINGS)
@pytest.mark.parametrize("p", [2, 7, 8])
def test_steps_and_bytes_on_rings(links, p):
    assert mismatches(p, ALL, links) == []


def test_what_has_no_closed_form_on_a_ring():
    """Where messages of different rounds meet: what doubles or halves, and on a two-way ring
    Bruck's all-to-all and the barrier.
    """
    missing = {
        (links, p): {one for one in ALL if form(*one, p, 5 * p, links).steps is None}
        for links, p in product(RINGS, (8, 12))
    }
    halving, bruck = ("reduce_scatter", "recursive_halving"), ("all_to_all", "bruck")
    doubling = {("all_gather", "recursive_doubling"), halving, ("all_reduce", "rabenseifner")}
    doubling.add(("all_reduce", "recursive_doubling"))
    two_way = doubling | {bruck, ("barrier", "dissemination")}
    assert missing == {
        ("ring", 8): two_way,
        ("ring", 12): two_way | {("all_gather", "bruck")},
        ("one_way_ring", 8): set(),
        ("one_way_ring", 12): doubling,
    }
    with pytest.raises(ValueError, match="no simple closed form on links='ring' for p=8: run it"):
        closed_form("all_to_all", "bruck", 8, 16, "ring")


@pytest.mark.parametrize("p", [16, 21])
def test_steps_and_bytes_of_the_logarithmic_forms(p):
    assert mismatches(p, [one for one in ALL if one[1] in LOGARITHMIC]) == []


BY_HAND = [  # on 16 ranks, of 1600 bytes: steps, and bytes sent
    (("broadcast", "binomial"), 4, 4 * 1600),
    (("broadcast", "scatter_all_gather"), 4 + 15, 3000),
    (("all_gather", "ring"), 15, 1500),
    (("all_gather", "bruck"), 4, 1500),
    (("reduce_scatter", "recursive_halving"), 4, 1500),
    (("all_reduce", "recursive_doubling"), 4, 4 * 1600),
    (("all_reduce", "rabenseifner"), 8, 3000),
    (("all_reduce", "ring"), 30, 3000),
    (("all_to_all", "bruck"), 4, 1600 // 2 * 4),
]
EQUAL = "equal blocks"
WRONG = [
    *(
        (closed_form, ("all_reduce", "ring", *sizes), EQUAL)
        for sizes in ((3, 1600), (2.0, 8), (2, -8))
    ),
    *((two_level_form, mesh, EQUAL) for mesh in (((2, 2), -4), ((0, 2), 8), ((2, 2), 6))),
    *(
        (torus_form, ("all_reduce", *mesh), "equal parts")
        for mesh in (((2, 2), -4), ((0, 2), 8), ((2, 2), 6))
    ),
    (torus_form, ("broadcast", (2, 2), 16), "expected all_gather, reduce_scatter"),
    (two_level_form, ((3, 4), 144, 5), "rails=5: expected 1 to 4, the ranks of a node"),
    (closed_form, ("all_reduce", "ring", 4, 16, "mesh"), "links='mesh': expected 'switch', 'ring'"),
    (closed_form, ("all_reduce", "brukc", 4, 1600), "no closed form for 'all_reduce' by 'brukc'"),
    (best_segments, (4, 100, 0.0), "Without latency, more segments are always better"),
    (
        partial(closed_form, segment_bytes=7),
        ("broadcast", "binomial", 2, 30),
        "only algorithm='pipelined_chain'",
    ),
]


def test_the_textbooks_own_numbers():
    """Some numbers written by hand: a check of the table that does not depend on our code."""
    for names, steps, sent in BY_HAND:
        assert closed_form(*names, 16, 1600) == Cost(steps, sent, sent), names
    assert closed_form("all_reduce", "rabenseifner", 20, 1600).steps == 2 * 4 + 2
    nothing = [closed_form(*names, 5, 0) for names in ALL if names[0] != "barrier"]
    nothing += [torus_form("all_reduce", (2, 3), 0), closed_form("all_reduce", "ring", 1, 1600)]
    assert set(nothing) == {Cost(0, 0, 0)}
    for function, arguments, message in WRONG:
        with pytest.raises(ValueError, match=message):
            function(*arguments)


def in_segments(
    sizes: list[int | None], nbytes: int, operations: tuple[str, ...] = ("broadcast", "reduce")
) -> None:
    """Pass `nbytes` along a chain, in segments of each size."""
    x = torch.ones(nbytes, dtype=torch.uint8)
    for operation, segment_bytes in product(operations, sizes):
        dist.barrier()
        with p101.span(f"{operation} {segment_bytes}"):
            function = getattr(collectives, operation)
            function(x, algorithm="pipelined_chain", segment_bytes=segment_bytes)


@pytest.mark.parametrize("p", [2, 5])
def test_a_chain_in_segments_of_a_given_size(p):
    """p − 2 + m steps, also if the last segment is shorter, and if one segment is enough."""
    sizes = [1, 7, 30, 100]
    steps, path = (
        measured(sim(in_segments, sizes, 30, world_size=p, network=Network(**speed)))
        for speed in (STEPS, BYTES)
    )
    for operation, size in product(("broadcast", "reduce"), sizes):
        cost = closed_form(operation, "pipelined_chain", p, 30, segment_bytes=size)
        m, name = -(-30 // size), f"{operation} {size}"
        assert cost == Cost(p - 2 + m, 30, 30 + (p - 2) * min(30, size))
        assert (steps[name], path[name]) == ((cost.steps, 30), (cost.path, 30))


def test_no_other_number_of_segments_is_faster():
    """√((p − 2) n β/α), on the default network; and it follows from any latency and bandwidth."""
    p, nbytes, network = 6, 3_150_000, Network()
    m = best_segments(p, nbytes)
    assert m == best_segments(p, 10 * nbytes, 5e-5, 50e9) == 7
    slower = [nbytes // other for other in (1, 2, m - 1, m + 2, 100)]
    sizes = [None, nbytes // m, *slower]
    trace = sim(in_segments, sizes, nbytes, ("broadcast",), world_size=p, network=network)
    seconds = {name: of_run for name, (of_run, _) in measured(trace).items()}
    form = closed_form("broadcast", "pipelined_chain", p, nbytes)
    fastest = form.seconds(network.latency, network.bandwidth)
    assert seconds["broadcast None"] == pytest.approx(fastest)
    assert seconds[f"broadcast {nbytes // m}"] == pytest.approx(fastest)
    assert all(seconds[f"broadcast {size}"] > 1.001 * fastest for size in slower)
    # less than the 2n (p − 1)/p bytes of the other algorithm for many bytes
    assert form.path < closed_form("broadcast", "scatter_all_gather", p, nbytes).path
    assert best_segments(2, nbytes) == best_segments(100, 0) == 1


ON_A_TORUS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def on_a_mesh(shape, names):
    """Each algorithm once over the mesh, with a block of twelve bytes for each rank, in its own
    span.
    """
    mesh, p = dist.device_mesh.init_device_mesh("cpu", shape), math.prod(shape)
    for operation, name in names:
        group = mesh if name in ("torus", "two_level") else None
        x = torch.ones(12 if operation == "all_gather" else 12 * p, dtype=torch.uint8)
        dist.barrier()
        with p101.span(f"{operation} {name}"):
            getattr(collectives, operation)(x, group=group, algorithm=name)


def counted(shape, names, network):
    """What runs of these algorithms cost on `network(latency=, bandwidth=)`."""
    steps, path = (
        measured(
            sim(on_a_mesh, shape, names, world_size=math.prod(shape), network=network(**speed))
        )
        for speed in (STEPS, BYTES)
    )
    return {label: Cost(steps[label][0], steps[label][1], path[label][0]) for label in steps}


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (1, 4), (2, 2, 3)], ids=str)
def test_all_axes_of_a_torus_at_once(shape):
    names = [(operation, "torus") for operation in ON_A_TORUS]
    assert counted(shape, names, partial(Network.torus, shape)) == {
        f"{operation} torus": torus_form(operation, shape, 12 * math.prod(shape))
        for operation in ON_A_TORUS
    }


def test_on_axes_of_one_length_the_bytes_leave_over_all_links():
    """V (N − 1) / N over two links for each axis, in Σ (pᵢ − 1) steps."""
    for shape in ((16, 16), (4, 4, 4), (3, 5)):
        p, axes = math.prod(shape), len(shape)
        cost = torus_form("all_gather", shape, 60 * p)
        assert (cost.steps, cost.sent) == (sum(shape) - axes, 60 * (p - 1)) or shape == (3, 5)
        all_links = cost.sent / (2 * axes)
        assert cost.path == all_links if len(set(shape)) == 1 else cost.path > all_links


def test_a_flat_ring_costs_the_same_on_a_torus():
    """Its messages go to the next rank, at the end of a row by two links that nobody else needs."""
    run = counted((2, 4), [("all_reduce", "ring")], partial(Network.torus, (2, 4)))
    assert run == {"all_reduce ring": closed_form("all_reduce", "ring", 8, 12 * 8)}


FAST = {"inside_latency": 0.0, "inside_bandwidth": math.inf}
TWO_LEVELS = [("all_reduce", "two_level"), ("all_reduce", "ring")]


@pytest.mark.parametrize(
    ("shape", "rails"), [((3, 2), 1), ((2, 3), 1), ((1, 3), 1), ((3, 4), 2), ((3, 4), 4)]
)
def test_two_levels(shape, rails):
    """Inside the nodes and across them, where a flat ring leaves a node by one rail at the speed of
    the links between nodes, and the ranks of a node by all rails.
    """
    nodes, ranks = shape
    p, nbytes = nodes * ranks, 12 * nodes * ranks
    form = two_level_form(shape, nbytes, rails)

    def across(latency, bandwidth):
        speed = {"latency": latency, "bandwidth": bandwidth}
        return Network.two_level(ranks, rails=rails, **speed, **FAST)

    def inside(latency, bandwidth):
        speed = {"inside_latency": latency, "inside_bandwidth": bandwidth}
        return Network.two_level(ranks, latency=0.0, bandwidth=math.inf, **speed)

    for network, cost, width in ((across, form.across, rails), (inside, form.inside, 1)):
        if network is inside and rails > 1:
            continue
        two_level, ring = counted(shape, TWO_LEVELS, network).values()
        assert (two_level.steps, two_level.path) == (cost.steps, cost.path * width)
        if cost.steps:  # otherwise no time passes
            assert two_level.sent == form.inside.sent + form.across.sent
        if network is across and nodes > 1:
            flat = closed_form("all_reduce", "ring", p, nbytes)
            assert ring == flat._replace(path=flat.path * rails)
            # the node's whole bandwidth, always
            assert two_level.path == 2 * (nodes - 1) * nbytes // nodes or rails == 1


def test_an_all_gather_on_a_line_takes_as_long_as_on_a_one_way_ring():
    """n − 1 hops instead of n / 2, so nearly twice as long: "How to Scale Your Model", part 3, pop
    quiz 2. The end of a line has one link, over which all other blocks arrive.
    """
    p, names = 6, [("all_gather", "ring"), ("all_gather", "bidirectional_ring")]
    ring, line = (
        counted((p,), names, partial(Network.ring, wraparound=wraparound))
        for wraparound in (True, False)
    )
    assert ring["all_gather bidirectional_ring"][::2] == (p // 2, p // 2 * 12)
    # its last message goes back to rank 0, over links that nothing else needs
    assert line["all_gather ring"][::2] == ring["all_gather ring"][::2] == (p - 1, (p - 1) * 12)
    assert line["all_gather bidirectional_ring"].path >= (p - 1) * 12
    chip = p101.cost.CHIPS["TPU v4p"]
    paths = line["all_gather ring"], ring["all_gather bidirectional_ring"]
    for cost, multiple in zip(paths, (1000, 1)):
        links = replace(chip.links, ring_multiple=multiple)
        time = p101.cost.all_gather(12 * p, p, replace(chip, links=links))
        assert cost.path / chip.links.bandwidth == pytest.approx(time.bounds["bandwidth"])


def test_a_rank_with_nothing_to_send_sends_nothing():
    def run():
        p = dist.get_world_size()
        for operation, table in collectives.TEXTBOOK.items():
            for name in table if operation != "barrier" else ():
                collectives.fixed(operation, vars(collectives))[name](torch.empty(0, 3))
        collectives.reduce_scatter(torch.ones(2), sizes=[2] + [0] * (p - 1), algorithm="direct")
        return split_sizes(0, p)

    assert sim(run, world_size=4).messages_sent == [0, 1, 1, 1]
