"""rules="nccl": what runs on NCCL runs here, and what would hang there is named.

The rules are listed in sim/queues.py. (5 and 6: tests/ranks/faults.py.)
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.sim.network import Network
from parallel101.laboratory.sim.simulate import simulate
from tests.ranks.faults import exchange

from .programs import run, trace, wait_for

PROGRAMS = []


def ends(*results, network=None):
    """Put a program into the table, with what its ranks return."""

    def put(program):
        PROGRAMS.append(pytest.param(program, list(results), network, id=program.__name__))
        return program

    return put


def isend(value, peer, **kwargs):
    return dist.isend(torch.tensor([float(value)]), peer, **kwargs)


def irecv(peer, **kwargs):
    x = torch.zeros(1)
    return x, dist.irecv(x, peer, **kwargs)


def in_a_batch(*messages):
    """messages: (dist.isend, tensor, peer) or (dist.irecv, tensor, peer), maybe with a tag."""
    return dist.batch_isend_irecv(
        [dist.P2POp(op, x, peer, tag=tag[0] if tag else 0) for op, x, peer, *tag in messages]
    )


# ---- 1. one queue per communicator: an operation starts when those before it have ended ----


@ends(2.0, 1.0)
def one_of_two_receives_first(rank):
    x, works = torch.zeros(1), []
    for op in (dist.isend, dist.irecv) if rank == 0 else (dist.irecv, dist.isend):
        works.append(op(torch.tensor([rank + 1.0]) if op is dist.isend else x, 1 - rank))
    wait_for(works)
    return x.item()


def test_an_operation_occupies_the_queue_and_not_the_rank():
    def program(rank):
        if rank == 0:
            first, second = isend(1, 1), isend(2, 1)
            p101.compute(5.0)
            third = isend(3, 2)
            third.wait()
            wait_for([first, second])
        elif rank == 1:
            p101.compute(50.0)
            wait_for([irecv(0)[1], irecv(0)[1]])
        else:
            irecv(0)[1].wait()

    result = run(program, 3, Network(latency=1.0, bandwidth=float("inf")), rules="nccl")
    sends = {(e.peer, e.start) for e in trace(result).events if e.kind == "send"}
    # those to rank 1 one after the other; that to rank 2 in a queue of its own
    assert sends == {(1, 50.0), (1, 51.0), (2, 5.0)}


@ends(3, [0.0, 1.0, 2.0])
def a_rank_that_returns_leaves_its_queue_running(rank):
    if rank == 0:
        works = [isend(value, 1) for value in range(3)]
        return len(works)
    return [x.item() for x, work in [irecv(0) for _ in range(3)] if work.wait()]


# ---- 2. which queue: the group's, or that of the two ranks ----


@ends(0.0, 7.0)
def messages_outside_a_batch_do_not_share_the_groups_queue(rank):
    """Rank 0 sends before an all-reduce, rank 1 receives after it."""
    x = torch.zeros(1)
    if rank == 0:
        sent = isend(7, 1)
        dist.all_reduce(torch.ones(1))
        sent.wait()
    else:
        dist.all_reduce(torch.ones(1))
        dist.recv(x, 0)
    return x.item()


@ends(6.0, 5.0)
def each_group_has_queues_of_its_own(rank):
    other = dist.new_group([0, 1])
    sent = isend(rank, 1 - rank)  # would block the second message, if they shared a queue
    x = torch.zeros(1)
    work = isend(5, 1, group=other) if rank == 0 else dist.irecv(x, 0, group=other)
    work.wait()
    y = torch.zeros(1)
    if rank == 0:
        y, received = irecv(1, group=other)
    else:
        received = isend(6, 0, group=other)
    received.wait()
    del sent
    return x.item() + y.item()


# ---- 3. a batch starts together, and ends together ----


@ends(4.0, 0.0, 1.0, 2.0, 3.0)
def a_batch_starts_together_whatever_its_order(rank):
    x, n = torch.zeros(1), dist.get_world_size()
    out = (dist.isend, torch.tensor([float(rank)]), (rank + 1) % n)
    back = (dist.irecv, x, (rank - 1) % n)
    wait_for(in_a_batch(*((out, back) if rank % 2 else (back, out))))
    return x.item()


@ends((1.0, 2.0), None, None)
def a_wait_for_one_message_of_a_batch_waits_for_all(rank):
    x, y = torch.zeros(1), torch.zeros(1)
    if rank == 0:
        in_a_batch((dist.irecv, x, 1), (dist.irecv, y, 2))[0].wait()
        return x.item(), y.item()
    p101.compute(10.0 * rank)
    wait_for(in_a_batch((dist.isend, torch.tensor([float(rank)]), 0)))
    return None


@ends((2.0, 6.0), (1.0, 6.0))
def torchs_coalescing_manager_makes_a_batch(rank):
    with dist.distributed_c10d._coalescing_manager(
        None, torch.device("cpu"), async_ops=True
    ) as manager:
        sent = isend(rank + 1, 1 - rank)
        x, received = irecv(1 - rank)
        everybodys = torch.tensor([rank + 5.0])
        dist.broadcast(everybodys, 1)  # its wait does nothing in here
    assert sent is received and len(manager.works) == 1
    manager.wait()
    return x.item(), everybodys.item()


@ends(0.0, 4.0)
def a_batch_that_broke_off_does_not_swallow_the_next_messages(rank):
    with pytest.raises(ValueError):
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(1), 1 - rank),
                dist.P2POp(dist.isend, torch.ones(1), 7),
            ]
        )
    x = torch.zeros(1)
    if rank == 0:
        isend(4, 1).wait()
    else:
        dist.recv(x, 0)
    return x.item()


# ---- 4. no tags ----


@ends(None, (2.0, 1.0))
def tags_do_not_exist(rank):
    """On gloo the tags decide which message is which. On NCCL the order does."""
    if rank == 0:
        sent = [isend(value, 1, tag=value) for value in (1, 2)]
        wait_for(sent)
        return None
    second, first = irecv(0, tag=2), irecv(0, tag=1)
    wait_for([second[1], first[1]])
    return first[0].item(), second[0].item()


# ---- 7. a send ends when it is received, unless it is eager ----


@ends(None, [1.0, 2.0], network=Network(latency=1.0, eager=4))
def an_eager_message_is_received_when_the_receives_turn_comes(rank):
    if rank == 0:
        isend(1, 1).wait()  # has arrived long before rank 1 asks for it
        p101.compute(10.0)
        isend(2, 1).wait()
        return None
    p101.compute(5.0)
    pairs = [irecv(0), irecv(0)]
    return [x.item() for x, work in pairs if work.wait()]


@pytest.mark.parametrize(("program", "results", "network"), PROGRAMS)
def test_it_runs(program, results, network):
    assert run(program, len(results), network, rules="nccl").results == results


def test_on_gloo_tags_decide_which_message_is_which():
    assert run(tags_do_not_exist, 2).results[1] == (1.0, 2.0)


def test_the_events_behind_a_deadlock_are_kept():
    result = simulate(exchange, 2, rules="nccl")
    assert sorted((row[0], row[1], row[2]) for row in result.unfinished) == [
        (r, kind, 1 - r) for r in (0, 1) for kind in ("recv", "send")
    ]


# ---- launch ----


def names():
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return (
        dist.get_backend(),
        [dist.get_backend(mesh.get_group(axis)) for axis in ("a", "b")],
        dist.get_backend_config(),
    )


def test_launch_takes_the_rules():
    ran = p101.launch(names, world_size=4, backend="sim", rules="nccl")
    assert ran.results == [("sim_nccl", ["sim_nccl", "sim_nccl"], "cpu:sim_nccl")] * 4
    assert ran.backend == ran.trace.backend == "sim"
    assert p101.launch(names, world_size=4, backend="sim", rules="gloo").results[0][0] == "sim"
    assert (
        p101.watch(p101.all_reduce, world_size=2, backend="sim", rules="nccl").results[0].numel()
        == 4
    )
    with pytest.raises(DeadlockError):
        p101.launch(lambda: exchange(dist.get_rank()), world_size=2, backend="sim", rules="nccl")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "gloo", "rules": "nccl"}, "rules works with backend='sim' only"),
        ({"backend": "nccl", "rules": "nccl"}, "rules works with backend='sim' only"),
        ({"backend": "sim", "rules": "mpi"}, "it must be one of 'gloo', 'nccl'"),
        ({"backend": "sim", "rules": None}, "it must be one of 'gloo', 'nccl'"),
    ],
    ids=["gloo", "nccl", "mpi", "none"],
)
def test_other_rules(options, words):
    with pytest.raises(ValueError, match=words):
        p101.launch(names, **options)
