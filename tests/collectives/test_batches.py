"""Every algorithm under NCCL's rules: messages in batches, each of which starts when the one
before has ended (see sim/queues.py).
"""

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.collectives.asynchronous import (
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)
from tests.collectives.cases import MOVING, REDUCING, answer, arguments, differs, transposed, values

OPERATIONS = sorted(MOVING | REDUCING)


def wrong_results(cases):
    for name in p101.algorithms("barrier"):
        p101.barrier(algorithm=name)
    return [wrong for case in cases if (wrong := found(*case))], begun_and_finished()


def found(operation, algorithm, root):
    rank, p = dist.get_rank(), dist.get_world_size()
    shape = (2 * p + 1, 3)
    xs = [values(r, shape) for r in range(p)]
    if operation == "all_to_all":
        expected, given = transposed(xs, rank, 0, 1), {"split_dim": 0, "concat_dim": 1}
    else:
        expected, given = answer(operation, xs, rank, root=root), arguments(operation, root=root)
    if algorithm == "pipelined_chain":
        given["segment_bytes"] = 56
    wrong = differs(expected, getattr(p101, operation), xs[rank], algorithm=algorithm, **given)
    return wrong and f"{operation} {algorithm} root {root} on rank {rank}: {wrong}"


def begun_and_finished():
    """Three asynchronous collectives, which start their batches when they begin, whatever is
    waited for first.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    xs = [values(r, (2 * p, 3)) for r in range(p)]
    first, second = all_reduce_async(xs[rank]), reduce_scatter_async(xs[rank] * 2)
    third = all_gather_async(xs[rank][:2].contiguous())
    return [
        torch.equal(third.wait(), torch.cat([x[:2] for x in xs])),
        torch.equal(first.wait(), sum(xs)),
        torch.equal(second.wait(), answer("reduce_scatter", [x * 2 for x in xs], rank)),
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_every_algorithm_in_batches(world_size):
    cases = [
        (operation, name, root)
        for operation in OPERATIONS
        for name in p101.algorithms(operation)
        for root in (0, world_size - 1)
    ]
    results = p101.launch(
        wrong_results, cases, world_size=world_size, backend="sim", rules="nccl"
    ).results
    assert results == [([], [True] * 3)] * world_size
