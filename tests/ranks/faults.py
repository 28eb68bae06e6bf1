"""Programs that go wrong, and what the report of each says: one table for all worlds.

    @deadlock("the cycle: rank 0 → rank 1 → rank 0", worlds="gloo sim")
    def wait_of_irecv(rank):
        work = dist.irecv(X, 1 - rank)
        work.wait()  # rank 0 waits in recv from rank 1; rank 1 waits in recv from rank 0

A comment in a program is what the report must say of its line, before it names it. Otherwise the
report must have the texts that the decorator is given ("…" is anything on one line), and the
error's `rank`. Programs of one call are rows of `calls`, which are named after that text.

In a job (see job.py) no process is above the ranks. There, what they print must have the texts
`job`, if there are such, in place of the decorator's.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP

import parallel101 as p101
from parallel101 import collectives
from parallel101.collectives.asynchronous import (
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)
from parallel101.spans import unrecorded
from tests.collectives.cases import negative

WORLDS: dict[str, dict[str, Any]] = {
    "gloo": {},
    "checked": {"trace": True},  # gloo, and the ranks' calls are compared
    "sim": {"backend": "sim"},
    "nccl": {"backend": "sim", "rules": "nccl"},
}
JOBS: dict[str, dict[str, Any]] = {  # the world: what Job takes
    "torchrun": {"options": {}},
    "checked_torchrun": {"options": {"trace": True}},
    "srun": {"options": {}, "launcher": "srun"},
}


class Fault(NamedTuple):
    program: Callable[[int], Any]  # of a rank
    error: type[RuntimeError]
    says: tuple[str, ...]
    rank: int | None = None
    size: int = 2
    worlds: str = "checked sim"
    options: Mapping[str, Any] = {}
    job: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {}


def staged(error, *says, name=None, **about):
    """Put a program into the table."""

    def put(program):
        FAULTS[name or program.__name__] = Fault(program, error, says, **about)
        return program

    return put


misuse, deadlock, failed = (
    partial(staged, error) for error in (p101.MisuseError, p101.DeadlockError, p101.RankFailed)
)


def calls(fault, programs, *more, **about):
    for says, program in programs.items():
        fault(says, *more, name=f"{says}{about.get('worlds', '')}", **about)(program)


X, INTS, FLOATS = torch.ones(1), torch.ones(6, dtype=torch.int32), torch.ones(6)
WIDE, TALL, SQUARE = torch.ones(2, 3), torch.ones(3, 2), torch.ones(4, 4)
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
CYCLE = "the cycle: rank 0 → rank 1 → rank 0"


def message(sent, received, late=None):
    """Rank 0 sends and rank 1 receives. One of them comes late."""

    def program(rank):
        p101.compute(float(rank == late))
        dist.recv(received, 0) if rank else dist.send(sent, 1)

    return program


def wait_for(works):
    for work in works:
        work.wait()


# ---- calls that gloo accepts, and that don't agree ----

ODD_RANK_1 = {
    "different reductions: sum and max": lambda r: dist.all_reduce(X, MAX if r == 1 else SUM),
    "different dtypes: float32 and int32": lambda r: dist.all_reduce(INTS if r == 1 else FLOATS),
    "different roots: 0 and 1": lambda r: dist.broadcast(X, int(r == 1)),
    "all_reduce and barrier": lambda r: dist.barrier() if r == 1 else dist.all_reduce(X),
    "passes a strided": lambda r: dist.all_reduce(SQUARE.t()[:2] if r == 1 else torch.ones(2, 4)),
    "negated": lambda r: dist.all_reduce(negative(torch.ones(2)) if r == 1 else torch.ones(2)),
    "lazily conjugated": lambda r: dist.reduce(
        torch.ones(2).cfloat().conj() if r == 1 else torch.ones(2).cfloat(), 0
    ),
}
calls(misuse, ODD_RANK_1, rank=1, size=3)


@misuse("different shapes: (2, 3) and (3, 2)", worlds="checked sim checked_torchrun")
def different_shapes(rank):
    dist.all_reduce(TALL if rank == 1 else WIDE)  # rank 0: all_reduce(; rank 1: all_reduce(


DIFFER = {
    "expects 8…": lambda r: dist.all_to_all_single(torch.ones(3 * (1 + (r == 2))), torch.ones(3)),
    "expects 16…": lambda r: dist.all_to_all_single(
        *[torch.ones(6, 2)] * 2, [2, 2, 2], [2, 1, 3] if r == 1 else [2, 2, 2]
    ),
    "dim order (1, 0) and contiguous": lambda r: dist.all_reduce(WIDE if r == 1 else TALL.t()),
    "sparse and contiguous": lambda r: dist.all_reduce(SQUARE if r == 1 else SQUARE.to_sparse()),
    "passes a sparse tensor": lambda r: dist.all_reduce(SQUARE.to_sparse(), op=MAX),
}
calls(misuse, DIFFER, size=3)
SENDS = {
    "shorter than the receive": message(torch.ones(2), torch.ones(4), 0),
    "different dtypes: float32 sent, int32": message(FLOATS, INTS, 1),
    "different shapes: (6,) sent, (2, 3)": message(FLOATS, WIDE, 0),
    "passes a strided tensor to recv…contiguous": message(torch.ones(4), SQUARE[:, 0]),
    "x.resolve_conj()": message(torch.ones(2), negative(torch.ones(2))),
}
calls(misuse, SENDS, rank=1)
misuse(
    "longer than the receive: 16 bytes sent, 8 expected",
    name="longer message",
    rank=1,
    worlds="checked sim checked_torchrun",
    job=("16 bytes",),  # on a busy machine the abort is reported, and not that the calls differ
)(message(torch.ones(4), torch.ones(2), 1))
OF_ONE = {
    "passes a strided tensor to send…contiguous": message(SQUARE[:, 0], torch.ones(4)),
    "to send…x.resolve_conj()": message(negative(torch.ones(2)), torch.ones(2)),
    "passes a sparse tensor to send": lambda r: dist.isend(SQUARE.to_sparse(), 1 - r),
    "different orders in memory": lambda r: dist.all_gather([WIDE.clone(), WIDE], TALL.t()),
}
calls(misuse, OF_ONE)
ON_META = {
    "on the meta device": lambda r: (
        dist.recv(torch.zeros(3, device="cpu"), 0) if r else dist.send(torch.ones(3), 1)
    ),
    'with device="cpu"': lambda r: dist.all_reduce(torch.ones(3, device="cpu" if r else None)),
    "passes a strided tensor to send": lambda r: dist.isend(torch.empty(3, 3).t(), 1 - r),
}
calls(misuse, ON_META, worlds="sim", options={"device": "H100"})
ON_NCCL = {
    "sparse tensor to all_reduce, and NCCL": lambda r: dist.all_reduce(SQUARE.to_sparse()),
    "from any rank, and NCCL": lambda r: dist.recv(X) if r else dist.send(X, 1),
}
calls(failed, ON_NCCL, worlds="nccl")
ON_SIM = {
    "average of torch.int32": lambda r: dist.all_reduce(INTS, dist.ReduceOp.AVG),
    "whole numbers": lambda r: dist.reduce(X, 0, dist.ReduceOp.BAND),
    "on threads of its own…'gloo'": lambda r: dist.rpc.init_rpc(str(r), rank=r, world_size=2),
    "a torch.futures.Future that nothing will set": lambda r: torch.futures.Future().wait(),
}
calls(failed, ON_SIM, worlds="sim")
OWN = {  # of parallel101's own collectives: what rank 1 says otherwise
    "op": lambda r: p101.all_reduce(FLOATS, "max" if r == 1 else "sum"),
    "shape": lambda r: p101.all_reduce(TALL if r == 1 else WIDE),
    "group": lambda r: p101.all_gather(FLOATS, group=[0, 2, 1] if r == 1 else [0, 1, 2]),
    "dim": lambda r: p101.all_gather(WIDE, int(r == 1)),
    "src": lambda r: p101.broadcast(FLOATS, int(r == 1)),
    "algorithm": lambda r: p101.all_reduce(FLOATS, algorithm="direct" if r == 1 else "ring"),
    "dtype": lambda r: p101.reduce_scatter(INTS if r == 1 else FLOATS),
    "shape in the other dims": lambda r: p101.all_gather(torch.ones(2, 2 + (r == 1))),
    "sizes": lambda r: p101.all_gather(torch.ones(2 + (r == 1))),
    "collectives: op": lambda r: collectives.all_reduce(FLOATS, "max" if r == 1 else "sum"),
    "collectives: dim": lambda r: collectives.scatter(torch.ones(3, 3), dim=int(r == 1)),
    "async: op": lambda r: all_reduce_async(FLOATS, "max" if r == 1 else "sum").wait(),
    "async: shape": lambda r: reduce_scatter_async(TALL if r == 1 else WIDE).wait(),
    "async: dtype": lambda r: all_gather_async(INTS if r == 1 else FLOATS).wait(),
    "replicated: algorithm": lambda r: p101.copy_to_group(
        FLOATS, algorithm="ring" if r == 1 else "direct"
    ),
}
for what, program in OWN.items():
    says = f"{what.split(': ')[-1]} is not the same on all ranks: "
    worlds = "checked sim" if what in ("op", "shape", "group") else "sim"
    misuse(says, name=f"own {what}", rank=1, size=3, worlds=worlds)(program)
INSTEAD = {  # of an all-gather, on rank 1; gloo would match the messages of the two
    "all_to_all": lambda: p101.all_to_all(torch.ones(3), algorithm="direct"),
    "all_gather_async": lambda: all_gather_async(X).wait(),
    "barrier": p101.barrier,
}
for what, other in INSTEAD.items():
    misuse(f"operations: all_gather and {what}\n", name=f"own {what}", rank=1, size=3)(
        lambda r, other=other: other() if r == 1 else p101.all_gather(X, algorithm="direct")
    )


@misuse("the ranks call different operations: all_reduce and barrier", worlds="checked")
def one_batch_fewer(rank):
    model = DDP(torch.nn.Linear(4, 4))
    for _ in range(3 - rank):
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()  # rank 1: barrier(


@misuse("a message of … on ranks [0… is received in … on ranks [0", size=3)
def message_of_another_collective(rank):
    p101.all_reduce(X, group=[0, 2] if rank == 2 else [0, 1, 2])


def requires_grad_differs(rank, odd):
    """The ranks with requires_grad would wait in backward for ever for those without."""
    x = torch.ones(2, requires_grad=rank != odd)
    p101.all_reduce(p101.all_gather(torch.ones(2)))  # the same on all ranks
    y = p101.all_reduce(x)
    if y.requires_grad:
        y.sum().backward()


for odd in (0, 2):
    misuse("requires_grad is not the same", "all_reduce(x)", name=f"{odd}", rank=odd, size=3)(
        lambda rank, odd=odd: requires_grad_differs(rank, odd)
    )


@misuse("'all_reduce, number 1' and 'all_reduce, number 2'\n", rank=1, size=3)
def loss_that_leaves_out_a_result(rank):
    """The backward of one collective would exchange messages with that of another."""
    x = torch.ones(2, requires_grad=True)
    results = p101.all_reduce(x), p101.all_reduce(10 * x)
    results[rank == 1].sum().backward()  # rank 1:


@misuse("shapes", size=3, worlds="sim")
def misuse_and_not_the_deadlock_that_it_causes(rank):
    if rank != 2:
        dist.all_reduce(torch.ones(1 + rank))  # rank 0: all_reduce(shape (1,); rank 1: all_reduce(


@misuse("shape is not the same on all ranks")
def misuse_in_an_unrecorded_block(rank):
    with unrecorded():
        collectives.all_reduce(torch.ones(2 + rank))  # rank 0: all_reduce; rank 1: all_reduce


@misuse("waits a second time for one ", worlds="gloo checked sim")
def second_wait(rank):
    x = torch.ones(3)
    work = dist.irecv(x, 0) if rank else dist.isend(x, 1)
    work.wait()
    work.wait()  # waits a second time


# ---- tensors that change before their operation has ended: rank 1's ----


def row(x):
    return [torch.ones_like(x) for _ in range(2)]


READ = {  # operations that read x, on two ranks
    "isend": lambda x, r: dist.isend(x, 0) if r else dist.irecv(x, 1),
    "all_gather": lambda x, r: dist.all_gather(row(x), x, async_op=True),
    "reduce_scatter": lambda x, r: dist.reduce_scatter(row(x)[0], [x, row(x)[0]], async_op=True),
    "all_to_all": lambda x, r: dist.all_to_all_single(row(x)[0], x, async_op=True),
    "gather": lambda x, r: dist.gather(x, None if r else row(x), async_op=True),
    "broadcast": lambda x, r: dist.broadcast(x, 1, async_op=True),
    "all_reduce": lambda x, r: dist.all_reduce(x, async_op=True),
}


def changes(rank, operation, numel, in_place, after=0.0, late=0.0):
    """Rank 1 changes its tensor so many seconds after the call, and rank 0 comes late."""
    x = torch.ones(numel)
    p101.compute(late * (rank == 0))
    work = READ[operation](x, rank)
    if rank == 1:
        if after:
            p101.compute(after)
            wait_for([dist.irecv(torch.ones(1), 1), dist.isend(X, 1)])  # the others run meanwhile
        if in_place:
            x.mul_(2)
        else:  # torch does not count this as a change
            x.numpy()[:] *= 2
    work.wait()


SLOW = {"network": p101.Network(latency=1.0, bandwidth=1e12)}
for world, options, *case in (
    *(("checked", {}, operation, 4, True) for operation in READ if operation != "all_reduce"),
    *(("sim", {}, operation, 4, False) for operation in READ),
    ("checked", {}, "isend", 1 << 20, False),
    ("sim nccl", {}, "isend", 1 << 20, True),
    ("sim", SLOW, "isend", 3, False, 0.0, 1.0),  # before it starts
    ("sim", SLOW, "isend", 3, False, 1.5, 1.0),  # under way
    ("sim", SLOW, "isend", 3, False, 3.0),  # after its end
):
    operation = str(case[0]).removeprefix("i")
    says = "rank 1 changed a tensor", f"{operation}("
    misuse(*says, name=f"changes {case}", rank=1, worlds=world, options=options)(
        lambda rank, case=case: changes(rank, *case)
    )

# ---- receives that nobody waits for ----

KEPT: list[object] = []


def pass_right(wait_for=("send",), kept=None):
    rank, p = dist.get_rank(), dist.get_world_size()
    received = dist.irecv(inbox := torch.zeros(1), src=(rank - 1) % p)
    sent = dist.isend(X, dst=(rank + 1) % p)
    if "send" in wait_for:
        sent.wait()
    if "receive" in wait_for:
        received.wait()
    if kept is not None:
        kept.append(received)
    dist.barrier()  # on gloo, a send whose work is dropped may be cancelled before it has arrived
    return inbox


AT = "dist.irecv(inbox := torch.zeros(1), src"
NOT_WAITED = (f"rank {r}: recv from rank {(r - 1) % 3}, at … {AT}" for r in range(3))
NOT_WAITED = ("ranks 0–2 do not wait for receives:", *NOT_WAITED)
misuse(*NOT_WAITED, name="dropped receive", size=3)(lambda rank: pass_right())
misuse(*NOT_WAITED, name="kept receive", size=3)(lambda rank: pass_right(kept=KEPT))


@misuse("rank 1: recv from rank 0", worlds="nccl")
def batch_without_a_wait(rank):
    swap = [dist.P2POp(dist.isend, X, 1 - rank), dist.P2POp(dist.irecv, X.clone(), 1 - rank)]
    dist.batch_isend_irecv(swap)  # rank 1: recv from rank 0
    dist.barrier()


@misuse("rank 1 does not wait", worlds="sim")
def forgotten_wait_in_an_unrecorded_block(rank):
    with unrecorded():
        dist.irecv(X, 0) if rank else dist.send(X, 1)  # rank 1: recv from rank 0
        dist.barrier()


@failed("raised ValueError: wrong numbers", "Before that, it received without a wait()", AT)
def error_after_a_forgotten_wait(rank):
    pass_right()
    raise ValueError("wrong numbers")


# ---- deadlocks ----

BOTH = "gloo sim"


@deadlock("the cycle: rank 0 → rank 1 → rank 2 → rank 0", size=3, worlds="gloo sim nccl torchrun")
def receive_cycle(rank):
    dist.recv(X, (rank + 1) % 3)  # rank 2 waits in recv from rank 0


@deadlock(CYCLE, size=4, worlds="gloo sim nccl")
def both_send_first(rank):
    if rank < 2:
        dist.send(X, 1 - rank)  # rank 0 waits in send to rank 1; rank 1 waits in send to rank 0
        dist.recv(X, 1 - rank)


IN_A_CYCLE = {
    "rank 1 waits in recv from rank 0, at …irecv(X, 1": lambda r: dist.irecv(X, 1 - r).wait(),
    "rank 1 waits in new_group for rank 0": lambda r: (
        r == 0 and dist.recv(X, 1),
        dist.new_group([0, 1]),
    ),
    "rank 0 waits in all_reduce for rank 1": lambda r: (
        r == 1 and dist.recv(X, 0),
        torch.futures.wait_all([dist.all_reduce(X, async_op=True).get_future()]),
    ),
}
calls(deadlock, IN_A_CYCLE, CYCLE, worlds=BOTH)
IN_A_CYCLE_ON_GLOO = {  # the others compute, and a library's own thread lives
    "rank 0 waits in recv from rank 1": lambda r: (
        [X.sum() for _ in iter(int, int(r > 1))],
        ThreadPoolExecutor().submit(abs, -1).result(),
        dist.recv(X, 1 - r),
    )
}
calls(deadlock, IN_A_CYCLE_ON_GLOO, CYCLE, size=4, worlds="gloo")
IN_A_CYCLE_ON_SIM = {
    "rank 0 waits in recv from rank 1": lambda r: [*iter(dist.irecv(X, 1 - r).is_completed, True)],
    "waits in store.get('never') for a key that no rank has set": lambda r: (
        r == 1 and dist.recv(X, 0),
        c10d._get_default_store().get("never"),
    ),
}
calls(deadlock, IN_A_CYCLE_ON_SIM, CYCLE, worlds="sim")
FOR_NOBODY = {
    "rank 0 waits in recv from rank 1 (returned)": lambda r: r == 0 and dist.recv(X, 1),
    "never come": lambda r: r == 0 and dist.recv(X),
}
calls(deadlock, FOR_NOBODY, size=3, worlds=BOTH)


@deadlock("the cycle: rank 2 → rank 3 → rank 2", size=4, worlds=BOTH)
def skipped_collective(rank):
    if rank != 2:
        dist.all_reduce(X)  # rank 0 waits in all_reduce for rank 2
    dist.recv(X, 3)  # rank 2 waits in recv from rank 3


@deadlock("the cycle: rank 1 → rank 2 → rank 1", size=4, worlds=BOTH)
def groups_used_in_another_order(rank):
    groups = [(ranks, dist.new_group(ranks)) for ranks in ([0, 1, 2], [1, 2, 3])]
    for ranks, group in groups[:: -1 if rank == 2 else 1]:
        if rank in ranks:
            dist.all_reduce(X, group=group)  # rank 1 waits in all_reduce for rank 2


@deadlock("rank 1 has already returned", worlds=BOTH)
def child_that_raises(rank):
    """It ends, and is no rank."""
    if rank == 1:
        if os.fork() == 0:
            raise ValueError("in a child")
        os.wait()
    else:
        dist.barrier()  # rank 0 waits in barrier for rank 1 (returned)


@deadlock("new_group([0, 1]) on rank 0, new_group([0]) on rank 1", worlds="gloo")
def groups_of_different_members(rank):
    dist.new_group([0] if rank else [0, 1])  # rank 0 waits in new_group for rank 1


@deadlock("rank 0 sends to rank 1 with tag 1, and rank 1 receives with tag 2", worlds=BOTH)
def different_tags(rank):
    if rank == 0:
        dist.send(X, 1, tag=1)  # rank 0 waits in send to rank 1
    dist.recv(X, 0, tag=2)  # rank 1 waits in recv from rank 0


@deadlock(CYCLE, worlds=BOTH)
def wait_inside_backward(rank):
    net = DDP(torch.nn.Linear(2, 2))
    loss = net(torch.ones(1, 2)).sum()
    if rank == 1:
        dist.recv(X, 0)  # rank 1 waits in recv from rank 0
    loss.backward()  # rank 0 waits in all_reduce for rank 1


@deadlock(CYCLE, worlds="gloo checked sim nccl")
def deadlock_in_an_unrecorded_block(rank):
    with unrecorded():
        dist.all_reduce(torch.ones(1))
        dist.recv(X, 1 - rank)  # rank 0 waits in recv from rank 1; rank 1 waits in recv from rank 0


@deadlock(CYCLE, worlds="sim")
def one_rank_outside_an_unrecorded_block(rank):
    if rank == 0:
        dist.recv(X, 1)  # rank 0 waits in recv from rank 1
    with unrecorded():
        dist.all_gather(row(X), X)  # rank 1 waits in all_gather for rank 0


@deadlock("Keep what isend", worlds="gloo")
def send_whose_work_is_dropped(rank):
    if rank == 1:
        time.sleep(0.2)
        dist.recv(X, 0)  # rank 1 waits in recv from rank 0 (returned)
    else:
        dist.isend(X, 1)  # rank 0 posted a send to rank 1 and dropped its work object


@deadlock(CYCLE, worlds="gloo")
def messages_that_nobody_receives(rank):
    if rank == 0:
        sent = dist.isend(X, 1, tag=3)  # a send to rank 1 with tag 3, and rank 1 posted no
        batch = [dist.P2POp(dist.isend, X, 1, tag=4)]
        works = dist.batch_isend_irecv(batch)  # a send to rank 1 with tag 4, and rank 1 posted no
    dist.recv(X, 1 - rank)
    wait_for([sent, *works])


@deadlock("4 bytes on ranks 0 and 2, barrier on rank 1", size=3, worlds="gloo torchrun")
def another_order(rank):
    calls = (lambda: dist.all_reduce(X)), dist.barrier
    for call in calls if rank != 1 else calls[::-1]:
        call()


@deadlock(
    "all_reduce of 8 bytes on rank 0, all_reduce of 12", "0 has already", size=3, worlds="gloo"
)
def sizes_with_which_gloo_waits_for_ever(rank):
    dist.all_reduce(torch.ones(2 + rank))  # rank 1 waits in all_reduce


# ---- deadlocks under NCCL's rules (sim/queues.py). Without them, the same programs end ----


@deadlock(
    "rank 0's receive from rank 1 waits in the queue behind its send to rank 1", worlds="nccl"
)
def exchange(rank):
    """One queue per communicator: an operation starts when those before it have ended."""
    x = torch.zeros(1)
    sent, received = dist.isend(X * rank, 1 - rank), dist.irecv(x, 1 - rank)
    received.wait()  # rank 0 waits in send to rank 1; rank 1 waits in send to rank 0
    sent.wait()
    return x.item() == 1 - rank


SMALL = {"network": p101.Network(eager=3)}
FAULTS["exchange, too large to be eager"] = FAULTS["exchange"]._replace(options=SMALL)


@deadlock("rank 1's receive from rank 0 waits in the queue behind its all_reduce", worlds="nccl")
def batch_behind_a_collective(rank):
    """Batches share the group's queue with its collectives."""
    x = torch.zeros(1)
    if rank == 0:
        sent = dist.batch_isend_irecv([dist.P2POp(dist.isend, X, 1)])
        dist.all_reduce(torch.ones(1))
        wait_for(sent)
    else:
        summed = dist.all_reduce(torch.ones(1), async_op=True)
        wait_for(dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0)]))
        summed.wait()
    return x.item() == rank


@deadlock("rank 1's receive from rank 0 is outside a batch", worlds="nccl")
def send_in_a_batch_and_receive_outside_one(rank):
    x = torch.zeros(1)
    batch = dist.batch_isend_irecv
    wait_for([dist.irecv(x, 0)] if rank else batch([dist.P2POp(dist.isend, X, 1)]))
    return x.item() == rank


@deadlock("the ranks call different operations: all_reduce and barrier", size=3, worlds="nccl")
def different_collectives(rank):
    if rank == 1:
        dist.barrier()  # rank 1 waits in barrier for ranks 0 and 2
    dist.all_reduce(torch.ones(1))  # rank 0 waits in all_reduce for rank 1


@deadlock(CYCLE, worlds="nccl")
def pytorch_issue_172668(rank):
    """Rank 0 has stages 0 and 2, rank 1 stages 1 and 3: both send one activation and receive
    another, in the order of their schedules, as torch.distributed.pipelining posts them.
    """
    x, peer = torch.zeros(1), 1 - rank
    sent = dist.batch_isend_irecv([dist.P2POp(dist.isend, X * rank, peer)])
    wait_for(sent + dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, peer)]))
    return x.item() == peer


END_WITHOUT_THESE_RULES = (
    exchange,
    batch_behind_a_collective,
    send_in_a_batch_and_receive_outside_one,
    pytorch_issue_172668,
)

# ---- ranks that end early ----


class Particular(Exception):
    """Its __init__ takes other arguments than it passes to Exception."""

    def __init__(self, one, two):
        super().__init__("particular words")
        self.both = one + two


class Speechless(RuntimeError):
    def __str__(self):
        raise ValueError("no words")


class Stubborn(Particular):
    def __reduce__(self):
        raise RuntimeError("no")


class AnotherFailed(RuntimeError):
    """What a trainer raises on the ranks that have not failed themselves."""

    def __init__(self, failed_rank):
        super().__init__(f"rank {failed_rank} failed")
        self.failed_rank = failed_rank


class UnpicklableReport(AnotherFailed):
    def __reduce__(self):
        raise RuntimeError("no")


def raises(error):
    raise error


SEEN = "…\n  It was last seen at …/faults.py:…: lambda: os."
OUTSIDE = "and its group of 2 has ranks 0 to 1"
ENDS = {  # rank 1's, while rank 0 is in a barrier
    "raised Particular: particular words\n": lambda: raises(Particular(1, 2)),
    "raised Stubborn: particular words\n": lambda: raises(Stubborn(1, 2)),
    "raised Speechless\n": lambda: raises(Speechless()),
    "raised AssertionError\n\nTraceback": lambda: raises(AssertionError()),
    "raised SystemExit: 5": lambda: exit(5),
    f"exited with code 3 {SEEN}": lambda: os._exit(3),
    f"exited with code 0 {SEEN}": lambda: os._exit(0),
    f"was killed by SIGKILL {SEEN}": lambda: os.kill(os.getpid(), 9),
    f"was killed by SIGABRT {SEEN}": lambda: os.abort(),
    f"raised ValueError: rank 1 sends to 2, {OUTSIDE}. On a ring": lambda: dist.send(X, 2),
    "returned a generator that can't be pickled": lambda: (i for i in range(3)),
    "receives from itself": lambda: dist.recv(X, 1),
}
for says, end in ENDS.items():
    worlds = "gloo" if "itself" in says else BOTH  # on sim that is a deadlock
    failed(f"rank 1 {says}", name=says[:40].strip(), rank=1, worlds=worlds)(
        lambda rank, end=end: end() if rank == 1 else dist.barrier()
    )


def reports(rank, report, end):
    """The other ranks say that rank 2 has failed, before it does so."""
    if rank != 2:
        raise report(2)
    p101.compute(1.0)  # of virtual time
    time.sleep(0.2)
    end()


def loss_is_nan():
    error = ValueError("the loss is NaN")
    error.failed_rank = 2  # type: ignore[attr-defined]
    raise error


for report, world in ((UnpicklableReport, "gloo"), (AnotherFailed, "sim")):
    for says, end in (("exited with code 3", lambda: os._exit(3)), ("the loss is", loss_is_nan)):
        failed(says, name=f"reported, {says}, {world}", rank=2, size=4, worlds=world)(
            lambda rank, report=report, end=end: reports(rank, report, end)
        )
for what, then in (("return", lambda: None), ("wait", dist.barrier)):
    failed("AnotherFailed: rank 2 failed", name=f"others {what}", rank=0, size=3, worlds=BOTH)(
        lambda rank, then=then: then() if rank else raises(AnotherFailed(2))
    )


@failed("rank 3 raised AnotherFailed: rank 3 failed", rank=3, size=4, worlds="sim")
def reports_that_lead_from_rank_to_rank(rank):
    p101.compute(float(rank))
    raise AnotherFailed(min(rank + 1, 3))


@failed("rank 3 raised ValueError: rank 3", rank=3, size=4, worlds="sim")
def first_failure_in_virtual_time(rank):
    p101.compute(10.0 - rank)
    raise ValueError(f"rank {rank}")


@failed("rank 0 raised ValueError: first", rank=0, size=3, worlds="sim")
def cancelled_twice(rank):
    if rank == 0:
        raise ValueError("first")
    try:
        dist.barrier()
    finally:
        dist.all_reduce(torch.ones(1))


@failed(
    "rank 0 raised KeyError: 'my own mistake'",
    'raise KeyError("my own',
    rank=0,
    size=3,
    worlds="gloo checked sim srun",
)
def exception_while_the_others_wait(rank):
    if rank == 0:
        raise KeyError("my own mistake")
    dist.barrier()


ENDED = "rank 1 (on … has ended before its program: its process was killed"


@failed("rank 1 was killed by SIGKILL", rank=1, size=3, worlds="gloo torchrun", job=(ENDED,))
def killed_while_the_others_wait(rank):
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()  # rank


@failed(
    "rank 1 exited with code 0",
    "at …: os._exit(0)",
    rank=1,
    worlds="gloo sim torchrun",
    job=(ENDED, "at …: os._exit(0)"),
)
def exit_on_a_thread_while_nobody_needs_the_rank(rank):
    """So no connection breaks."""

    def leave():
        if rank == 1:
            os._exit(0)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    X if dist.get_backend() == "sim" else threading.Event().wait()


@failed(
    worlds="srun",
    job=(
        "rank 0 (on localhost) has ended before its program",
        "rank 0] ends itself at …: os.kill(",
    ),
)
def killed_with_the_jobs_store(rank):
    os.kill(os.getpid(), 9) if rank == 0 else dist.barrier()


@failed(
    *("4000 bytes arrived, and 16 were expected", "trace=True"),
    rank=1,
    size=3,
    worlds="gloo torchrun",
    job=("rank 1 (on … is aborted by C++", "last seen at …faults.py:…dist.recv(torch.empty(4), 0)"),
)
def abort_of_gloo(rank):
    if rank == 0:
        dist.send(torch.ones(1000), 1)  # rank 0 sent 4000 bytes to rank 1
    elif rank == 1:
        dist.recv(torch.empty(4), 0)  # rank 1 expected 16 bytes
    dist.barrier()


@failed(
    *("SIGSEGV", "ctypes.string_at(0)"),
    rank=1,
    worlds="gloo torchrun",
    job=(ENDED, 'faults.py", line … in crash_in_a_library'),
)
def crash_in_a_library(rank):
    ctypes.string_at(0) if rank == 1 else dist.barrier()


@failed("calls broadcast with root 2, and its group of 2 has ranks 0 to 1")
def root_outside_the_group(rank):
    dist.broadcast(X, 2)  # both ranks raise it: the one that is heard first


@failed("rank 1 raised ValueError: 3", rank=1, size=3, worlds="sim")
def backward_that_raises(rank):
    """The other ranks are then blocked inside C++."""
    layers = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    loss = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=1e-6)(torch.ones(2, 3)).sum()
    if rank == 1:
        layers[0].weight.register_hook(lambda grad: raises(ValueError(3)))
    loss.backward()


@staged(
    p101.LaunchTimeout,
    "after 2 s",
    "rank 0 is at …/faults.py",
    worlds="gloo",
    options={"timeout": 2.0},
)
def time_limit(rank):
    if rank == 0:
        dist.irecv(X, 1)  # rank 0 posted a recv from rank 1 and dropped its work object
    while rank == 0:
        X.sum()


FAULTS["time limit on sim"] = Fault(
    lambda rank: [X.sum() for _ in iter(int, rank or 1)],
    p101.LaunchTimeout,
    ("0.5 s", "rank 0 is at …/faults.py"),
    worlds="sim",
    options={"timeout": 0.5},
)


@failed("only on its own thread", worlds="sim")
def another_thread_of_a_virtual_rank(rank):
    errors = []

    def elsewhere():
        try:
            dist.recv(X, 1 - rank)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    raise errors[0]


@failed("rank 1 uses torch's profiler while rank 0 does", size=3, worlds="sim")
def two_profilers_at_once(rank):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        dist.barrier()
