"""Each collective beside its adjoint: what goes forward as the one comes back as the other.

    broadcast ↔ reduce     scatter ↔ gather     all_gather ↔ reduce_scatter     all_reduce, all_to_all ↔ themselves

One rule fixes them all: the objective of a parallel program is the sum over ranks of what each rank calls `backward()` on. Every rank
must call it, one that got nothing too: its zero-volume result is part of the graph, and its backward takes part in the messages.
Beside this file: `point_to_point` (send ↔ receive), and `replicated` (gradients that count once and not once a rank: Megatron's f and g).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Size, Tensor

from parallel101 import collectives as raw
from parallel101.autograd.linear import Collective, documented, mirrored, reduction_adjoint, stand_in
from parallel101.collectives import barrier
from parallel101.mesh import GroupLike, group_of
from parallel101.mesh import split_sizes as balanced

__all__ = ["algorithms", "barrier"]
__all__ += ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]


class Broadcast(Collective):
    """
    root    x ─┬─▶ x        ∂x = g₀ + g₁ + g₂
    rank 1     ├─▶ x        (its own x had no part in it: ∂ = 0)
    rank 2     └─▶ x
    """


@documented(raw.broadcast, backward="reduce(sum) to the root, zeros elsewhere")
def broadcast(x: Tensor, src: int = 0, *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    return Broadcast.of(
        x,
        group,
        lambda x: raw.broadcast(x, src, group=group, algorithm=algorithm),
        lambda g, shape, p: reduce(g, src, group=group, algorithm=mirrored(algorithm)),
        {"src": src, "algorithm": algorithm},
    )


class Reduce(Collective):
    """
    root    a ─┬─▶ a+b+c        ∂a = g
    rank 1  b ─┤                ∂b = g        the root's, broadcast (of a mean: g / 3)
    rank 2  c ─┘                ∂c = g
    """


@documented(raw.reduce, backward="broadcast from the root")
def reduce(x: Tensor, dst: int = 0, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    return Reduce.of(
        x,
        group,
        lambda x: raw.reduce(x, dst, op, group=group, algorithm=algorithm),
        reduction_adjoint("reduce", op, lambda g, shape, p: broadcast(stand_in(g, shape), dst, group=group, algorithm=mirrored(algorithm))),
        {"dst": dst, "op": op, "algorithm": algorithm},
    )


class Scatter(Collective):
    """
    root    [a b c] ─┬─▶ a        ∂[a b c] = [g₀ g₁ g₂], gathered
    rank 1           ├─▶ b
    rank 2           └─▶ c
    """


@documented(raw.scatter, backward="gather to the root, zeros elsewhere")
def scatter(
    x: Tensor, src: int = 0, dim: int = 0, *, group: GroupLike = None, sizes: Sequence[int] | None = None, algorithm: str = "auto"
) -> Tensor:
    return Scatter.of(
        x,
        group,
        lambda x: raw.scatter(x, src, dim, group=group, sizes=sizes, algorithm=algorithm),
        lambda g, shape, p: gather(g, src, dim, group=group, sizes=sizes or balanced(shape[dim], p), algorithm=algorithm),
        {"src": src, "dim": dim, "algorithm": algorithm},
    )


class Gather(Collective):
    """
    root    a ─┬─▶ [a b c]        ∂a = the first block of g
    rank 1  b ─┤                  ∂b = the second         scattered by the root
    rank 2  c ─┘                  ∂c = the third
    """


@documented(raw.gather, backward="scatter from the root")
def gather(
    x: Tensor, dst: int = 0, dim: int = 0, *, group: GroupLike = None, sizes: Sequence[int] | None = None, algorithm: str = "auto"
) -> Tensor:
    def adjoint(g: Tensor, shape: Size, p: int) -> Tensor:
        shards = sizes or [shape[dim]] * p
        whole = list(shape)
        whole[dim] = sum(shards)
        return scatter(stand_in(g, whole), dst, dim, group=group, sizes=shards, algorithm=algorithm)

    return Gather.of(
        x,
        group,
        lambda x: raw.gather(x, dst, dim, group=group, sizes=sizes, algorithm=algorithm),
        adjoint,
        {"dst": dst, "dim": dim, "algorithm": algorithm, "uneven": dim},
    )


class AllGather(Collective):
    """
    rank 0  a ──▶ [a b c]        ∂a = the first blocks of g₀, g₁ and g₂, summed
    rank 1  b ──▶ [a b c]        ∂b = the second
    rank 2  c ──▶ [a b c]        ∂c = the third
    """


@documented(raw.all_gather, backward="reduce_scatter(sum)")
def all_gather(x: Tensor, dim: int = 0, *, group: GroupLike = None, sizes: Sequence[int] | None = None, algorithm: str = "auto") -> Tensor:
    return AllGather.of(
        x,
        group,
        lambda x: raw.all_gather(x, dim, group=group, sizes=sizes, algorithm=algorithm),
        lambda g, shape, p: reduce_scatter(g, dim, group=group, sizes=sizes, algorithm=mirrored(algorithm)),
        {"dim": dim, "algorithm": algorithm, "uneven": dim},
    )


class ReduceScatter(Collective):
    """
    rank 0  [a₀ a₁] ──▶ a₀+b₀        ∂[a₀ a₁] = [g₀ g₁]
    rank 1  [b₀ b₁] ──▶ a₁+b₁        ∂[b₀ b₁] = [g₀ g₁]        all-gathered (of a mean: over 2)
    """


@documented(raw.reduce_scatter, backward="all_gather")
def reduce_scatter(
    x: Tensor, dim: int = 0, op: str = "sum", *, group: GroupLike = None, sizes: Sequence[int] | None = None, algorithm: str = "auto"
) -> Tensor:
    def adjoint(g: Tensor, shape: Size, p: int) -> Tensor:
        return all_gather(g, dim, group=group, sizes=sizes or balanced(shape[dim], p), algorithm=mirrored(algorithm))

    return ReduceScatter.of(
        x,
        group,
        lambda x: raw.reduce_scatter(x, dim, op, group=group, sizes=sizes, algorithm=algorithm),
        reduction_adjoint("reduce_scatter", op, adjoint),
        {"dim": dim, "op": op, "algorithm": algorithm},
    )


class AllReduce(Collective):
    """
    rank 0  a ──▶ a+b+c        ∂a = g₀ + g₁ + g₂
    rank 1  b ──▶ a+b+c        ∂b = g₀ + g₁ + g₂        (of a mean: over 3)
    rank 2  c ──▶ a+b+c        ∂c = g₀ + g₁ + g₂
    """


@documented(raw.all_reduce, backward="all_reduce again")
def all_reduce(x: Tensor, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    return AllReduce.of(
        x,
        group,
        lambda x: raw.all_reduce(x, op, group=group, algorithm=algorithm),
        reduction_adjoint("all_reduce", op, lambda g, shape, p: all_reduce(g, group=group, algorithm=algorithm)),
        {"op": op, "algorithm": algorithm},
    )


class AllToAll(Collective):
    """
    rank 0  [a₀ a₁] ──▶ [a₀ b₀]        ∂[a₀ a₁] = each block of the gradients to where it came from
    rank 1  [b₀ b₁] ──▶ [a₁ b₁]        ∂[b₀ b₁]
    """


@documented(raw.all_to_all, backward="all_to_all with its dims swapped")
def all_to_all(
    x: Tensor,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    group: GroupLike = None,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    def adjoint(g: Tensor, shape: Size, p: int) -> Tensor:
        one_dim = split_dim % len(shape) == concat_dim % len(shape)
        cut = split_sizes or balanced(shape[split_dim], p)
        joined = concat_sizes or [cut[group_of(group).position or 0] if one_dim else shape[concat_dim]] * p
        back = "auto" if one_dim and algorithm == "bruck" else algorithm  # bruck wants to know every block: see its docstring
        return all_to_all(g, concat_dim, split_dim, group=group, split_sizes=joined, concat_sizes=cut, algorithm=back)

    def forward(x: Tensor) -> Tensor:
        return raw.all_to_all(
            x, split_dim, concat_dim, group=group, split_sizes=split_sizes, concat_sizes=concat_sizes, algorithm=algorithm
        )

    return AllToAll.of(
        x, group, forward, adjoint, {"split_dim": split_dim, "concat_dim": concat_dim, "algorithm": algorithm, "uneven": concat_dim}
    )


def algorithms(operation: str) -> dict[str, Callable[..., Any]]:
    """The operation once for each of its algorithms, by name: `algorithms("all_reduce")["ring"](x)` is `all_reduce(x, algorithm="ring")`.

    Those that serve any flat group of any size; all_reduce's "two_level" and "torus" want a mesh and are not among them.
    `inspect.getsource` of each shows its own few lines. Raises ValueError for an unknown operation.
    """
    return raw.fixed(operation, globals())
