"""What looks like a fault (faults.py) and is none: these programs end, in every world, and assert
what they compute.
"""

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
from tests.ranks.faults import WORLDS, pass_right, wait_for

PROGRAMS = {}


def ends(worlds="checked sim", size=2):
    """Put a program of a rank into the table."""
    return lambda program: PROGRAMS.update({program: (worlds.split(), size)}) or program


def compute(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(100).sum()


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


@ends("gloo checked sim")
def dims_in_another_order_on_all_ranks(rank):
    """The same values as channels first."""
    for name, call in PERMUTED.items():
        values = []
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.arange(24.0).reshape(2, 3, 2, 2).add(100 * rank).to(memory_format=layout)
            values.append([t.tolist() for t in call(x, [torch.empty_like(x) for _ in range(2)])])
        assert values[0] == values[1], name


@ends("gloo checked sim")
def dims_of_size_1_sums_of_sparse_tensors_and_an_uneven_all_to_all(rank):
    one, total = torch.zeros(1), torch.ones(()) if rank else torch.ones(1)
    dist.recv(one, 0) if rank else dist.send(torch.tensor(3.0), 1)
    dist.all_reduce(total)
    assert (one.item(), total.item()) == (3.0 * rank, 2.0)
    uneven, splits = torch.empty(2 * rank + 1, 2), [rank, rank + 1]
    dist.all_to_all_single(uneven, torch.ones(2 * rank + 1, 2), splits, splits)
    assert uneven.tolist() == [[1.0, 1.0]] * (2 * rank + 1)
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sparse = torch.sparse_coo_tensor([[0, rank + 1, rank + 1]], rows, (4, 2))
    dist.all_reduce(sparse, async_op=True).wait()
    assert sparse._indices().tolist() == [[0, 1, 2]]
    assert sparse._values().tolist() == [[2.0, 4.0], [8.0, 10.0], [8.0, 10.0]]


@ends()
def another_part_of_the_same_memory_changes(rank):
    whole = torch.arange(8.0)
    mine, theirs = whole.chunk(2)
    work = dist.isend(mine, 1 - rank)
    dist.recv(inbox := torch.empty(4), 1 - rank)
    theirs.add_(inbox)
    work.wait()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]


@ends(size=3)
def arguments_that_may_differ(rank):
    sizes = [3, 0, 2]
    shard = torch.full((2, sizes[rank]), float(rank))
    # the same dim, counted from the end
    assert p101.all_gather(shard, -1 if rank == 1 else 1, sizes=sizes).shape == (2, 5)
    assert p101.gather(shard, 2, 1, sizes=sizes).numel() == (10 if rank == 2 else 0)
    whole, splits = shard.expand(2, sizes[rank]), [1, 1, 0]
    got = p101.all_to_all(whole, 0, 1, split_sizes=splits, concat_sizes=sizes)
    assert got.shape[0] == splits[rank]


@ends("checked")
def threads_with_a_group_each(rank):
    groups, found = [dist.new_group([0, 1]) for _ in range(2)], []

    def reduce_20(group, op, sizes):
        for size in sizes:
            found.append(p101.all_reduce(torch.ones(size), op, group=group).sum().item())

    other = threading.Thread(target=reduce_20, args=(groups[1], "sum", range(1, 21)))
    other.start()
    reduce_20(groups[0], "max", [3] * 20)
    other.join()
    assert sum(found) == 480.0


@ends()
def backward_that_sends_nothing_in_any_order(rank):
    x = torch.ones(2, requires_grad=True)
    first, last = p101.reduce_from_group(x), p101.reduce_from_group(3 * x[:1])
    results = [first, p101.gather_from_group(2 * x), last]
    for y in results[:: 1 if rank else -1]:
        y.sum().backward()
    assert x.grad.tolist() == [6.0, 3.0]


@ends("gloo", size=3)
def slow_ranks(rank):
    """Also in a group that two of three make, while the third does something else."""
    if rank == 2:
        return
    compute(0.6 * rank)  # longer than it takes to report a deadlock
    assert dist.get_world_size(dist.new_group([0, 1])) == 2
    if rank == 0:
        compute(0.8)
    dist.recv(torch.zeros(1), 0) if rank else dist.send(torch.ones(1), 1)


@ends("gloo")
def slow_rank_of_ddp(rank):
    net = DistributedDataParallel(torch.nn.Linear(2, 2))
    compute(1.5 * (rank == 0))  # longer than it takes to report a deadlock
    net(torch.ones(1, 2)).sum().backward()


@ends("gloo")
def another_thread_of_the_program_that_posts_later(rank):
    if rank == 0:
        dist.recv(x := torch.zeros(1), 1)
        dist.send(x, 1)
        return
    other = threading.Timer(1.5, lambda: dist.send(torch.ones(1), 0))
    other.start()
    dist.recv(x := torch.zeros(1), 0)
    other.join()
    assert x.item() == 1.0


@ends("gloo")
def tensors_of_a_function_that_the_watcher_has_seen(rank):
    """They are freed when it returns, also while another thread lives: a progress bar's."""

    def sums():
        x = torch.ones(1)
        if rank == 0:
            time.sleep(5 * TICK)  # rank 1 waits for so long
        dist.all_reduce(x)
        return weakref.ref(x)

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
    assert freed


def batch(got, peer):
    messages = dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, got, peer)
    return dist.batch_isend_irecv(list(messages))


class Pending:
    """Works that one object posts and another one waits for."""

    def __init__(self, works):
        self.works = works


@ends()
def all_that_counts_as_a_wait(rank):
    got = [torch.zeros(1) for _ in range(5)]
    x, peer, on_sim = torch.ones(1), 1 - rank, dist.get_backend() == "sim"
    received, sent = dist.irecv(got[0], peer), dist.isend(x, peer)
    while on_sim and not (received.is_completed() and sent.is_completed()):
        pass
    if not on_sim:  # on gloo, messages are complete only in wait()
        wait_for([received, sent])
    wait_for(batch(got[1], peer))
    pending = Pending([dist.irecv(got[2], peer), dist.isend(x, peer)])
    dist.barrier()
    wait_for(pending.works)
    for call in (dist.send, dist.recv)[:: 1 if rank else -1]:
        call(x, peer) if call is dist.send else call(got[3])
    if on_sim:  # messages of gloo have no futures
        future, sent = dist.irecv(got[4], peer).get_future(), dist.isend(x, peer)
        wait_for([future, sent])
    assert [int(t) for t in got] == [1, 1, 1, 1, on_sim]


@ends("nccl")
def wait_for_one_of_a_batch(rank):
    batch(got := torch.zeros(1), 1 - rank)[0].wait()
    batch(got, 1 - rank)[0].get_future()
    dist.barrier()
    assert got.item() == 1.0


CASES = [(program, world) for program, (worlds, _) in PROGRAMS.items() for world in worlds]
IDS = [f"{program.__name__}, {world}" for program, world in CASES]


@pytest.mark.parametrize(("program", "world"), CASES, ids=IDS)
def test_the_program_ends(program, world):
    size = PROGRAMS[program][1]
    p101.launch(lambda: program(dist.get_rank()), world_size=size, **WORLDS[world])


def from_anyone_and_from_one():
    rank, go = dist.get_rank(), torch.zeros(1)
    if rank == 0:
        dist.recv(first := torch.zeros(8))  # rank 1's: nobody else sends
        dist.send(go, 1)
        dist.recv(second := torch.zeros(2), 1)
        assert first.tolist() + second.tolist() == [1.0] * 8 + [2.0] * 2
    elif rank == 1:
        dist.send(torch.full((8,), 1.0), 0)
        dist.recv(go, 0)
        dist.send(torch.full((2,), 2.0), 0)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("size", [2, 3])
def test_receives_from_anyone_and_from_one_may_take_turns(backend, size):
    run = p101.launch(from_anyone_and_from_one, world_size=size, backend=backend, trace="payload")
    for m in run.trace.messages():
        assert m.send.payload == m.recv.payload and m.send.seq == m.recv.seq


def test_a_send_without_a_wait_is_a_warning():
    with pytest.warns(RuntimeWarning, match="ranks 0–2 do not wait for sends:") as raised:
        run = p101.launch(pass_right, ("receive",), world_size=3, backend="sim")
    told = f"rank 1: send to rank 2, at {line_of(pass_right, 'dist.isend(')}"
    assert told in str(raised[0].message)
    assert raised[0].filename == __file__ and run.results[0].tolist() == [1.0]
