"""A deadlock error says which rank waits, for whom, where, and why."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.ranks.failing import fails, line_of

X = torch.ones(1)


@pytest.fixture(autouse=True, scope="module")
def _warm():
    p101.launch(lambda: None, world_size=1)  # the first launch starts the fork server


def compute(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(100).sum()


def receive_cycle(rank):
    dist.recv(X, (rank + 1) % dist.get_world_size())


def send_first(rank):
    if rank < 2:
        dist.send(X, 1 - rank)
        dist.recv(X, 1 - rank)


def wait_of_irecv(rank):
    work = dist.irecv(X, 1 - rank)
    work.wait()


def skips_a_collective(rank):
    if rank != 2:
        dist.all_reduce(X)
    dist.recv(X, 3) if rank == 2 else dist.barrier()


def one_has_returned(rank):
    if rank == 0:
        dist.recv(X, 1)


def from_anyone(rank):
    if rank == 0:
        dist.recv(X)


def group_that_one_never_makes(rank):
    if rank == 0:
        dist.recv(X, 1)
    dist.new_group([0, 1])


def groups_of_different_members(rank):
    dist.new_group([0] if rank else [0, 1])


def local_groups_of_different_members(rank):
    dist.new_group([0] if rank else [0, 1], use_local_synchronization=True)


def different_tags(rank):
    dist.recv(X, 0, tag=2) if rank else dist.send(X, 1, tag=1)


TAGS = "rank 0 sends to rank 1 with tag 1, and rank 1 receives with tag 2"
CASES = {  # program → ranks, some that wait (with the text of their line), the cycle, words
    receive_cycle: (4, {r: ("recv", (r + 1) % 4, "dist.recv") for r in range(4)}, [0, 1, 2, 3], ""),
    send_first: (4, {0: ("send", 1, "dist.send"), 1: ("send", 0, "dist.send")}, [0, 1], ""),
    wait_of_irecv: (2, {0: ("recv", 1, "work.wait")}, [0, 1], ""),
    skips_a_collective: (
        4,
        {0: ("all_reduce", 2, "dist.all_reduce"), 2: ("recv", 3, "dist.recv")},
        [2, 3],
        "",
    ),
    one_has_returned: (4, {0: ("recv", 1, "dist.recv")}, [], "rank 1 has already returned"),
    from_anyone: (4, {0: ("recv", None, "dist.recv")}, [], ""),
    group_that_one_never_makes: (
        2,
        {0: ("recv", 1, "dist.recv"), 1: ("new_group", 0, "dist.new_group")},
        [0, 1],
        "",
    ),
    groups_of_different_members: (2, {0: ("new_group", 1, "dist.new_group")}, [], ""),
    local_groups_of_different_members: (2, {0: ("new_group", 1, "dist.new_group")}, [], ""),
    different_tags: (2, {0: ("send", 1, "dist.send"), 1: ("recv", 0, "dist.recv")}, [0, 1], TAGS),
}


@pytest.mark.parametrize("world", ["gloo", "sim"])
@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_a_deadlock_says_who_waits_for_whom_and_where(program, world):
    size, waiting, cycle, words = CASES[program]
    error = fails(
        p101.DeadlockError, lambda: program(dist.get_rank()), world_size=size, backend=world
    )
    for rank, (kind, peer, text) in waiting.items():
        assert error.waiting[rank] == (kind, peer, line_of(program, text))
        assert error.waiting[rank][2] in str(error)
    assert error.cycle == cycle and words in str(error)
    if program is groups_of_different_members and world == "gloo":
        assert "new_group([0, 1]) on rank 0, new_group([0]) on rank 1" in str(error)
    if program is one_has_returned:
        assert error.returned == [1] and sorted(error.waiting) == [0]


def test_a_deadlock_among_some_is_reported_while_others_compute():
    def program():
        if dist.get_rank() < 2:
            dist.recv(X, 1 - dist.get_rank())
        else:
            compute(1e9)

    assert sorted(fails(p101.DeadlockError, program).waiting) == [0, 1]


@pytest.mark.parametrize("kept_until_the_return", [False, True])
def test_a_send_whose_work_is_dropped(kept_until_the_return):
    def program():
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(4), 1)
            if kept_until_the_return:
                return work is None
            del work
        else:
            compute(0.2)
            dist.recv(torch.zeros(4), 0)

    error = fails(p101.DeadlockError, program, world_size=2)
    assert error.waiting == {1: ("recv", 0, line_of(program, "dist.recv"))}
    (told,) = error.dropped
    assert told.startswith(
        "rank 0 posted a send to rank 1 and dropped its work object without a wait(), at "
        f"{line_of(program, 'dist.isend')}: "
    )
    assert "Keep what isend" in str(error)


@pytest.mark.parametrize("order", [("all_reduce", "broadcast"), ("barrier", "all_reduce")])
def test_ranks_that_call_collectives_in_different_orders(order, backend):
    calls = {
        "all_reduce": lambda: dist.all_reduce(X),
        "broadcast": lambda: dist.broadcast(X, 0),
        "barrier": dist.barrier,
    }

    def program():
        for name in order if dist.get_rank() != 1 else order[::-1]:
            calls[name]()

    error = fails(p101.DeadlockError, program, world_size=3, backend=backend)
    # on real ranks with the bytes
    assert re.search(f"{order[0]}.* on ranks 0 and 2, {order[1]}.* on rank 1", str(error))
    fails(p101.MisuseError, program, world_size=3, backend=backend, trace=True)


def test_sizes_with_which_gloo_waits_for_ever():
    """Some have returned, and the others wait for bytes that nobody sends."""

    def program():
        dist.all_reduce(torch.ones(2 + dist.get_rank()))

    error = fails(p101.DeadlockError, program, world_size=3)
    assert error.waiting[1][0] == "all_reduce" and error.returned == [0]
    assert "different collectives: all_reduce of 8 bytes on rank 0, all_reduce of 12" in str(error)
    assert "different shapes" in str(fails(p101.MisuseError, program, world_size=3, trace=True))


@pytest.mark.parametrize("batch", [False, True])
def test_a_message_that_is_posted_and_never_received_is_noted(batch):
    def program():
        if dist.get_rank() == 0:
            if batch:
                (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, X, 1, tag=3)])
            else:
                work = dist.isend(X, 1, tag=3)
            dist.recv(X, 1)
            work.wait()
        else:
            dist.recv(X, 0)

    error = fails(p101.DeadlockError, program, world_size=2)
    where = line_of(program, "dist.batch_isend_irecv" if batch else "= dist.isend")
    note = "rank 0 posted a send to rank 1 with tag 3, and rank 1 posted no matching receive"
    assert error.notes == [(note, where)] and f"receive, at {where}: " in str(error)
    assert "nobody sends" not in str(error)


def test_slow_ranks_are_no_deadlock():
    """Also in a group that two of three make, while the third does something else."""

    def program():
        rank, x = dist.get_rank(), torch.zeros(1)
        if rank != 2:
            compute(0.6 * rank)  # longer than it takes to report a deadlock
            assert dist.get_world_size(dist.new_group([0, 1])) == 2
        if rank == 0:
            compute(0.8)
            dist.send(x + 1, 1)
        elif rank == 1:
            dist.recv(x, 0)
        if rank != 2:
            return True

    assert p101.launch(program, world_size=3).results == [True, True, None]
