"""The second pair of gradients: what is replicated counts once, not once a rank (Megatron's f and g).

    x ─ copy_to_group ─▶ x each     ∂x = g₀ + g₁        each ─ reduce_from_group ─▶ sum     ∂ = g, as it is
    x ─ scatter_to_group ─▶ shards  ∂x = [g₀ g₁]        shards ─ gather_from_group ─▶ x     ∂ = my part of g

Here every rank goes on with the same values to the same loss, and that loss is the objective once: the gradient of a replicated
tensor is the same on every rank, and is the gradient. In `parallel101.autograd` each rank's `backward()` adds to the objective instead:
all_reduce(x).sum().backward() there gives p, reduce_from_group(x).sum().backward() here gives 1. Pick one of the two for a tensor.
Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor

from parallel101 import collectives as raw
from parallel101.autograd.linear import Collective, Linear, reduction_adjoint
from parallel101.collectives import torus
from parallel101.collectives.auto import check_algorithm
from parallel101.collectives.checks import cut_sizes, dim_of, nothing, tensor_of
from parallel101.collectives.comm import comm_of
from parallel101.mesh import GroupLike, group_of, split_sizes

__all__ = ["copy_to_group", "gather_from_group", "reduce_from_group", "scatter_to_group"]


class CopyToGroup(Collective):
    """
    rank 0  x ──▶ x        ∂x = g₀ + g₁
    rank 1  x ──▶ x        ∂x = g₀ + g₁
    """


def copy_to_group(x: Tensor, *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    """A replicated x goes into work that differs between the ranks: nothing to send now, an all_reduce(sum) backward. Megatron's f.

    Args:
        x: the same on every rank of the group.
        group: see `group_of`. On an idle rank x goes through, backward too, without a message.
        algorithm: of the all-reduce; see `all_reduce`.

    Returns a new contiguous tensor like x: what is done to it is not done to x. Raises ValueError or TypeError for what does not fit.
    """
    check_algorithm("all_reduce", algorithm, raw.TEXTBOOK["all_reduce"], torus.ALGORITHMS)

    def forward(x: Tensor) -> Tensor:
        x, members = tensor_of(x), group_of(group)
        torus.check_axes(algorithm, members)  # now, not in backward
        if members.position is not None:
            comm_of(members, x.device, "copy_to_group")
        return x.clone(memory_format=torch.contiguous_format)

    return CopyToGroup.of(
        x,
        group,
        forward,
        lambda g, shape, p: reduce_from_group(g, group=group, algorithm=algorithm),
        {"algorithm": algorithm},
    )


class ReduceFromGroup(Collective):
    """
    rank 0  a ──▶ a+b        ∂a = g
    rank 1  b ──▶ a+b        ∂b = g        the same g on both (of a mean: g / 2)
    """

    backward = Linear.backward  # sends nothing, and so may come in any order


def reduce_from_group(x: Tensor, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    """Partial results become one replicated result: an all_reduce, whose backward sends nothing. Megatron's g.

    Arguments, result and errors are those of `all_reduce`; "sum" and "mean" have a backward.
    """
    return ReduceFromGroup.of(
        x,
        group,
        lambda x: raw.all_reduce(x, op, group=group, algorithm=algorithm),
        reduction_adjoint("reduce_from_group", op, lambda g, shape, p: copy_to_group(g, group=group, algorithm=algorithm)),
        {"op": op, "algorithm": algorithm},
    )


class ScatterToGroup(Collective):
    """
    rank 0  [a b] ──▶ a        ∂[a b] = [g₀ g₁]
    rank 1  [a b] ──▶ b        ∂[a b] = [g₀ g₁]
    """


def scatter_to_group(
    x: Tensor, dim: int = 0, *, group: GroupLike = None, sizes: Sequence[int] | None = None, algorithm: str = "auto"
) -> Tensor:
    """Of a replicated x each rank keeps its own block along `dim`: nothing to send now, an all_gather backward.

    Args:
        x: the same on every rank of the group.
        dim: along which it is cut; negative counts from the end.
        group: see `group_of`. An idle rank gets a zero-volume tensor.
        sizes: the extent of every rank's block along `dim`, zeros included. Default: `split_sizes(x.shape[dim], p)`.
        algorithm: of the all-gather; see `all_gather`.

    Returns a new contiguous tensor. Raises ValueError or TypeError for what does not fit.
    """
    check_algorithm("all_gather", algorithm, raw.TEXTBOOK["all_gather"])

    def forward(x: Tensor) -> Tensor:
        x, members = tensor_of(x), group_of(group)
        axis = dim_of(x, dim)
        if members.position is None:
            return nothing(x)
        cut = cut_sizes(x, axis, split_sizes(x.shape[axis], members.size) if sizes is None else sizes, members)
        return x.split(cut, axis)[members.position].clone(memory_format=torch.contiguous_format)

    def adjoint(g: Tensor, shape: Size, p: int) -> Tensor:
        return gather_from_group(g, dim, group=group, sizes=sizes or split_sizes(shape[dim], p), algorithm=algorithm)

    return ScatterToGroup.of(x, group, forward, adjoint, {"dim": dim, "algorithm": algorithm})


class GatherFromGroup(Collective):
    """
    rank 0  a ──▶ [a b]        ∂a = the first block of g
    rank 1  b ──▶ [a b]        ∂b = the second        the same g on both
    """

    backward = Linear.backward  # sends nothing


def gather_from_group(
    x: Tensor, dim: int = 0, *, group: GroupLike = None, sizes: Sequence[int] | None = None, algorithm: str = "auto"
) -> Tensor:
    """Shards become one replicated tensor: an all_gather, whose backward keeps this rank's own part and sends nothing.

    Arguments, result and errors are those of `all_gather`.
    """

    def adjoint(g: Tensor, shape: Size, p: int) -> Tensor:
        return scatter_to_group(g, dim, group=group, sizes=sizes or [shape[dim]] * p, algorithm=algorithm)

    return GatherFromGroup.of(
        x,
        group,
        lambda x: raw.all_gather(x, dim, group=group, sizes=sizes, algorithm=algorithm),
        adjoint,
        {"dim": dim, "algorithm": algorithm, "uneven": dim},
    )
