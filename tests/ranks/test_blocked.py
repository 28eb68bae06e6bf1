"""Deadlocks are found when a rank waits in C++, as in torch's DDP, and not claimed while
another thread may still post.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import parallel101 as p101
from parallel101.laboratory.ranks.watcher import TICK
from tests.ranks.failing import fails, line_of


def train(steps):
    net = DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(steps):
        net(torch.ones(1, 2)).sum().backward()


def test_one_rank_makes_a_step_of_ddp_more_than_the_other():
    def program():
        train(2 + dist.get_rank())

    # The imports of DDP's first use take longer than a deadlock may. The second launch waits until
    # the fork server has them.
    for _ in range(2):
        p101.launch(train, 1, world_size=2)
    error = fails(p101.DeadlockError, program, world_size=2)
    assert error.waiting == {
        1: ("all_reduce", 0, line_of(train, "backward()"))
    } and error.returned == [0]


def test_a_deadlock_in_futures_wait_all():
    def program():
        if dist.get_rank() == 1:
            torch.futures.wait_all([dist.all_reduce(torch.ones(1), async_op=True).get_future()])

    assert fails(p101.DeadlockError, program, world_size=2).waiting == {
        1: ("all_reduce", 0, line_of(program, "wait_all"))
    }


def test_a_slow_rank_of_ddp_is_no_deadlock():
    def program():
        net = DistributedDataParallel(torch.nn.Linear(2, 2))
        if dist.get_rank() == 0:
            until = time.monotonic() + 1.5  # longer than it takes to report a deadlock
            while time.monotonic() < until:
                torch.ones(100).sum()
        net(torch.ones(1, 2)).sum().backward()
        return True

    assert p101.launch(program, world_size=2).results == [True, True]


def test_another_thread_of_the_program_may_still_post():
    def program():
        x = torch.zeros(1)
        if dist.get_rank() == 0:
            dist.recv(x, 1)
            dist.send(x, 1)
            return x.item()

        def post():
            dist.send(torch.ones(1), 0)

        other = threading.Timer(1.5, post)  # a thread that waits
        other.start()
        dist.recv(x, 0)
        other.join()
        return x.item()

    assert p101.launch(program, world_size=2).results == [1.0, 1.0]


def test_a_deadlock_is_found_while_a_librarys_own_thread_lives():
    def program():
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor()
        pool.submit(abs, -1).result()  # its thread lives on, and waits for work
        dist.recv(torch.empty(1), 1 - dist.get_rank())

    assert fails(p101.DeadlockError, program, world_size=2).cycle == [0, 1]


def test_a_look_at_the_threads_keeps_no_tensor_of_the_program():
    """A function's tensors are freed when it returns, also if the watcher has seen its frame
    while another thread lived: a progress bar's, for example.
    """

    def sums():
        x = torch.ones(1)
        if dist.get_rank() == 0:
            time.sleep(5 * TICK)  # rank 1 waits for so long
        dist.all_reduce(x)
        return weakref.ref(x)

    def program():
        over = threading.Event()
        thread = threading.Thread(target=over.wait)
        thread.start()
        gc.disable()
        x, until = sums(), time.monotonic() + 10
        while x() is not None and time.monotonic() < until:
            time.sleep(TICK)  # the watcher may be looking just now
        freed = x() is None
        over.set()
        thread.join()
        return freed

    assert p101.launch(program, world_size=2).results == [True, True]
