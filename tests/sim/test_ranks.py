# ruff: noqa: NPY002  the global generator of NumPy is tested here
"""For torch.distributed, random numbers and autograd, each virtual rank is like a process of
its own.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.record.events import EventGroup

from .programs import ring_all_gather, run, trace, wait_for


def test_the_default_group():
    def program(rank):
        world = dist.group.WORLD
        known = dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.is_initialized()
        return *known, dist.get_process_group_ranks(world), world.size()

    assert run(program, 3).results == [(r, 3, "sim", True, [0, 1, 2], 3) for r in range(3)]
    assert not dist.is_initialized()


def test_a_receive_from_any_rank_takes_the_oldest_message_and_returns_its_source():
    def program(rank):
        if rank == 0:
            x = torch.empty(1)
            return [(dist.recv(x), x.item()) for _ in range(3)]
        dist.send(torch.tensor([10.0 * rank]), 0)
        return None

    assert run(program, 4).results[0] == [(1, 10.0), (2, 20.0), (3, 30.0)]


def test_receives_from_one_rank_and_from_any_rank_match_in_the_order_of_posting():
    def program(rank):
        if rank == 1:
            return wait_for([dist.isend(torch.tensor([float(i)]), 0) for i in range(3)])
        boxes = [torch.empty(1) for _ in range(3)]
        wait_for([dist.irecv(boxes[0], 1), dist.irecv(boxes[1]), dist.irecv(boxes[2], 1)])
        return [box.item() for box in boxes]

    assert run(program, 2).results[0] == [0.0, 1.0, 2.0]


def test_messages_match_by_tag():
    def program(rank):
        if rank == 0:
            wait_for([dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2, 3)])
            return None
        boxes = {tag: torch.empty(1) for tag in (3, 1, 2)}
        wait_for([dist.irecv(box, 0, tag=tag) for tag, box in boxes.items()])
        return {tag: box.item() for tag, box in boxes.items()}

    assert run(program, 2).results[1] == {1: 1.0, 2: 2.0, 3: 3.0}


def test_messages_have_a_sequence_number_and_the_place_of_the_call():
    def program(rank):
        for _ in range(2):
            wait_for([dist.isend(torch.ones(2), 1 - rank), dist.irecv(torch.empty(2), 1 - rank)])
        wait_for(
            [
                dist.isend(torch.ones(1), 1 - rank, tag=5),
                dist.irecv(torch.empty(1), 1 - rank, tag=5),
            ]
        )

    record = trace(run(program, 2, payload_bytes=8))
    sides = sorted(
        (e.rank, e.kind, e.peer, e.tag, e.seq, e.nbytes, e.shape, e.dtype, tuple(e.payload))
        for e in record.events
    )
    two, one = (8, (2,), "float32", (1.0, 1.0)), (4, (1,), "float32", (1.0,))
    assert sides == [
        (r, kind, 1 - r, *row)
        for r in range(2)
        for kind in ("recv", "send")
        for row in [(0, 1, *two), (0, 2, *two), (5, 1, *one)]
    ]
    assert len(record.messages()) == 6
    # each row of the simulator is both sides of a message
    first = program.__code__.co_firstlineno
    for e in record.events:
        line = first + {("send", 5): 5, ("recv", 5): 6}.get((e.kind, e.tag), 2)
        assert e.where == f"{__file__}:{line}"
        assert type(e.shape) is tuple and e.posted <= e.start < e.end
        assert e.group == EventGroup("world", (0, 1), None)


def test_sub_groups_use_ranks_of_the_world():
    def program(rank):
        odd, swapped = dist.new_group([1, 3]), dist.new_group([3, 0])
        x = torch.full((1,), float(rank))
        if rank in (1, 3):
            dist.all_reduce(x, group=odd)
            dist.broadcast(x, 3, group=odd)
        if rank == 0:
            dist.send(x, 3, group=swapped)
        if rank == 3:
            y = torch.empty(1)
            assert dist.recv(y, group=swapped) == 0 and y.item() == 0.0
            assert dist.get_group_rank(swapped, 3) == 1
        members = None if rank not in (1, 3) else dist.get_process_group_ranks(odd)
        return x.item(), members, odd is dist.GroupMember.NON_GROUP_MEMBER

    result = run(program, 4)
    outside, inside = (None, True), (4.0, [1, 3], False)
    assert result.results == [(0.0, *outside), inside, (2.0, *outside), inside]
    swapped, odd = EventGroup("2", (0, 3), None), EventGroup("1", (1, 3), None)
    kinds = ("send", "broadcast")
    found = {e[:3] + (e.group,) for e in trace(result).events if e.kind in kinds}
    sent = (0, "send", 3, swapped)
    assert found == {sent, (1, "broadcast", 3, odd), (3, "broadcast", 3, odd)}


def test_a_new_group_of_any_backend_has_virtual_ranks():
    def program(rank):
        x, group = torch.ones(1), dist.new_group(backend="gloo")
        dist.all_reduce(x, group=group)
        return x.item(), dist.get_backend(group)

    assert run(program, 3).results == [(3.0, "gloo")] * 3


def test_a_rank_that_destroys_its_group_leaves_the_other_ranks_groups():
    def program(rank):
        dist.barrier()
        if rank == 0:
            dist.destroy_process_group()
        return dist.is_initialized()

    assert run(program, 2).results == [False, True]


def draws(rank: int, pause) -> list:
    """Random numbers from all generators, with pauses between.

    Normals are generated in pairs, so half a pair is left at some pauses.
    """
    if rank == 1:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
    drawn = []
    for _ in range(4):
        drawn.append((torch.rand(2).tolist(), random.gauss(0, 1), np.random.normal()))
        pause()
        hidden = np.random.mtrand._rand.rand()  # as SciPy and scikit-learn do
        drawn.append((random.random(), random.sample(range(100), 3), np.random.rand(), hidden))
        drawn.append(torch.randn(3).tolist())
        if rank == 2:
            pause()
    return drawn


def test_each_rank_has_its_own_random_numbers():
    def pause():
        rank = dist.get_rank()
        wait_for([dist.isend(torch.ones(1), rank), dist.irecv(torch.ones(1), rank)])

    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    interleaved, alone = (run(lambda r, p=p: draws(r, p), 4).results for p in (pause, lambda: None))
    assert interleaved == alone
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert alone[1] == draws(3, lambda: None)
    assert alone[0] != alone[2]
    torch.set_rng_state(state[0]), random.setstate(state[1])


def test_the_random_state_of_the_process_is_restored():
    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    expected = random.random(), torch.rand(1).item(), np.random.rand()
    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    run(lambda r: draws(r, lambda: None), 3)
    assert (random.random(), torch.rand(1).item(), np.random.rand()) == expected


def test_modes_stay_with_their_rank():
    def program(rank):
        if rank == 0:
            torch.set_default_dtype(torch.float64)
        device = torch.device("meta" if rank == 3 else "cpu")
        with (
            torch.set_grad_enabled(rank == 1),
            torch.autocast("cpu", torch.bfloat16, enabled=rank == 2),
            device,
        ):
            dist.barrier()
            x = torch.ones(2, 2)
            return x.dtype, torch.is_grad_enabled(), (x @ x).dtype, x.device.type

    f32, f64, b16 = torch.float32, torch.float64, torch.bfloat16
    results = run(program, 4).results
    assert results == [
        (f64, False, f64, "cpu"),
        (f32, True, f32, "cpu"),
        (f32, False, b16, "cpu"),
        (f32, False, f32, "meta"),
    ]


class Exchange(torch.autograd.Function):
    """Swap with the neighbour, in forward and in backward."""

    @staticmethod
    def forward(ctx, x):
        y, other = torch.empty_like(x), dist.get_rank() ^ 1
        wait_for([dist.isend(x.contiguous(), other), dist.irecv(y, other)])
        return y

    @staticmethod
    def backward(ctx, grad):
        threads.append((dist.get_rank(), threading.current_thread().name))
        return Exchange.apply(grad)


threads: list = []


def test_backward_runs_on_the_ranks_own_thread():
    def program(rank):
        x = torch.full((3,), float(rank), dtype=torch.float64, requires_grad=True)
        (Exchange.apply(x * (rank + 1)) * (rank + 2)).sum().backward()
        return x.grad.tolist()

    threads.clear()
    assert run(program, 4).results == [[(r + 1.0) * ((r ^ 1) + 2)] * 3 for r in range(4)]
    assert sorted(threads) == [(r, f"rank {r}") for r in range(4)]


def test_a_hundred_ranks():
    n = 100
    record = trace(run(ring_all_gather, n))
    assert record.messages_sent == [n - 1] * n
    assert record.bytes_sent == record.bytes_received == [4 * (n - 1)] * n


@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="counts the process's threads in /proc"
)
def test_a_rank_computes_with_one_thread_even_where_openmp_would_start_more():
    # In a process of its own, as the tests run with OMP_NUM_THREADS=1. A pool of threads would spin
    # on the simulation's one core.
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        env=os.environ | {"OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    # a thread of the simulator that is no longer needed may end meanwhile
    assert all(int(more) <= 0 for more in done.stdout.split()), done.stdout


THREADS = """
import os
import torch
from parallel101.laboratory.sim.simulate import simulate

def program(rank):
    before = len(os.listdir("/proc/self/task"))
    torch.nn.functional.linear(torch.randn(64, 64), torch.randn(64, 64), torch.randn(64))
    torch.nn.functional.gelu(torch.randn(256, 256))
    return len(os.listdir("/proc/self/task")) - before

print(*simulate(program, 2).results)
"""
