"""What looks like a fault (faults.py) and is none: these programs end, with what they compute."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import parallel101 as p101
from parallel101.laboratory.ranks.watcher import TICK
from tests.ranks.failing import line_of
from tests.ranks.faults import pass_right

BOTH = pytest.mark.parametrize("backend", ["gloo", "sim"])


def compute(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(100).sum()


def permuted(call):
    """`call(x, like)` with tensors that lie in memory channels first and channels last: the
    same values, as nested lists.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.arange(24.0).reshape(2, 3, 2, 2).add(100 * rank).to(memory_format=layout)
        outputs = call(x, [torch.empty_like(x) for _ in range(n)])
        found.append([t.tolist() for t in outputs])
    return found


PERMUTED = {
    "all_reduce": lambda x, like: dist.all_reduce(x) or [x],
    "broadcast": lambda x, like: dist.broadcast(x, 1) or [x],
    "reduce": lambda x, like: dist.reduce(x, 0) or [x][dist.get_rank() :],
    "all_gather": lambda x, like: dist.all_gather(like, x) or like,
    "gather": lambda x, like: (
        dist.gather(x, None if dist.get_rank() else like) or like[2 * dist.get_rank() :]
    ),
    "scatter": lambda x, like: (
        dist.scatter(like[0], None if dist.get_rank() else [x, x + 1]) or like[:1]
    ),
    "reduce_scatter": lambda x, like: dist.reduce_scatter(like[0], [x, x + 1]) or like[:1],
    "all_to_all": lambda x, like: dist.all_to_all(like, [x, x + 1]) or like,
    "all_to_all_single": lambda x, like: dist.all_to_all_single(like[0], x) or like[:1],
}


def harmless():
    """What has been taken for misuse: dims of size 1, dense tensors with dims in another order
    on all ranks, sums of sparse tensors, an uneven all-to-all.
    """
    rank = dist.get_rank()
    one, total = torch.zeros(1), torch.ones(()) if rank else torch.ones(1)
    dist.recv(one, 0) if rank else dist.send(torch.tensor(3.0), 1)
    dist.all_reduce(total)
    uneven, splits = torch.empty(2 * rank + 1, 2), [rank, rank + 1]
    dist.all_to_all_single(uneven, torch.ones(2 * rank + 1, 2), splits, splits)
    assert uneven.tolist() == [[1.0, 1.0]] * (2 * rank + 1)
    both = {name: permuted(call) for name, call in PERMUTED.items()}
    sparse = torch.sparse_coo_tensor(
        [[0, rank + 1, rank + 1]], torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), (4, 2)
    )
    work = dist.all_reduce(sparse, async_op=True)
    work.wait()
    rows = sparse._indices().tolist(), sparse._values().tolist()
    differ = [name for name, (first, last) in both.items() if first != last]
    return one.tolist() == [3.0 * rank], total.tolist(), differ, rows


@pytest.mark.parametrize(
    "where", [{}, {"trace": True}, {"backend": "sim"}], ids=["gloo", "recorded gloo", "sim"]
)
def test_what_is_no_misuse(where):
    for received, total, differ, rows in p101.launch(harmless, world_size=2, **where).results:
        assert received and total in (2.0, [2.0]) and differ == []
        assert rows == ([[0, 1, 2]], [[2.0, 4.0], [8.0, 10.0], [8.0, 10.0]])


@BOTH
def test_another_part_of_the_same_memory_may_change(backend):
    def program():
        whole = torch.arange(8.0)
        mine, theirs = whole.chunk(2)
        work = dist.isend(mine, 1 - dist.get_rank())
        inbox = torch.empty(4)
        dist.recv(inbox, 1 - dist.get_rank())
        theirs.add_(inbox)
        work.wait()
        return whole.tolist()

    run = p101.launch(program, world_size=2, backend=backend, trace=True)
    assert run.results == [[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]] * 2


@BOTH
def test_what_may_differ_between_ranks_is_no_misuse(backend):
    def program():
        rank, sizes = dist.get_rank(), [3, 0, 2]
        shard = torch.full((2, sizes[rank]), float(rank))
        # the same dim, counted from the end
        assert p101.all_gather(shard, -1 if rank == 1 else 1, sizes=sizes).shape == (2, 5)
        assert p101.gather(shard, 2, 1, sizes=sizes).numel() == (10 if rank == 2 else 0)
        whole, splits = shard.expand(2, sizes[rank]), [1, 1, 0]
        got = p101.all_to_all(whole, 0, 1, split_sizes=splits, concat_sizes=sizes)
        assert got.shape[0] == splits[rank]

    p101.launch(program, world_size=3, backend=backend, trace=True)


def test_threads_may_each_have_a_group_of_their_own():
    def program():
        groups, found = [dist.new_group([0, 1]) for _ in range(2)], []

        def reduce_20(group, op, sizes):
            for size in sizes:
                found.append(p101.all_reduce(torch.ones(size), op, group=group).sum().item())

        other = threading.Thread(target=reduce_20, args=(groups[1], "sum", range(1, 21)))
        other.start()
        reduce_20(groups[0], "max", [3] * 20)
        other.join()
        return sum(found)

    assert p101.launch(program, world_size=2, trace=True).results == [480.0, 480.0]


@BOTH
def test_a_backward_that_sends_nothing_may_come_in_any_order(backend):
    def program():
        x = torch.ones(2, requires_grad=True)
        results = [
            p101.reduce_from_group(x),
            p101.gather_from_group(2 * x),
            p101.reduce_from_group(3 * x[:1]),
        ]
        for y in results[:: 1 if dist.get_rank() else -1]:
            y.sum().backward()
        return x.grad.tolist()

    run = p101.launch(program, world_size=2, backend=backend, trace=True)
    assert run.results == [[6.0, 3.0]] * 2


@BOTH
@pytest.mark.parametrize("world_size", [2, 3])
def test_receives_from_anyone_and_from_one_may_take_turns(backend, world_size):
    def program():
        rank, go = dist.get_rank(), torch.zeros(1)
        if rank == 0:
            first, second = torch.zeros(8), torch.zeros(2)
            dist.recv(first)  # rank 1's: nobody else sends
            dist.send(go, 1)
            dist.recv(second, 1)
            return first.tolist() + second.tolist()
        if rank == 1:
            dist.send(torch.full((8,), 1.0), 0)
            dist.recv(go, 0)
            dist.send(torch.full((2,), 2.0), 0)

    run = p101.launch(program, world_size=world_size, backend=backend, trace="payload")
    assert run.results[0] == [1.0] * 8 + [2.0] * 2
    for m in run.trace.messages():
        assert m.send.payload == m.recv.payload and m.send.seq == m.recv.seq


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


def test_a_slow_rank_of_ddp_is_no_deadlock():
    def program():
        net = DistributedDataParallel(torch.nn.Linear(2, 2))
        if dist.get_rank() == 0:
            compute(1.5)  # longer than it takes to report a deadlock
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


def test_on_sim_a_message_that_nobody_waited_for_has_not_arrived():
    def program():
        x = torch.full((2,), 5.0)
        works = [
            dist.isend(x, 1 - dist.get_rank()),
            dist.irecv(inbox := torch.zeros(2), 1 - dist.get_rank()),
        ]
        dist.barrier()
        before = inbox.tolist()
        for work in works:
            work.wait()
        return before, inbox.tolist()

    run = p101.launch(program, world_size=2, backend="sim")
    assert run.results == [([0.0, 0.0], [5.0, 5.0])] * 2


def batch(x, got, peer):
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
    )


def test_a_send_without_a_wait_is_a_warning():
    with pytest.warns(RuntimeWarning, match="ranks 0–2 do not wait for sends:") as raised:
        run = p101.launch(pass_right, ("receive",), world_size=3, backend="sim")
    told = f"rank 1: send to rank 2, at {line_of(pass_right, 'dist.isend(')}"
    assert told in str(raised[0].message)
    assert raised[0].filename == __file__ and run.results[0].tolist() == [1.0]


class Pending:
    """Works that one object posts and another one waits for."""

    def __init__(self, works):
        self.works = works


def waited_for_in_every_way():
    """All of these count as a wait."""
    rank, got = dist.get_rank(), [torch.zeros(1) for _ in range(5)]
    x, peer = torch.ones(1), 1 - rank
    received, sent = dist.irecv(got[0], peer), dist.isend(x, peer)
    while dist.get_backend() == "sim" and not (received.is_completed() and sent.is_completed()):
        pass
    if dist.get_backend() == "gloo":  # whose messages are complete only in wait()
        received.wait(), sent.wait()
    for work in batch(x, got[1], peer):
        work.wait()
    pending = Pending([dist.irecv(got[2], peer), dist.isend(x, peer)])
    dist.barrier()
    for work in pending.works:
        work.wait()
    if rank:
        dist.send(x, peer), dist.recv(got[3])
    else:
        dist.recv(got[3]), dist.send(x, peer)
    if dist.get_backend() != "gloo":  # whose messages have no futures
        future, sent = dist.irecv(got[4], peer).get_future(), dist.isend(x, peer)
        future.wait(), sent.wait()
    return [int(t) for t in got]


@BOTH
def test_what_counts_as_a_wait(backend):
    run = p101.launch(waited_for_in_every_way, world_size=2, backend=backend, trace=True)
    assert run.results == [[1, 1, 1, 1, int(backend == "sim")]] * 2


def test_under_nccls_rules_a_wait_for_one_is_a_wait_for_the_batch():
    def program():
        x, got, peer = torch.ones(1), torch.zeros(1), 1 - dist.get_rank()
        batch(x, got, peer)[0].wait()
        batch(x, got, peer)[0].get_future()
        dist.barrier()
        return got.item()

    assert p101.launch(program, world_size=2, backend="sim", rules="nccl").results == [1.0, 1.0]
