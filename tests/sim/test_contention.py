"""How long messages take on the sim when they need the same links.

(Without contention: test_time.py.)
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.sim.network import Network
from parallel101.spans import unrecorded

from . import programs
from .programs import makespan, run, trace, wait_for


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_far_and_near_take_the_same_time_on_a_ring(hops):
    def program(rank):
        if rank == 0:
            dist.send(torch.zeros(10), hops)
        elif rank == hops:
            dist.recv(torch.zeros(10), 0)

    assert makespan(program, 8, Network.ring(latency=1.0, bandwidth=10.0)) == 1 + 40 / 10


@pytest.mark.parametrize("bidirectional", [False, True])
def test_two_flows_over_one_link_take_twice_as_long_as_one(bidirectional):
    network = Network.ring(latency=1.0, bandwidth=4.0, bidirectional=bidirectional)

    def flows(*pairs):
        def program(rank):
            works = [dist.isend(torch.zeros(1), dst) for src, dst in pairs if src == rank]
            wait_for(works + [dist.irecv(torch.zeros(1), src) for src, dst in pairs if dst == rank])

        return makespan(program, 8, network)

    assert flows((0, 2)) == 2
    assert flows((0, 2), (1, 3)) == 4  # both need the link from 1 to 2
    assert flows((0, 2), (2, 4)) == 2
    assert flows((0, 3), (1, 3), (2, 3)) == 6


OVERLAPPING = {
    "switch": Network(latency=1.0, bandwidth=8.0, latency_overlaps=True),
    "ring": Network.ring(latency=1.0, bandwidth=8.0, latency_overlaps=True),
    "torus": Network.torus((2, 4), latency=1.0, bandwidth=8.0, latency_overlaps=True),
    "nodes": Network.two_level(2, latency=1.0, bandwidth=8.0, latency_overlaps=True),
}


@pytest.mark.parametrize("kind", OVERLAPPING)
@pytest.mark.parametrize(("apart", "count"), [(2, 1), (2, 5), (3, 4)])
def test_where_latencies_overlap_messages_follow_each_other_after_their_bytes(kind, apart, count):
    """One way, and both ways at once, also when the sender leaves unrecorded() meanwhile."""

    def program(rank, back=False):
        pair = (0, apart)
        if rank not in pair:
            return
        other = pair[1 - pair.index(rank)]
        works = [dist.isend(torch.zeros(4), other) for _ in range(count) if back or rank == 0]
        with unrecorded():
            pass
        wait_for(works + [dist.irecv(torch.zeros(4), other) for _ in range(count) if back or rank])

    expected = 1 + count * 16 / 8
    assert makespan(program, 8, OVERLAPPING[kind]) == expected
    assert makespan(lambda rank: program(rank, back=True), 8, OVERLAPPING[kind]) == expected


@pytest.mark.parametrize("rules", ["gloo", "nccl"])
@pytest.mark.parametrize("n", [3, 8])
def test_direct_beats_the_ring_only_where_latencies_overlap(n, rules):
    def steps(algorithm, overlaps):
        network = Network(latency=1.0, bandwidth=math.inf, latency_overlaps=overlaps)
        return p101.launch(
            lambda: p101.all_gather(torch.ones(2), algorithm=algorithm),
            world_size=n,
            backend="sim",
            rules=rules,
            network=network,
        ).trace.makespan

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
    two_level = [
        makespan(lambda r: two_level_all_reduce(r, numel, k), n, network)
        for network in (slow_between, equal)
    ]
    flat = [
        makespan(lambda r: flat_all_reduce(r, numel), n, network)
        for network in (slow_between, equal)
    ]
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
    # two messages from node 0 to nodes 1 and 2, and at the same time one inside each node
    def program(rank):
        pairs = [(0, 2), (1, 4), (2, 3), (5, 4)]
        works = [dist.isend(torch.zeros(1), dst) for src, dst in pairs if src == rank]
        wait_for(works + [dist.irecv(torch.zeros(1), src) for src, dst in pairs if dst == rank])

    network = Network.two_level(
        2, latency=2.0, bandwidth=math.inf, inside_latency=1.0, inside_bandwidth=math.inf
    )
    times = {
        (e.rank, e.peer): (e.start, e.end)
        for e in trace(run(program, 6, network)).events
        if e.kind == "send"
    }
    assert times == {(0, 2): (0, 2), (1, 4): (2, 4), (2, 3): (0, 1), (5, 4): (0, 1)}
