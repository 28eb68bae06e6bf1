"""`unrecorded()` leaves nothing in a run: the same events at the same times as without it.

What happens inside is right all the same.
"""

from __future__ import annotations

import math
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives
from parallel101.laboratory.sim.network import Network
from parallel101.spans import compute, recorder, span, unrecorded

from .programs import run, trace

NETWORKS = {
    "default": Network(),
    "steps": Network(latency=1.0, bandwidth=math.inf),
    "bytes": Network(latency=0.0, bandwidth=1e6),
    "ring": Network.ring(),
    "two levels": Network.two_level(2, bandwidth=1e8),
}


def together(group):
    rank = torch.tensor([float(dist.get_rank())])
    return collectives.all_gather(rank, group=group).tolist()


def inside(group=None):
    """What a rank does in the block: messages, both sorts of collectives, spans, compute() and
    a backward.
    """
    ranks = list(range(dist.get_world_size())) if group is None else group
    n, rank = len(ranks), dist.get_rank()
    place = ranks.index(rank)
    with unrecorded():
        assert together(group) == ranks
        with span("inside"):
            compute(3.0 * rank)
            x = torch.tensor([float(rank)], requires_grad=True)
            p101.all_reduce(x * x, group=group).sum().backward()
            assert x.grad is not None and x.grad.item() == 2 * rank * n
            received = torch.empty(2)
            to, source = ranks[(place + 1) % n], ranks[(place - 1) % n]
            both = [
                dist.P2POp(dist.isend, torch.full((2,), float(rank)), to),
                dist.P2POp(dist.irecv, received, source),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            assert received.tolist() == [source, source]
            if group is None:
                dist.all_reduce(total := torch.ones(1000))
                assert total[0] == n
        assert together(group) == ranks


OPERATIONS = {
    "broadcast": lambda x, root: collectives.broadcast(x, root),
    "reduce": lambda x, root: collectives.reduce(x, root),
    "all_reduce": lambda x, root: collectives.all_reduce(x),
    "all_gather": lambda x, root: collectives.all_gather(x),
    "torch": lambda x, root: dist.all_reduce(x),
}


def program(seed, *, block):
    """A few collectives, at which the ranks arrive at different times.

    The block is before one of them, or at the end.
    """

    def rank_main(rank):
        same, own = random.Random(seed), random.Random(1000 * seed + rank)
        place, results = same.randrange(6), []
        for step in range(6):
            if block and step == place:
                inside()
            compute(own.random() * same.choice([0.0, 1e-5, 1.0]))
            x, root = (
                torch.full((same.choice([1, 7, 1000, 10**5]),), rank + 1.0),
                same.randrange(dist.get_world_size()),
            )
            name = same.choice([*OPERATIONS])
            with span(name, step=step):
                result = OPERATIONS[name](x, root)
            results.append(None if result is None else result.sum().item())
        return results

    return rank_main


@pytest.mark.parametrize("rules", ["gloo", "nccl"])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_run_is_the_same_with_and_without(n, network, rules):
    for seed in range(3):
        with_it, without = (
            run(program(seed, block=block), n, network, rules=rules, payload_bytes=64)
            for block in (True, False)
        )
        assert with_it.results == without.results
        assert trace(with_it).events == trace(without).events
        assert trace(with_it).makespan == trace(without).makespan and not with_it.unwaited


@pytest.mark.parametrize("rules", ["gloo", "nccl"])
def test_a_rank_that_comes_late_does_not_keep_the_others(rules):
    """Rank 1 waits for rank 2 before the block.

    Rank 0 has been in the block for 5 seconds, and goes on at 0.
    """

    def rank_main(rank):
        if rank == 2:
            compute(5.0)
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            dist.recv(torch.ones(1), 2)
        inside()
        now = recorder().now()
        if rank == 0:
            compute(1.0)
        dist.barrier()
        return now, recorder().now()

    results = run(rank_main, 3, Network(latency=1.0, bandwidth=math.inf), rules=rules).results
    assert results == [(0.0, 10.0), (6.0, 10.0), (6.0, 10.0)]  # the barrier takes 2 (p − 1) steps


@pytest.mark.parametrize("rules", ["gloo", "nccl"])
def test_ranks_that_enter_at_the_same_time_stay_in_order(rules):
    """new_group takes no time, so ranks that wait for others there run later at the same time,
    and get links later.
    """

    def program(block):
        def rank_main(rank):
            for pair in ([0, 1], [1, 2], [2, 3], [0, 3]):
                dist.new_group(pair)
            if block:
                inside()
            for _ in range(3):
                collectives.all_gather(torch.ones(4))

        return rank_main

    with_it, without = (run(program(block), 4, rules=rules) for block in (True, False))
    assert trace(with_it).events == trace(without).events


def test_two_groups_enter_at_different_times():
    """Each half has a block of its own, and meets it where the other half communicates."""

    def program(block):
        def rank_main(rank):
            half = [0, 1] if rank < 2 else [2, 3]
            for step in range(6):
                if block and step == half[0] + 1:
                    inside(half)
                compute(0.1 * (rank + step))
                collectives.all_reduce(torch.ones(1000), group=half)
            return recorder().now()

        return rank_main

    with_it, without = (run(program(block), 4) for block in (True, False))
    assert trace(with_it).events == trace(without).events and with_it.results == without.results


def test_a_group_of_its_own_and_its_time_limit():
    """The limit is in the run's time, which the block does not take."""

    def rank_main(rank):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        with unrecorded():
            compute(10.0 * rank)
            dist.all_reduce(x := torch.ones(1), group=group)
        if rank == 0:
            with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
                dist.recv(torch.ones(1), 1, group=group)
        return x.item(), recorder().now()

    assert run(rank_main, 2, keep_waiting=True).results == [(2.0, 2.0), (2.0, 0.0)]


def test_blocks_may_be_nested_and_come_again():
    def rank_main(rank):
        for _ in range(2):
            with unrecorded():
                inside()
                dist.barrier()
        return recorder().now()

    result = run(rank_main, 2)
    assert result.results == [0.0, 0.0] and result.events == []


def test_the_record_of_real_ranks_is_the_same_with_and_without():
    """No events, and the same numbers in those that follow."""

    def program(block):
        for _ in range(2):
            if block:
                inside()
            with span("outside"):
                sent = dist.isend(torch.ones(3), other := 1 - dist.get_rank())
                dist.recv(torch.empty(3), other)
                sent.wait()
                collectives.all_reduce(torch.ones(5))
                dist.all_reduce(torch.ones(2))

    events = []
    for block in (True, False):
        recorded = p101.launch(program, block, world_size=2, trace=True).trace
        events.append([e._replace(start=0, end=0, posted=0) for e in recorded.events])
        assert not recorded.unfinished
    with_it, without = (sorted(of, key=str) for of in events)
    assert with_it == without and len(with_it) > 20


def test_outside_a_run_it_does_nothing():
    with unrecorded(), span("nothing"):
        compute(1.0)


# ---- errors inside ----


def test_an_exception_inside_that_the_program_catches():
    def fails():
        with unrecorded():
            dist.barrier()
            raise ZeroDivisionError

    def rank_main(rank):
        if rank == 1:
            dist.recv(torch.ones(1), 2)
        elif rank == 2:
            dist.send(torch.ones(1), 1)
        with pytest.raises(ZeroDivisionError):
            fails()
        now = recorder().now()
        dist.all_reduce(x := torch.ones(1))
        return now, x.item()

    result = run(rank_main, 3, NETWORKS["steps"])
    assert result.results == [(0.0, 3.0), (1.0, 3.0), (1.0, 3.0)]
    assert [event.kind for event in trace(result).events] == ["recv", "send", *["all_reduce"] * 3]
