"""A deadlock on the sim raises DeadlockError at once: which rank waits for what, at which line,
and the cycle.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.record.errors import DeadlockError, MisuseError
from parallel101.laboratory.sim.simulate import simulate
from tests.ranks.failing import line_of

from .programs import trace, wait_for


def deadlock(program, n, network=None) -> DeadlockError:
    result = simulate(program, n, network)
    assert isinstance(result.error, DeadlockError) and result.failed_rank is None, result
    return result.error


@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_receive_first(n):
    def program(rank):
        dist.recv(torch.empty(1), (rank + 1) % n)
        dist.send(torch.ones(1), (rank - 1) % n)

    error = deadlock(program, n)
    assert error.waiting == {
        r: ("recv", (r + 1) % n, line_of(program, "dist.recv")) for r in range(n)
    }
    assert error.cycle == list(range(n))


def test_both_send_first():
    def program(rank):
        dist.send(torch.ones(1), 1 - rank)
        dist.recv(torch.empty(1), 1 - rank)

    error = deadlock(program, 2)
    assert error.waiting == {
        r: ("send", 1 - r, line_of(program, "dist.send")) for r in range(2)
    } and error.cycle == [0, 1]


def test_a_skipped_collective():
    def program(rank):
        if rank != 1:
            dist.all_reduce(torch.ones(1))
        dist.barrier()

    error = simulate(program, 3).error
    assert (
        isinstance(error, MisuseError)
        and error.rank == 1
        and "barrier" in str(error)
        and "all_reduce" in str(error)
    )


def test_a_rank_that_waits_in_another_call_than_the_collective():
    def program(rank):
        if rank == 1:
            dist.recv(torch.empty(1), 0)
        dist.all_reduce(torch.ones(1))

    error = deadlock(program, 3)
    there = line_of(program, "dist.all_reduce")
    assert error.waiting == {
        0: ("all_reduce", 1, there),
        1: ("recv", 0, line_of(program, "dist.recv")),
        2: ("all_reduce", 1, there),
    }
    assert error.cycle == [0, 1]


def test_a_rank_that_has_returned():
    def program(rank):
        if rank == 0:
            dist.recv(torch.empty(1), 1)

    error = deadlock(program, 2)
    assert (
        error.waiting == {0: ("recv", 1, line_of(program, "dist.recv"))}
        and error.returned == [1]
        and not error.cycle
    )


def test_a_receive_from_anyone_that_nobody_sends_to():
    def program(rank):
        if rank == 0:
            dist.recv(torch.empty(1))

    assert deadlock(program, 3).waiting == {0: ("recv", None, line_of(program, "dist.recv"))}


def test_a_wrong_tag():
    def program(rank):
        if rank == 0:
            dist.send(torch.ones(1), 1, tag=3)
        else:
            dist.recv(torch.empty(1), 0, tag=4)

    assert set(deadlock(program, 2).waiting) == {0, 1}


def test_polling_for_ever_is_a_deadlock_too():
    def program(rank):
        work = dist.irecv(torch.empty(1), 1 - rank)
        while not work.is_completed():
            pass

    assert deadlock(program, 2).cycle == [0, 1]


def test_events_before_a_deadlock_are_kept():
    def program(rank):
        x = torch.ones(1)
        wait_for([dist.isend(x, 1 - rank), dist.irecv(torch.empty(1), 1 - rank)])
        dist.recv(x, 1 - rank)

    result = simulate(program, 2)
    assert isinstance(result.error, DeadlockError) and len(trace(result).events) == 4


def test_a_deadlock_inside_backward():
    def program(rank):
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        loss = net(torch.ones(1, 2)).sum()
        if rank == 1:
            dist.recv(torch.empty(1), 0)
        loss.backward()

    error = deadlock(program, 2)
    assert (
        error.waiting[0][:2] == ("all_reduce", 1)
        and error.waiting[1][:2] == ("recv", 0)
        and error.cycle == [0, 1]
    )
