"""Messages in batches, as NCCL needs them: those posted between two waits start together, and in the same order on all ranks.

On NCCL a batch is one kernel on the group's stream, and the next batch starts when it has ended. These tests imitate that on sim: they wait
for a batch as soon as it has started. So an order of batches that would deadlock on NCCL is a DeadlockError here.
"""

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.collectives import comm as comm_module
from parallel101.collectives.asynchronous import all_gather_async, all_reduce_async, reduce_scatter_async
from tests.collectives.cases import MOVING, REDUCING, answer, arguments, differs, transposed, values

OPERATIONS = sorted(MOVING | REDUCING)


def as_on_nccl():
    """From now on this rank's messages start in batches, one after the other. Returns a list to which each batch adds its size."""
    flush, sizes = comm_module.Comm.flush, []

    def flush_and_wait(self):
        posted = list(self._batch)
        if not posted:
            return
        sizes.append(len(posted))
        flush(self)
        posted[0].wait()

    comm_module.batches, comm_module.Comm.flush = lambda backend: True, flush_and_wait
    return sizes


def in_batches(cases):
    sizes = as_on_nccl()
    return [wrong for case in cases if (wrong := found(*case))], sizes


def found(operation, algorithm, root):
    rank, p = dist.get_rank(), dist.get_world_size()
    shape = (2 * p + 1, 3)
    xs = [values(r, shape) for r in range(p)]
    if operation == "all_to_all":
        expected, given = transposed(xs, rank, 0, 1), {"split_dim": 0, "concat_dim": 1}
    else:
        expected, given = answer(operation, xs, rank, root=root), arguments(operation, root=root)
    wrong = differs(expected, getattr(p101, operation), xs[rank], algorithm=algorithm, **given)
    return wrong and f"{operation} {algorithm} root {root} on rank {rank}: {wrong}"


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_every_algorithm_in_batches(world_size):
    cases = [(operation, name, root) for operation in OPERATIONS for name in p101.algorithms(operation) for root in (0, world_size - 1)]
    for wrong, sizes in p101.launch(in_batches, cases, world_size=world_size, backend="sim").results:
        assert not wrong
        assert max(sizes) > 1


def begun_and_finished():
    as_on_nccl()
    rank, p = dist.get_rank(), dist.get_world_size()
    xs = [values(r, (2 * p, 3)) for r in range(p)]
    first, second = all_reduce_async(xs[rank]), reduce_scatter_async(xs[rank] * 2)
    third = all_gather_async(xs[rank][:2].contiguous())
    return [
        torch.equal(third.wait(), torch.cat([x[:2] for x in xs])),
        torch.equal(first.wait(), sum(xs)),
        torch.equal(second.wait(), answer("reduce_scatter", [x * 2 for x in xs], rank)),
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_asynchronous_collectives_start_their_batches_when_they_begin(world_size):
    assert p101.launch(begun_and_finished, world_size=world_size, backend="sim").results == [[True] * 3] * world_size
