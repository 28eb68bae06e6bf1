"""The collectives with their gradients: the forward and the backward of each, side by side.

    broadcast ↔ reduce     scatter ↔ gather     all_gather ↔ reduce_scatter     all_reduce, all_to_all ↔ themselves

One rule gives all of these: the objective of a parallel program is the sum over ranks of what each
rank calls `backward()` on. In the drawings g₀ is the gradient of rank 0's result. Every rank must
call backward, even one that got no part of the result: its zero-volume tensor belongs to the graph,
and its backward takes part in the messages.

Not here: send and receive (point_to_point.py), gradients that count once instead of once per rank
(replicated.py), and the messages themselves (parallel101/collectives).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Size, Tensor

from parallel101 import collectives as raw
from parallel101.autograd.differentiable import (
    differentiable,
    documented,
    placeholder,
    reverse,
    scaled,
)
from parallel101.collectives import barrier
from parallel101.mesh import GroupLike, group_of
from parallel101.mesh import split_sizes as balanced

__all__ = ["algorithms", "barrier"]
__all__ += [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


@documented(raw.broadcast)
def broadcast(
    x: Tensor, src: int = 0, *, group: GroupLike = None, algorithm: str = "auto"
) -> Tensor:
    """Backward: reduce(sum) to the root.

    root    x ─┬─▶ x        ∂x = g₀ + g₁ + g₂
    rank 1     ├─▶ x        (its own x was not used: ∂ = 0)
    rank 2     └─▶ x
    """

    def forward(x: Tensor) -> Tensor:
        return raw.broadcast(x, src, group=group, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return reduce(g, src, group=group, algorithm=reverse(algorithm))

    return differentiable("broadcast", x, group, forward, backward)


@documented(raw.reduce)
def reduce(
    x: Tensor, dst: int = 0, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto"
) -> Tensor:
    """Backward: broadcast from the root.

    root    a ─┬─▶ a+b+c        ∂a = g
    rank 1  b ─┤                ∂b = g        the root's g (of a mean: g / 3)
    rank 2  c ─┘                ∂c = g
    """

    def forward(x: Tensor) -> Tensor:
        return raw.reduce(x, dst, op, group=group, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return broadcast(
            placeholder(scaled(g, op, p), shape), dst, group=group, algorithm=reverse(algorithm)
        )

    return differentiable("reduce", x, group, forward, backward)


@documented(raw.scatter)
def scatter(
    x: Tensor,
    src: int = 0,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Backward: gather to the root.

    root    [a b c] ─┬─▶ a        ∂[a b c] = [g₀ g₁ g₂]
    rank 1           ├─▶ b        (its own x was not used: ∂ = 0)
    rank 2           └─▶ c
    """

    def forward(x: Tensor) -> Tensor:
        return raw.scatter(x, src, dim, group=group, sizes=sizes, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return gather(
            g, src, dim, group=group, sizes=sizes or balanced(shape[dim], p), algorithm=algorithm
        )

    return differentiable("scatter", x, group, forward, backward)


@documented(raw.gather)
def gather(
    x: Tensor,
    dst: int = 0,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Backward: scatter from the root.

    root    a ─┬─▶ [a b c]        ∂a = the first block of the root's g
    rank 1  b ─┤                  ∂b = the second
    rank 2  c ─┘                  ∂c = the third
    """

    def forward(x: Tensor) -> Tensor:
        return raw.gather(x, dst, dim, group=group, sizes=sizes, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        shards, whole = sizes or [shape[dim]] * p, list(shape)
        whole[dim] = sum(shards)
        return scatter(
            placeholder(g, whole), dst, dim, group=group, sizes=shards, algorithm=algorithm
        )

    return differentiable("gather", x, group, forward, backward)


@documented(raw.all_gather)
def all_gather(
    x: Tensor,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Backward: reduce_scatter(sum).

    rank 0  a ──▶ [a b c]        ∂a = the first blocks of g₀, g₁ and g₂, summed
    rank 1  b ──▶ [a b c]        ∂b = the second blocks
    rank 2  c ──▶ [a b c]        ∂c = the third blocks
    """

    def forward(x: Tensor) -> Tensor:
        return raw.all_gather(x, dim, group=group, sizes=sizes, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return reduce_scatter(g, dim, group=group, sizes=sizes, algorithm=reverse(algorithm))

    return differentiable("all_gather", x, group, forward, backward)


@documented(raw.reduce_scatter)
def reduce_scatter(
    x: Tensor,
    dim: int = 0,
    op: str = "sum",
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Backward: all_gather.

    rank 0  [a₀ a₁] ──▶ a₀+b₀        ∂[a₀ a₁] = [g₀ g₁]        (of a mean: divided by 2)
    rank 1  [b₀ b₁] ──▶ a₁+b₁        ∂[b₀ b₁] = [g₀ g₁]
    """

    def forward(x: Tensor) -> Tensor:
        return raw.reduce_scatter(x, dim, op, group=group, sizes=sizes, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        cut = sizes or balanced(shape[dim], p)
        return all_gather(
            scaled(g, op, p), dim, group=group, sizes=cut, algorithm=reverse(algorithm)
        )

    return differentiable("reduce_scatter", x, group, forward, backward)


@documented(raw.all_reduce)
def all_reduce(
    x: Tensor, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto"
) -> Tensor:
    """Backward: all_reduce(sum) again.

    rank 0  a ──▶ a+b+c        ∂a = g₀ + g₁ + g₂
    rank 1  b ──▶ a+b+c        ∂b = g₀ + g₁ + g₂        (of a mean: divided by 3)
    rank 2  c ──▶ a+b+c        ∂c = g₀ + g₁ + g₂
    """

    def forward(x: Tensor) -> Tensor:
        return raw.all_reduce(x, op, group=group, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return all_reduce(scaled(g, op, p), group=group, algorithm=algorithm)

    return differentiable("all_reduce", x, group, forward, backward)


@documented(raw.all_to_all)
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
    """Backward: all_to_all with its dims swapped.

    rank 0  [a₀ a₁] ──▶ [a₀ b₀]        each block of the gradients goes back to where
    rank 1  [b₀ b₁] ──▶ [a₁ b₁]        the block of x came from
    """

    def forward(x: Tensor) -> Tensor:
        return raw.all_to_all(
            x,
            split_dim,
            concat_dim,
            group=group,
            split_sizes=split_sizes,
            concat_sizes=concat_sizes,
            algorithm=algorithm,
        )

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        one_dim = split_dim % len(shape) == concat_dim % len(shape)
        cut = split_sizes or balanced(shape[split_dim], p)
        joined = (
            concat_sizes
            or [cut[group_of(group).position or 0] if one_dim else shape[concat_dim]] * p
        )
        # they refuse sizes along one dim: see their docstring
        back = "auto" if one_dim and algorithm in ("bruck", "torus") else algorithm
        return all_to_all(
            g,
            concat_dim,
            split_dim,
            group=group,
            split_sizes=joined,
            concat_sizes=cut,
            algorithm=back,
        )

    return differentiable("all_to_all", x, group, forward, backward)


def algorithms(operation: str) -> dict[str, Callable[..., Any]]:
    """The operation once for each of its algorithms, by name: `algorithms("all_reduce")["ring"](x)`
    is `all_reduce(x, algorithm="ring")`.

    These are the algorithms for any flat group of any size; "torus" and "two_level" need a mesh and
    are not among them. `inspect.getsource` shows the few lines of each. Raises ValueError for an
    unknown operation.
    """
    return raw.fixed(operation, globals())
