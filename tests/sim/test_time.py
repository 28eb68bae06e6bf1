"""How long a message and a computation take on the sim.

(Messages that need the same links: test_contention.py.)
"""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.sim.network import Network
from parallel101.spans import compute, recorder, span

from . import programs
from .programs import run, trace, wait_for

STEPS = Network(latency=1.0, bandwidth=math.inf)
BYTES = Network(latency=0.0, bandwidth=1.0)


NETWORKS = {
    "steps": STEPS,
    "ring": Network.ring(),
    "one-way ring": Network.ring(bidirectional=False),
    "two levels": Network.two_level(3),
    "rails": Network.two_level(3, rails=3),
    "line": Network.ring(wraparound=False),
    "eager": Network(eager=1e9),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_data_arrives_on_any_network(n, network):
    assert run(programs.ring_all_gather, n, network).results == [[r + 1 for r in range(n)]] * n
    run(programs.direct_all_to_all, n, network)


def test_the_receivers_tensor_changes_only_when_the_message_ends():
    def program(rank):
        x = torch.full((2,), float(rank))
        if rank == 0:
            dist.send(x, 1)
        else:
            work = dist.irecv(x, 0)
            compute(0.5)
            before = x.tolist()
            work.wait()
            return before, x.tolist(), recorder().now()

    assert run(program, 2, STEPS).results[1] == ([1.0, 1.0], [0.0, 0.0], 1.0)


def test_messages_start_first_come_first_served():
    """Compared with a plain form of the rule: whenever a message ends, go through all that have
    not started, in order.
    """
    for seed in range(25):
        rng = random.Random(seed)
        n = rng.choice([2, 3, 4, 6])
        peers = {
            r: rng.sample([p for p in range(n) if p != r], rng.randint(0, n - 1)) for r in range(n)
        }
        sends = [(r, d, rng.choice([1, 2, 3])) for r in range(n) for d in peers[r]]

        def program(rank, sends=sends):
            box = {size: torch.zeros(size, dtype=torch.int8) for size in (1, 2, 3)}
            works = [dist.isend(box[size], dst) for src, dst, size in sends if src == rank]
            wait_for(works + [dist.irecv(box[size], s) for s, dst, size in sends if dst == rank])

        messages = trace(run(program, n, BYTES)).messages()
        seen = sorted((m.src, m.dst, m.start, m.end) for m in messages)
        order = {}
        for src, dst, _ in sends:
            order[src, dst] = sum(1 for s, d in order if s == src)
        left = sorted(sends, key=lambda m: (order[m[0], m[1]], m[0]))
        flying, expected, now = [], [], 0.0
        while left or flying:
            for message in list(left):
                src, dst, size = message
                if all(src != s and dst != d for s, d, _ in flying):
                    left.remove(message)
                    flying.append((src, dst, now + size))
                    expected.append((src, dst, now, now + size))
            now = min(end for _, _, end in flying)
            flying = [m for m in flying if m[2] > now]
        assert seen == sorted(expected)


def test_compute_moves_only_the_ranks_own_clock():
    def program(rank):
        with span("work", size=rank):
            compute(2.0 * rank)
        if rank == 0:
            dist.recv(torch.empty(1), 1)
        elif rank == 1:
            dist.send(torch.ones(1), 0)
        return recorder().now()

    result = run(program, 3, STEPS)
    assert result.results == [3.0, 3.0, 4.0]
    send, recv = (
        next(e for e in trace(result).events if e.kind == kind) for kind in ("send", "recv")
    )
    assert (recv.posted, send.posted, send.start, send.end, recv.end) == (0, 2, 2, 3, 3)
    spans = [(e.rank, e.start, e.end, e.args) for e in trace(result).spans("work")]
    assert sorted(spans) == [(r, 0.0, 2.0 * r, {"size": r}) for r in range(3)]


@pytest.mark.parametrize("receive_at", [0.0, 0.5, 3.0])
def test_an_eager_message_does_not_wait_for_its_receive(receive_at):
    def program(rank):
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            compute(receive_at)
            x = torch.zeros(2)
            dist.recv(x, 0)
            assert x.tolist() == [1.0, 1.0]
        return recorder().now()

    for eager, ends in ((8, [1.0, max(1.0, receive_at)]), (7, [receive_at + 1.0] * 2)):
        network = Network(latency=1.0, bandwidth=math.inf, eager=eager)
        assert run(program, 2, network).results == ends


def test_a_message_to_oneself_takes_no_time():
    def program(rank):
        x = torch.zeros(3)
        wait_for([dist.isend(torch.ones(3), rank), dist.irecv(x, rank)])
        return x.tolist(), recorder().now()

    assert run(program, 2, STEPS).results == [([1.0] * 3, 0.0)] * 2


def test_polling_a_work_lets_time_pass():
    def program(rank):
        x, asked = torch.zeros(1), 0
        if rank == 0:
            compute(5.0)
            dist.send(torch.ones(1), 1)
            return recorder().now()
        work = dist.irecv(x, 0)
        while not work.is_completed():
            asked += 1
        return x.item(), recorder().now(), asked < 20

    assert run(program, 2, STEPS).results == [6.0, (1.0, 6.0, True)]


def test_polling_between_computations_takes_no_time():
    def program(rank):
        if rank == 0:
            dist.send(torch.ones(1), 1)
            return None
        work, turns = dist.irecv(torch.zeros(1), 0), 0
        while not work.is_completed():
            compute(0.25)
            turns += 1
        return turns, recorder().now()

    assert run(program, 2, STEPS).results[1] == (4, 1.0)


@pytest.mark.parametrize(
    "network",
    [Network(), Network.torus((3, 4)), Network.two_level(4), Network(eager=4)],
    ids=["switch", "torus", "two levels", "eager"],
)
def test_a_run_is_the_same_every_time(network):
    def program(rank):
        gen = torch.Generator().manual_seed(rank)
        n = dist.get_world_size()
        works = []
        for dst in torch.randperm(n, generator=gen).tolist():
            works.append(dist.isend(torch.rand(8), dst))
        for src in torch.randperm(n, generator=gen).tolist():
            works.append(dist.irecv(torch.empty(8), src))
        wait_for(works)
        compute(torch.rand(()).item())
        x = torch.rand(5) / (rank + 3)
        dist.all_reduce(x)
        return x.tolist(), torch.rand(3).tolist()

    first, second = (run(program, 12, network, payload_bytes=64) for _ in range(2))
    assert first.events == second.events and first.results == second.results
