"""Shared by the tests of the collectives: input values that all differ, and the results that
one process computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel101 as p101
from parallel101.mesh import split_sizes

ROOTED = {"broadcast": "src", "scatter": "src", "gather": "dst", "reduce": "dst"}
WITH_DIM = {"scatter", "gather", "all_gather", "reduce_scatter"}
REDUCING = {"reduce", "reduce_scatter", "all_reduce"}
MOVING = {"broadcast", "scatter", "gather", "all_gather", "all_to_all"}
OPS = ("sum", "mean", "product", "max", "min")


def on_backends(**world_sizes: Sequence[int]) -> Any:
    """Parametrize a test over (backend, world_size), on NCCL too."""
    nccl = [pytest.param("nccl", p, marks=pytest.mark.nccl(p)) for p in (1, 2, 4)]
    ours = [(backend, p) for backend, sizes in world_sizes.items() for p in sizes]
    return pytest.mark.parametrize(("backend", "world_size"), [*ours, *nccl])


def launched(function: Callable[..., Any], backend: str, world_size: int) -> list[Any]:
    """The results of all ranks. On sim they run under NCCL's rules, stricter than gloo's: messages
    in batches, each of which starts when the one before has ended (see sim/queues.py).
    """
    rules = "nccl" if backend == "sim" else "gloo"
    return p101.launch(function, world_size=world_size, backend=backend, rules=rules).results


def values(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Different at every index and on every rank (in float64 and int64).

    Whole numbers, small enough for exact sums in every dtype.
    """
    count = torch.arange(math.prod(shape)).reshape(tuple(shape))
    if dtype == torch.bool:
        return (count * 5 + rank * 3) % 7 < 3
    if dtype in (torch.float64, torch.float32, torch.int64, torch.int32):
        return (count * 7 + rank * 1009 + 1).to(dtype)
    return ((count * 5 + rank * 3) % 13 + 1).to(dtype)


def negative(x: Tensor) -> Tensor:
    """−x, lazily negated like the imaginary part of a conjugate: the memory holds x
    (contiguous, an even number of floats).
    """
    return (
        torch.view_as_complex(x.view(x.numel() // 2, 2))
        .conj()
        .imag.as_strided(x.shape, x.stride(), 0)
    )


def combined(xs: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack(list(xs))
    if op == "sum":
        return stacked.sum(0).to(xs[0].dtype)
    if op == "mean":
        return stacked.mean(0)
    if op == "product":
        return stacked.prod(0).to(xs[0].dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def answer(
    operation: str,
    xs: Sequence[Tensor],
    position: int,
    *,
    root: int = 0,
    dim: int = 0,
    op: str = "sum",
    sizes: Any = None,
) -> Tensor:
    """The result, computed by one process from all ranks' tensors.

    `sizes`: of the blocks or shards.
    """
    p, nothing = len(xs), xs[0].new_empty(0)
    if operation == "broadcast":
        return xs[root]
    if operation == "scatter":
        return xs[root].split(sizes or split_sizes(xs[root].shape[dim], p), dim)[position]
    if operation == "gather":
        return torch.cat(list(xs), dim) if position == root else nothing
    if operation == "reduce":
        return combined(xs, op) if position == root else nothing
    if operation == "all_gather":
        return torch.cat(list(xs), dim)
    if operation == "reduce_scatter":
        return combined(xs, op).split(sizes or split_sizes(xs[0].shape[dim], p), dim)[position]
    if operation == "all_reduce":
        return combined(xs, op)
    raise ValueError(operation)


def transposed(
    xs: Sequence[Tensor],
    position: int,
    split_dim: int,
    concat_dim: int,
    sizes: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """The result of an all-to-all, computed by one process. `sizes`: each rank's blocks."""
    blocks = sizes or [split_sizes(x.shape[split_dim], len(xs)) for x in xs]
    return torch.cat([x.split(cut, split_dim)[position] for x, cut in zip(xs, blocks)], concat_dim)


def arguments(operation: str, *, root: int = 0, dim: int = 0, op: str = "sum") -> dict[str, Any]:
    """Those of the arguments that the operation has."""
    given: dict[str, Any] = {}
    if operation in ROOTED:
        given[ROOTED[operation]] = root
    if operation in WITH_DIM:
        given["dim"] = dim
    if operation in REDUCING:
        given["op"] = op
    return given


def differs(
    expected: Tensor, function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> str | None:
    """What is wrong with a collective's result, or None.

    Checks values, shape, dtype, own memory, contiguity, and that x did not change.
    """
    before = x.clone()
    result = function(x, *args, **kwargs)
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return (
            f"{tuple(result.shape)} {result.dtype} and not {tuple(expected.shape)} {expected.dtype}"
        )
    if not torch.equal(result, expected):
        return f"{result.flatten().tolist()[:12]} and not {expected.flatten().tolist()[:12]}"
    if not torch.equal(x, before):
        return "x was changed"
    if result.numel() and result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return "the result lies in x's memory"
    return None if result.is_contiguous() else "the result is not contiguous"
