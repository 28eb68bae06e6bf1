"""Messages and collectives of ranks with virtual GPUs, whose tensors are on the meta device."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import parallel101 as p101

on_gpus = partial(p101.launch, backend="sim", device="H100", world_size=2)


def swap(numel: int, **options) -> torch.Tensor:
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(numel, **options), torch.zeros(numel, **options)
    sent, received = dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return theirs


@pytest.mark.parametrize(("rules", "trace"), [("gloo", "payload"), ("nccl", True)])
def test_messages_have_their_bytes_and_no_numbers(rules, trace):
    def program():
        swap(5), swap(1 << 20)
        part = torch.empty(4, 4)[2:]  # its address is not 0
        dist.send(part, 1) if dist.get_rank() == 0 else dist.recv(part, 0)
        return swap(3, device="cpu").tolist(), swap(3, dtype=torch.int8), torch.ones(2) + 1

    run = on_gpus(program, rules=rules, trace=trace)
    both = 20 + (4 << 20) + 12 + 3
    assert run.trace.bytes_sent == [both + 32, both]
    with_numbers = [e.payload for e in run.trace.events if e.kind == "send" and e.payload]
    assert with_numbers == ([[1.0] * 3] * 2 if trace == "payload" else [])
    numbers, received, total = run.results[0]
    assert numbers == [1.0] * 3
    assert received.is_meta and received.shape == (3,) and total.is_meta


def test_a_message_from_anyone():
    def program():
        if dist.get_rank() == 0:
            return sorted(dist.recv(torch.empty(3)) for _ in range(2))
        dist.send(torch.empty(3), 0)

    assert on_gpus(program, world_size=3).results[0] == [1, 2]


def record(run: p101.Run) -> Counter[tuple]:
    events = (event for event in run.trace.events if event.kind != "span")
    return Counter((e.rank, e.kind, e.nbytes, e.shape, e.dtype, e.group) for e in events)


def torchs_collectives() -> tuple:
    n, rank = dist.get_world_size(), dist.get_rank()
    x, rows = torch.ones(6, n), torch.ones(n * 4)
    dist.all_reduce(x), dist.broadcast(x, 1), dist.reduce(x, 0)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    dist.all_gather([torch.empty(4) for _ in range(n)], rows[:4])
    dist.all_gather_single(torch.empty(n * 4), rows[:4])
    dist.reduce_scatter_single(torch.empty(4), rows)
    dist.reduce_scatter(torch.empty(4), list(rows.split(4)))
    dist.all_to_all_single(torch.empty(n * 4), rows)
    dist.all_to_all([torch.empty(4) for _ in range(n)], list(rows.split(4)))
    dist.gather(rows, [torch.empty(n * 4) for _ in range(n)] if rank == 0 else None)
    dist.scatter(torch.empty(4), list(rows.split(4)) if rank == 0 else None)
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x, async_op=True).get_future().wait()
    dist.barrier()
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    numbers = torch.ones(2, device="cpu")
    dist.all_reduce(numbers)
    return objects, numbers.tolist(), x.shape


OPERATIONS = ("broadcast", "scatter", "gather", "reduce")
OPERATIONS += ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def own_collectives() -> list:
    found = [results_of(name) for name in OPERATIONS]
    p101.barrier()
    sizes = [position + 1 for position in range(dist.get_world_size())]
    found.append(p101.all_gather(torch.ones(dist.get_rank() + 1), sizes=sizes).shape)
    return found + [p101.all_reduce(torch.ones(7), op).shape for op in ("max", "mean")]


def results_of(name: str) -> list:
    """Of each of its algorithms, forward and backward."""
    found = []
    for algorithm in p101.algorithms(name):
        x = torch.ones(12, 5, requires_grad=True)
        y = getattr(p101, name)(x, algorithm=algorithm)
        y.sum().backward()
        found.append((algorithm, y.shape, x.grad.shape))
    return found


@pytest.mark.parametrize("program", [torchs_collectives, own_collectives])
@pytest.mark.parametrize(("ranks", "rules"), [(4, "gloo"), (3, "nccl")])
def test_collectives_are_recorded_as_with_numbers(program, ranks, rules):
    launch = partial(p101.launch, program, world_size=ranks, backend="sim", rules=rules)
    there, here = launch(), launch(device="H100")
    assert here.results == there.results
    assert record(here) == record(there)
    assert here.trace.bytes_sent == there.trace.bytes_sent


def test_functional_collectives_send_nothing_on_meta_and_are_refused():
    def program():
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)

    with pytest.raises(p101.RankFailed, match=r"functional collectives .* send nothing"):
        on_gpus(program)
