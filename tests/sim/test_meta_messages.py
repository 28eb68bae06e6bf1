"""Messages and collectives of ranks with virtual GPUs, whose tensors are on the meta device."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import parallel101 as p101
from parallel101.laboratory.ranks.simworker import virtual_device

from .programs import run, trace

on_gpus = partial(p101.launch, backend="sim", device="H100", world_size=2)


def swap(numel: int, **options) -> torch.Tensor:
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(numel, **options), torch.zeros(numel, **options)
    sent, received = dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return theirs


@pytest.mark.parametrize(("rules", "payload"), [("gloo", "payload"), ("nccl", True)])
def test_messages_have_their_bytes_and_no_numbers(rules, payload):
    def program():
        swap(5), swap(1 << 20)
        part = torch.empty(4, 4)[2:]  # its address is not 0
        dist.send(part, 1) if dist.get_rank() == 0 else dist.recv(part, 0)
        return swap(3, device="cpu").tolist(), swap(3, dtype=torch.int8), torch.ones(2) + 1

    launched = on_gpus(program, rules=rules, trace=payload)
    both = 20 + (4 << 20) + 12 + 3
    assert launched.trace.bytes_sent == [both + 32, both]
    with_numbers = [e.payload for e in launched.trace.events if e.kind == "send" and e.payload]
    assert with_numbers == ([[1.0] * 3] * 2 if payload == "payload" else [])
    numbers, received, total = launched.results[0]
    assert numbers == [1.0] * 3
    assert received.is_meta and received.shape == (3,) and total.is_meta


def test_a_message_from_anyone():
    def program():
        if dist.get_rank() == 0:
            return sorted(dist.recv(torch.empty(3)) for _ in range(2))
        dist.send(torch.empty(3), 0)

    assert on_gpus(program, world_size=3).results[0] == [1, 2]


def simulated(program, device, *args, **options) -> tuple[list, Counter[tuple], list[int]]:
    """The results, the calls of the record and the bytes sent, on virtual GPUs or without."""

    def rank_main(rank):
        with virtual_device(device):
            return program()

    result = run(rank_main, *args, **options)
    calls = (event for event in trace(result).events if event.kind != "span")
    record = Counter((e.rank, e.kind, e.nbytes, e.shape, e.dtype, e.group) for e in calls)
    return result.results, record, trace(result).bytes_sent


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
    there, here = (simulated(program, device, ranks, rules=rules) for device in (None, "H100"))
    assert here == there


def test_functional_collectives_send_nothing_on_meta_and_are_refused():
    def program():
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)

    with pytest.raises(p101.RankFailed, match=r"functional collectives .* send nothing"):
        on_gpus(program)
