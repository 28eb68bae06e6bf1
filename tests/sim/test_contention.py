"""How long messages take on the sim when they need the same links.

(Without contention: test_time.py.)
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.sim.network import Network
from parallel101.spans import unrecorded

from . import programs
from .programs import makespan, run, trace, wait_for


def flows(*pairs, numel=1):
    """Messages from rank to rank, all posted at once; leaving unrecorded() takes no time."""

    def program(rank):
        works = [dist.isend(torch.zeros(numel), dst) for src, dst in pairs if src == rank]
        if works:
            with unrecorded():
                pass
        wait_for(works + [dist.irecv(torch.zeros(numel), src) for src, dst in pairs if dst == rank])

    return program


STEPS, BYTES = Network(latency=1.0, bandwidth=math.inf), Network(latency=0.0, bandwidth=1.0)
RING = partial(Network.ring, latency=1.0)
OVERLAPS = {"latency": 1.0, "bandwidth": 8.0, "latency_overlaps": True}
TIMES = [  # network, ranks, program, seconds
    *(
        (network, n, partial(program, numel=3), steps * seconds)
        for n in (2, 3, 4, 5, 8, 13)
        for network, seconds in ((STEPS, 1), (BYTES, 4 * 3))
        for program, steps in (
            (programs.flat_broadcast, n - 1),
            (programs.tree_broadcast, math.ceil(math.log2(n))),
            (programs.ring_all_gather, n - 1),
            (programs.direct_all_to_all, n - 1),  # n - 1 permutations
        )
    ),
    (STEPS, 2, flows((0, 1), (1, 0)), 1),
    (STEPS, 3, flows((1, 0), (2, 0)), 2),  # one message each way at a time
    *((RING(bandwidth=10.0), 8, flows((0, far), numel=10), 1 + 40 / 10) for far in (1, 2, 3)),
    *(
        (RING(bandwidth=4.0, bidirectional=both_ways), 8, flows(*pairs), seconds)
        for both_ways in (False, True)
        for pairs, seconds in (
            ([(0, 2)], 2),
            ([(0, 2), (1, 3)], 4),  # both need the link from 1 to 2
            ([(0, 2), (2, 4)], 2),
            ([(0, 3), (1, 3), (2, 3)], 6),
        )
    ),
    *(  # where latencies overlap, messages follow each other after their bytes
        (network, 8, flows(*pairs, numel=4), 1 + count * 16 / 8)
        for network in (
            Network(**OVERLAPS),
            Network.ring(**OVERLAPS),
            Network.torus((2, 4), **OVERLAPS),
            Network.two_level(2, **OVERLAPS),
        )
        for far, count in ((2, 1), (2, 5), (3, 4))
        for pairs in ([(0, far)] * count, [(0, far), (far, 0)] * count)
    ),
]


@pytest.mark.parametrize(("network", "n", "program", "seconds"), TIMES, ids=range(len(TIMES)))
def test_a_program_takes_the_time_of_its_critical_path(network, n, program, seconds):
    assert makespan(program, n, network) == seconds


@pytest.mark.parametrize("rules", ["gloo", "nccl"])
@pytest.mark.parametrize("n", [3, 8])
def test_direct_beats_the_ring_only_where_latencies_overlap(n, rules):
    def steps(algorithm, overlaps):
        network = Network(latency=1.0, bandwidth=math.inf, latency_overlaps=overlaps)
        gather = lambda rank: p101.all_gather(torch.ones(2), algorithm=algorithm)  # noqa: E731
        return trace(run(gather, n, network, rules=rules)).makespan

    assert steps("ring", overlaps=True) == steps("ring", overlaps=False) == n - 1
    assert steps("direct", overlaps=False) >= n - 1 and steps("direct", overlaps=True) == 1


@pytest.mark.parametrize("n", [3, 4, 5, 8, 9, 16])
def test_all_to_all_is_a_quarter_of_all_gather_on_a_bidirectional_ring(n):
    """Each rank ends with n shards in both.

    All-gather moves shards half way round, all-to-all pieces of them half as far on average: about
    so if no rank is opposite.
    """
    ring = Network.ring(latency=0.0, bandwidth=1.0)
    ratio = makespan(programs.direct_all_to_all, n, ring) / makespan(
        lambda r: programs.bidirectional_all_gather(r, n), n, ring
    )
    bound = (n + 1) / (4 * n)  # every link is busy all the time
    assert ratio == 1 / 4 if n % 2 == 0 else bound <= ratio <= bound * 1.5


def two_level_all_reduce(rank, numel, k):
    """Reduce inside the node, then all-reduce among the first ranks of the nodes, then
    broadcast inside.
    """
    n, x = dist.get_world_size(), torch.ones(numel)
    first, inside = rank - rank % k, torch.empty(numel)
    if rank == first:
        for peer in range(first + 1, first + k):
            dist.recv(inside, peer)
            x += inside
        programs.ring_all_reduce(x, list(range(0, n, k)), rank)
        wait_for([dist.isend(x, peer) for peer in range(first + 1, first + k)])
    else:
        dist.send(x, first)
        dist.recv(x, first)
    assert x.tolist() == [n] * numel


def flat_all_reduce(rank, numel):
    """Recursive doubling: once the distance is as large as a node, every rank exchanges with a
    rank of another node.
    """
    x, inbox, distance, n = torch.ones(numel), torch.empty(numel), 1, dist.get_world_size()
    while distance < n:
        wait_for([dist.isend(x, rank ^ distance), dist.irecv(inbox, rank ^ distance)])
        x = x + inbox
        distance *= 2
    assert x.tolist() == [n] * numel


def test_two_level_all_reduce_is_faster_only_if_links_differ():
    n, k, numel = 16, 4, 64
    slow_between = Network.two_level(
        k, latency=0.0, bandwidth=1.0, inside_latency=0.0, inside_bandwidth=100.0
    )
    equal = Network(latency=0.0, bandwidth=1.0)
    two_level, flat = (
        [makespan(program, n, network) for network in (slow_between, equal)]
        for program in (
            lambda r: two_level_all_reduce(r, numel, k),
            lambda r: flat_all_reduce(r, numel),
        )
    )
    assert two_level[0] < flat[0] and two_level[1] > flat[1]


def bytes_by_rail(program, n, network):
    """By outgoing rail, the bytes that leave a node by it."""
    ran, route = run(program, n, network), network.router(n)
    ranks_per_node, rails = network.topology.ranks_per_node, network.topology.rails
    sent = {}
    for m in trace(ran).messages():
        if m.src // ranks_per_node != m.dst // ranks_per_node:
            rail = (m.src // ranks_per_node, m.src % ranks_per_node % rails)
            assert route(m.src, m.dst).bandwidth == network.bandwidth / rails
            sent[rail] = sent.get(rail, 0) + m.nbytes
    return sent, trace(ran).makespan


def test_two_levels_use_all_rails_and_a_flat_ring_one():
    """Four nodes of four ranks; a node's bandwidth is the same with one rail as with four."""
    n, k, numel = 16, 4, 64

    def two_level(rank):
        mesh = dist.device_mesh.init_device_mesh("cpu", (n // k, k))
        p101.all_reduce(torch.ones(numel), group=mesh, algorithm="two_level")

    def ring(rank):
        p101.all_reduce(torch.ones(numel), algorithm="ring")

    free = {"latency": 0.0, "bandwidth": 1.0, "inside_latency": 0.0, "inside_bandwidth": math.inf}
    one, four = (Network.two_level(k, rails=rails, **free) for rails in (1, 4))
    nbytes = 4 * numel

    sent, seconds = bytes_by_rail(two_level, n, four)
    assert sent == {
        (node, rail): 2 * nbytes // k * 3 // 4 for node in range(4) for rail in range(4)
    }
    assert seconds == 2 * nbytes * 3 // 4 == makespan(two_level, n, one)

    sent, seconds = bytes_by_rail(ring, n, four)  # out by the last rank of a node, in by the first
    assert sent == {(node, 3): 2 * nbytes * 15 // 16 for node in range(4)}
    assert seconds == 4 * 2 * nbytes * 15 // 16 == 4 * makespan(ring, n, one)


def test_ranks_of_a_node_share_its_outgoing_link():
    """Two messages from node 0 to nodes 1 and 2, and at the same time one inside each node."""
    pairs = (0, 2), (1, 4), (2, 3), (5, 4)

    def program(rank):
        works = [dist.isend(torch.zeros(1), dst) for src, dst in pairs if src == rank]
        wait_for(works + [dist.irecv(torch.zeros(1), src) for src, dst in pairs if dst == rank])

    free = {"bandwidth": math.inf, "inside_bandwidth": math.inf}
    network = Network.two_level(2, latency=2.0, inside_latency=1.0, **free)
    messages = trace(run(program, 6, network)).messages()
    times = {(m.src, m.dst): (m.start, m.end) for m in messages}
    assert times == {(0, 2): (0, 2), (1, 4): (2, 4), (2, 3): (0, 1), (5, 4): (0, 1)}
