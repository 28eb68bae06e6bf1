"""The collectives between replicated and sharded tensors, with gradients that count once.

    x ─ copy_to_group ─▶ x on each rank          ∂x = g₀ + g₁         Megatron's f
    a, b ─ reduce_from_group ─▶ a+b              ∂a = g               Megatron's g
    x ─ scatter_to_group ─▶ shards               ∂x = [g₀ g₁]
    a, b ─ gather_from_group ─▶ [a b]            ∂a = its block of g

Here every rank computes the same loss from the same values, and that loss counts once. So the
gradient of a replicated tensor is the same on every rank. In collectives.py the losses of all ranks
are added instead. With p ranks, all_reduce(x).sum().backward() gives p there, and
reduce_from_group(x).sum().backward() gives 1 here. Use one of the two for a tensor, not both.

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv
2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor

from parallel101 import collectives as raw
from parallel101.autograd.differentiable import differentiable, scaled
from parallel101.collectives.auto import check_algorithm
from parallel101.collectives.checks import begin, block_sizes, dim_of, nothing, tensor_of
from parallel101.mesh import Group, GroupLike, group_of, split_sizes

__all__ = ["copy_to_group", "gather_from_group", "reduce_from_group", "scatter_to_group"]


def copy_to_group(x: Tensor, *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    """Return a copy of a replicated x, for work that differs between the ranks. Megatron's f.

        rank 0  x ──▶ x        ∂x = g₀ + g₁
        rank 1  x ──▶ x        ∂x = g₀ + g₁

    Forward sends nothing; backward: all_reduce(sum).

    Args:
        x: the same on every rank of the group.
        group: see `group_of`. On an idle rank x and its gradient pass unchanged, without a message.
        algorithm: of the all-reduce; see `all_reduce`.

    Returns a new contiguous tensor like x, so x does not change with it. Raises ValueError or
    TypeError for wrong arguments.
    """

    def forward(x: Tensor) -> Tensor:
        x, members = tensor_of(x), group_of(group)
        _check_backward("all_reduce", algorithm, members)
        if members.position is not None:
            begin("copy_to_group", members, x, algorithm=algorithm)
        return x.clone(memory_format=torch.contiguous_format)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return reduce_from_group(g, group=group, algorithm=algorithm)

    return differentiable("copy_to_group", x, group, forward, backward)


def reduce_from_group(
    x: Tensor, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto"
) -> Tensor:
    """Return the sum (or mean, …) of partial results, replicated on every rank. Megatron's g.

        rank 0  a ──▶ a+b        ∂a = g
        rank 1  b ──▶ a+b        ∂b = g        the same g on both (of a mean: g / 2)

    Forward: all_reduce, which has the same arguments, result and errors. Backward sends nothing;
    only "sum" and "mean" have one.
    """

    def forward(x: Tensor) -> Tensor:
        return raw.all_reduce(x, op, group=group, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return copy_to_group(scaled(g, op, p), group=group, algorithm=algorithm)

    return differentiable("reduce_from_group", x, group, forward, backward, local_backward=True)


def scatter_to_group(
    x: Tensor,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Return this rank's own block of a replicated x along `dim`.

        rank 0  [a b] ──▶ a        ∂[a b] = [g₀ g₁]
        rank 1  [a b] ──▶ b        ∂[a b] = [g₀ g₁]

    Forward sends nothing; backward: all_gather.

    Args:
        x: the same on every rank of the group.
        dim: the dim that is split; negative counts from the end.
        group: see `group_of`. An idle rank gets a zero-volume tensor.
        sizes: the size of every rank's block along `dim`, by position, zeros included. Default:
            `split_sizes(x.shape[dim], p)`.
        algorithm: of the all-gather; see `all_gather`.

    Returns a new contiguous tensor. Raises ValueError or TypeError for wrong arguments.
    """

    def forward(x: Tensor) -> Tensor:
        x, members = tensor_of(x), group_of(group)
        _check_backward("all_gather", algorithm, members)
        axis = dim_of(x, dim)
        if members.position is None:
            return nothing(x)
        cut = block_sizes(x, axis, sizes, members)
        begin("scatter_to_group", members, x, dim=axis, sizes=cut, algorithm=algorithm)
        return x.split(cut, axis)[members.position].clone(memory_format=torch.contiguous_format)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return gather_from_group(
            g, dim, group=group, sizes=sizes or split_sizes(shape[dim], p), algorithm=algorithm
        )

    return differentiable("scatter_to_group", x, group, forward, backward)


def gather_from_group(
    x: Tensor,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Return the ranks' shards joined to one replicated tensor.

        rank 0  a ──▶ [a b]        ∂a = the first block of g
        rank 1  b ──▶ [a b]        ∂b = the second        the same g on both

    Forward: all_gather, which has the same arguments, result and errors. Backward keeps this rank's
    own block and sends nothing.
    """

    def forward(x: Tensor) -> Tensor:
        return raw.all_gather(x, dim, group=group, sizes=sizes, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return scatter_to_group(
            g, dim, group=group, sizes=sizes or [shape[dim]] * p, algorithm=algorithm
        )

    return differentiable("gather_from_group", x, group, forward, backward, local_backward=True)


def _check_backward(operation: str, algorithm: str, group: Group) -> None:
    """Check in forward, which sends nothing, the algorithm with which backward will send."""
    check_algorithm(operation, algorithm, group, raw.TEXTBOOK[operation], raw.ON_A_MESH[operation])
