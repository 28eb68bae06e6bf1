"""A deadlock error says which rank waits, for whom, where, and why."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.ranks.failing import fails, line_of


@pytest.fixture(autouse=True, scope="module")
def _warm():
    p101.launch(lambda: None, world_size=1)  # the first launch starts the fork server


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_receive_cycle(world):
    def program():
        neighbour = (dist.get_rank() + 1) % dist.get_world_size()
        dist.recv(torch.empty(1), neighbour)

    error = fails(p101.DeadlockError, program, backend=world)
    here = line_of(program, "dist.recv")
    assert error.waiting == {rank: ("recv", (rank + 1) % 4, here) for rank in range(4)}
    assert error.cycle == [0, 1, 2, 3]
    assert here in str(error)


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_two_ranks_that_send_first(world):
    def program():
        x = torch.ones(1)
        if dist.get_rank() < 2:
            dist.send(x, 1 - dist.get_rank())
            dist.recv(x, 1 - dist.get_rank())

    error = fails(p101.DeadlockError, program, backend=world)
    here = line_of(program, "dist.send")
    assert error.waiting == {0: ("send", 1, here), 1: ("send", 0, here)}
    assert error.cycle == [0, 1]


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_the_line_of_a_wait_is_named(world):
    def program():
        work = dist.irecv(torch.empty(1), 1 - dist.get_rank())
        work.wait()

    error = fails(p101.DeadlockError, program, world_size=2, backend=world)
    assert error.waiting[0] == ("recv", 1, line_of(program, "work.wait"))


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_one_rank_skips_a_collective(world):
    def program():
        x = torch.ones(1)
        if dist.get_rank() != 2:
            dist.all_reduce(x)
        dist.recv(x, 3) if dist.get_rank() == 2 else dist.barrier()

    error = fails(p101.DeadlockError, program, backend=world)
    assert error.waiting[0] == ("all_reduce", 2, line_of(program, "dist.all_reduce"))
    assert error.waiting[2][:2] == ("recv", 3)
    assert error.cycle == [2, 3]


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_rank_that_returned_while_another_waits_for_it(world):
    def program():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(1), 1)

    error = fails(p101.DeadlockError, program, backend=world)
    assert error.waiting == {0: ("recv", 1, line_of(program, "dist.recv"))}
    assert error.cycle == []
    assert error.returned == [1]
    assert "rank 1 has already returned" in str(error)


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_receive_from_anyone_when_nobody_sends(world):
    def program():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(1))

    error = fails(p101.DeadlockError, program, backend=world)
    assert error.waiting[0][:2] == ("recv", None)


def test_a_deadlock_among_some_is_reported_while_others_compute():
    def program():
        if dist.get_rank() < 2:
            dist.recv(torch.empty(1), 1 - dist.get_rank())
        else:
            while True:  # compute for ever
                torch.ones(100).sum()

    error = fails(p101.DeadlockError, program)
    assert sorted(error.waiting) == [0, 1]


def test_a_send_whose_work_is_dropped_as_the_function_returns():
    def program():
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(4), 1)
            return work is None
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        return dist.recv(torch.zeros(4), 0)

    error = fails(p101.DeadlockError, program, world_size=2)
    assert line_of(program, "dist.isend") in error.dropped[0]


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_group_that_one_rank_never_makes(world):
    def program():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(1), 1)
        dist.new_group([0, 1])

    error = fails(p101.DeadlockError, program, world_size=2, backend=world)
    assert error.waiting[0][:2] == ("recv", 1)
    assert error.waiting[1][:2] == ("new_group", 0)


@pytest.mark.parametrize("world", ["gloo", "sim"])
@pytest.mark.parametrize("members_only", [False, True])
def test_ranks_make_a_group_of_different_members(members_only, world):
    def program():
        dist.new_group([0] if dist.get_rank() else [0, 1], use_local_synchronization=members_only)

    error = fails(p101.DeadlockError, program, world_size=2, backend=world)
    assert error.waiting[0][:2] == ("new_group", 1)
    assert (
        members_only
        or world == "sim"
        or "new_group([0, 1]) on rank 0, new_group([0]) on rank 1" in str(error)
    )


def test_making_a_group_waits_for_its_members_only():
    def program():
        rank = dist.get_rank()
        if rank == 2:
            return None
        until = time.monotonic() + 0.6 * rank  # longer than it takes to report a deadlock
        while time.monotonic() < until:
            pass
        return dist.get_world_size(dist.new_group([0, 1]))

    assert p101.launch(program, world_size=3).results == [2, 2, None]


@pytest.mark.parametrize("order", [("all_reduce", "broadcast"), ("barrier", "all_reduce")])
def test_ranks_that_call_collectives_in_different_orders(order, backend):
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
        "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
        "barrier": dist.barrier,
    }

    def program():
        for name in order if dist.get_rank() != 1 else order[::-1]:
            calls[name]()

    error = fails(p101.DeadlockError, program, world_size=3, backend=backend)
    # on real ranks with the bytes
    assert re.search(f"{order[0]}.* on ranks 0 and 2, {order[1]}.* on rank 1", str(error))
    assert isinstance(
        fails(p101.MisuseError, program, world_size=3, backend=backend, trace=True), p101.RankFailed
    )


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_send_and_a_receive_with_different_tags(world):
    def program():
        dist.recv(torch.ones(1), 0, tag=2) if dist.get_rank() else dist.send(
            torch.ones(1), 1, tag=1
        )

    error = fails(p101.DeadlockError, program, world_size=2, backend=world)
    assert "rank 0 sends to rank 1 with tag 1, and rank 1 receives with tag 2" in str(error)


def test_sizes_with_which_gloo_waits_for_ever():
    """Some have returned, and the others wait for bytes that nobody sends."""

    def program():
        dist.all_reduce(torch.ones(2 + dist.get_rank()))

    error = fails(p101.DeadlockError, program, world_size=3)
    assert error.waiting[1][0] == "all_reduce"
    assert error.returned == [0]
    assert "different collectives: all_reduce of 8 bytes on rank 0, all_reduce of 12" in str(error)
    assert "different shapes" in str(fails(p101.MisuseError, program, world_size=3, trace=True))


def test_a_message_that_is_posted_and_never_received_is_noted():
    def program():
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(1), 1, tag=3)
            dist.recv(torch.ones(1), 1)
            work.wait()
        else:
            dist.recv(torch.ones(1), 0)

    error = fails(p101.DeadlockError, program, world_size=2)
    where = line_of(program, "dist.isend")
    assert error.notes == [
        ("rank 0 posted a send to rank 1 with tag 3, and rank 1 posted no matching receive", where)
    ]
    assert f"posted no matching receive, at {where}: " in str(error)
    assert "nobody sends" not in str(error)


def test_a_message_of_a_batch_is_named_by_the_line_of_the_batch():
    def program():
        peer = 1 - dist.get_rank()
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), peer)])
        dist.recv(torch.ones(1), peer, tag=3)
        work.wait()

    error = fails(p101.DeadlockError, program, world_size=2)
    assert {where for _, where in error.notes} == {line_of(program, "dist.batch_isend_irecv")}


def test_a_slow_rank_that_only_computes_is_no_deadlock():
    def program():
        x = torch.zeros(1)
        if dist.get_rank() == 0:
            until = time.monotonic() + 0.8  # several ticks of the watchers
            while time.monotonic() < until:
                x += 1
            dist.send(x, 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)
        dist.all_reduce(x)
        return x.item() > 0

    assert p101.launch(program, world_size=3).results == [True] * 3


def test_a_send_whose_work_is_dropped_at_once():
    def program():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(4), 1)  # its work is not kept
        else:
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                pass
            dist.recv(torch.zeros(4), 0)

    error = fails(p101.DeadlockError, program, world_size=2)
    assert error.waiting == {1: ("recv", 0, line_of(program, "dist.recv"))}
    (told,) = error.dropped
    assert told.startswith(
        "rank 0 posted a send to rank 1 and dropped its work object without a wait(), at "
        f"{line_of(program, 'dist.isend')}: "
    )
    assert "Keep what isend" in str(error)
