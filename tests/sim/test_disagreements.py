"""On the sim, calls of torch's collectives that differ between ranks, or that torch cannot do,
are errors.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.record.errors import MisuseError
from tests.collectives.cases import negative

from .programs import simulate


@pytest.mark.parametrize(
    ("call", "rank", "words"),
    [
        (
            lambda r: dist.all_reduce(
                torch.ones(2), dist.ReduceOp.MAX if r == 1 else dist.ReduceOp.SUM
            ),
            1,
            "reductions.*sum.*max",
        ),
        (
            lambda r: dist.all_reduce(
                torch.ones(2, dtype=torch.int32 if r == 2 else torch.float32)
            ),
            2,
            "dtypes.*float32.*int32",
        ),
        (lambda r: dist.all_reduce(torch.ones((3, 2) if r == 0 else (2, 3))), 0, "shapes"),
        (lambda r: dist.broadcast(torch.ones(2), 1 if r == 2 else 0), 2, "roots.*0.*1"),
        (
            lambda r: dist.barrier() if r == 1 else dist.all_reduce(torch.ones(1)),
            1,
            "different operations: all_reduce and barrier",
        ),
        (
            lambda r: dist.all_reduce(torch.ones(4, 4).t()[:2] if r == 1 else torch.ones(2, 4)),
            1,
            "strided",
        ),
        (
            lambda r: dist.all_reduce(negative(torch.ones(2)) if r == 1 else torch.ones(2)),
            1,
            "lazily conjugated or negated",
        ),
        (
            lambda r: dist.reduce(
                torch.ones(2).cfloat().conj() if r == 1 else torch.ones(2).cfloat(), 0
            ),
            1,
            "lazily conjugated or negated",
        ),
        (
            lambda r: dist.all_to_all_single(
                torch.empty(3), torch.ones(3), [1, 1, 1], [1, 1, 1] if r else [2, 1, 0]
            ),
            0,
            "expects 4 bytes",
        ),
    ],
    ids=[
        "reduction",
        "dtype",
        "shape",
        "root",
        "operation",
        "strided",
        "negated",
        "conjugated",
        "splits",
    ],
)
def test_calls_that_differ_between_ranks_are_misuse(call, rank, words):
    result = simulate(lambda r: call(r), 3)
    assert isinstance(result.error, MisuseError) and result.failed_rank is None
    assert result.error.rank == rank and __file__ in str(result.error)
    with pytest.raises(MisuseError, match=words):
        raise result.error


def test_calls_that_differ_are_reported_instead_of_the_deadlock_they_cause():
    """Two of three ranks make calls that differ, and the third makes none."""
    result = simulate(lambda r: None if r == 2 else dist.all_reduce(torch.ones(1 + r)), 3)
    assert isinstance(result.error, MisuseError) and "shapes" in str(result.error)


def test_an_average_of_integers_is_refused():
    result = simulate(
        lambda r: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG), 2
    )
    with pytest.raises(ValueError, match=r"average of torch\.int64"):
        raise result.error


def test_an_average_of_integers_under_nccls_rules_is_rounded_towards_zero():
    """As Lightning asks for, when it logs with sync_dist on NCCL."""

    def program(r):
        x = torch.tensor([3, -3]) if r == 0 else torch.tensor([0, 0])
        dist.all_reduce(x, dist.ReduceOp.AVG)
        return x.tolist()

    assert simulate(program, 2, rules="nccl").results == [[1, -1]] * 2


def test_a_reduction_that_torch_does_not_have_is_an_error_and_no_hang():
    result = simulate(
        lambda r: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.SUM), 2
    )
    assert result.error is None  # torch sends complex numbers as pairs
    result = simulate(lambda r: dist.reduce(torch.ones(2), 0, dist.ReduceOp.BAND), 2)
    with pytest.raises(Exception, match="whole numbers"):
        raise result.error


def test_a_tensor_changed_between_a_collective_and_its_wait():
    def program(rank):
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        if rank == 1:
            x.add_(1)
        work.wait()

    error = simulate(program, 2).error
    assert isinstance(error, MisuseError) and error.rank == 1 and "changed" in str(error)
