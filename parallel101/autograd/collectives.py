"""The collectives with their gradients: the forward and the backward of each, side by side.

    broadcast ↔ reduce       scatter ↔ gather       all_gather ↔ reduce_scatter
    all_reduce ↔ itself      all_to_all ↔ itself

One rule gives all of these: the objective of a parallel program is the sum over ranks of what each
rank calls `backward()` on. In the drawings g₀ is the gradient of rank 0's result. Every rank must
call backward, even one that got no part of the result: its zero-volume tensor belongs to the graph,
and its backward takes part in the messages. So x requires a gradient on all ranks of the group or
on none.

`src` and `dst` are positions in the group, not global ranks. A rank that the group leaves out is
idle: it gets a zero-volume tensor and sends nothing. Wrong arguments are a ValueError or TypeError
on every rank, before any message.

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
    placeholder,
    reverse,
    scaled,
)
from parallel101.collectives import barrier
from parallel101.mesh import GroupLike, group_of
from parallel101.mesh import split_sizes as balanced

__all__ = ["algorithms", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast"]
__all__ += ["gather", "reduce", "reduce_scatter", "scatter"]


def broadcast(
    x: Tensor,
    src: int = 0,
    *,
    group: GroupLike = None,
    algorithm: str = "auto",
    segment_bytes: int | None = None,
) -> Tensor:
    """Return the root's array on every rank.

        root    x ─┬─▶ x        ∂x = g₀ + g₁ + g₂
        rank 1     ├─▶ x        ∂x = 0, because its own x was not used
        rank 2     └─▶ x        ∂x = 0

    Backward, called by every rank: reduce(sum) to the root.

    Args:
        x: at the root the array, of any dtype. On the other ranks only its shape and dtype count.
        src: the root's position in the group, not its global rank.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        algorithm: "auto" (see collectives/auto.py) or one of `algorithms("broadcast")`.
        segment_bytes: of "pipelined_chain" only: the bytes of a segment, cut to whole elements; the
            same on every rank. Default: the best for x's size (see collectives/segments.py).

    Returns a new contiguous tensor like x. Raises ValueError or TypeError for wrong arguments.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.2.

    Example:
        >>> def program():
        ...     return p101.broadcast(torch.full((2,), dist.get_rank()), src=1)
        >>> p101.launch(program, world_size=3, backend="sim").results
        [tensor([1, 1]), tensor([1, 1]), tensor([1, 1])]
    """

    def forward(x: Tensor) -> Tensor:
        return raw.broadcast(x, src, group=group, algorithm=algorithm, segment_bytes=segment_bytes)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return reduce(
            g, src, group=group, algorithm=reverse(algorithm), segment_bytes=segment_bytes
        )

    return differentiable("broadcast", x, group, forward, backward)


def reduce(
    x: Tensor,
    dst: int = 0,
    op: str = "sum",
    *,
    group: GroupLike = None,
    algorithm: str = "auto",
    segment_bytes: int | None = None,
) -> Tensor:
    """Return the arrays of all ranks combined by `op`, at the root.

        root    a ─┬─▶ a+b+c        ∂a = g
        rank 1  b ─┤                ∂b = g        the root's g (of a mean: g / 3)
        rank 2  c ─┘                ∂c = g

    Backward, called by every rank: broadcast from the root. Only "sum" and "mean" have one.

    Args:
        x: this rank's array, of the same shape and dtype on every rank.
        dst: the root's position in the group, not its global rank.
        op: "sum", "mean", "product", "max" or "min". collectives/reductions.py says for which
            dtypes.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        algorithm: "auto" (see collectives/auto.py) or one of `algorithms("reduce")`.
        segment_bytes: of "pipelined_chain" only, as in `broadcast`.

    Returns at the root a new contiguous tensor like x, elsewhere a zero-volume one. Raises
    ValueError or TypeError for wrong arguments.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.4.

    Example:
        >>> def program():
        ...     return p101.reduce(torch.tensor([1, dist.get_rank()]))
        >>> p101.launch(program, world_size=3, backend="sim").results
        [tensor([3, 3]), tensor([], dtype=torch.int64), tensor([], dtype=torch.int64)]
    """

    def forward(x: Tensor) -> Tensor:
        return raw.reduce(x, dst, op, group=group, algorithm=algorithm, segment_bytes=segment_bytes)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return broadcast(
            placeholder(scaled(g, op, p), shape),
            dst,
            group=group,
            algorithm=reverse(algorithm),
            segment_bytes=segment_bytes,
        )

    return differentiable("reduce", x, group, forward, backward)


def scatter(
    x: Tensor,
    src: int = 0,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Return this rank's block of the root's array, which is split along `dim`.

        root    [a b c] ─┬─▶ a        ∂[a b c] = [g₀ g₁ g₂]
        rank 1           ├─▶ b        ∂x = 0, because its own x was not used
        rank 2           └─▶ c        ∂x = 0

    Backward, called by every rank: gather to the root.

    Args:
        x: at the root the whole array. On the other ranks only its shape (the whole one) and dtype
            count.
        src: the root's position in the group, not its global rank.
        dim: the dim that is split; negative counts from the end.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        sizes: the size of every rank's block along `dim`, by position, zeros included. Default:
            `split_sizes(x.shape[dim], p)`.
        algorithm: "auto" (see collectives/auto.py) or one of `algorithms("scatter")`.

    Returns a new contiguous tensor of x's shape with sizes[position] along `dim`. Raises ValueError
    or TypeError for wrong arguments. The root sends n(p−1)/p bytes, where x has n.
    Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice,
    and experience" (2007), section 4.

    Example:
        >>> def program():
        ...     return p101.scatter(torch.arange(6))
        >>> p101.launch(program, world_size=3, backend="sim").results
        [tensor([0, 1]), tensor([2, 3]), tensor([4, 5])]
    """

    def forward(x: Tensor) -> Tensor:
        return raw.scatter(x, src, dim, group=group, sizes=sizes, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return gather(
            g, src, dim, group=group, sizes=sizes or balanced(shape[dim], p), algorithm=algorithm
        )

    return differentiable("scatter", x, group, forward, backward)


def gather(
    x: Tensor,
    dst: int = 0,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Return the shards of all ranks joined along `dim` in the order of the group, at the root.

        root    a ─┬─▶ [a b c]        ∂a = the first block of the root's g
        rank 1  b ─┤                  ∂b = the second
        rank 2  c ─┘                  ∂c = the third

    Backward, called by every rank: scatter from the root.

    Args:
        x: this rank's shard, of any dtype. Shapes may differ between ranks along `dim` only, and
            then `sizes` is needed.
        dst: the root's position in the group, not its global rank.
        dim: the dim along which the shards are joined; negative counts from the end.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        sizes: the size of every rank's shard along `dim`, by position, zeros included; the same
            list on every rank. Default: all shards are as large as mine.
        algorithm: "auto" (see collectives/auto.py) or one of `algorithms("gather")`.

    Returns at the root a new contiguous tensor of x's shape with sum(sizes) along `dim`, elsewhere
    a zero-volume one. Raises ValueError or TypeError for wrong arguments. The root receives
    n(p−1)/p bytes, where the result has n.
    Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice,
    and experience" (2007), section 4.

    Example:
        >>> def program():
        ...     return p101.gather(torch.tensor([dist.get_rank()]))
        >>> p101.launch(program, world_size=3, backend="sim").results
        [tensor([0, 1, 2]), tensor([], dtype=torch.int64), tensor([], dtype=torch.int64)]
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


def all_gather(
    x: Tensor,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Return the shards of all ranks joined along `dim` in the order of the group, on every rank.

        rank 0  a ──▶ [a b c]        ∂a = the first blocks of g₀, g₁ and g₂, summed
        rank 1  b ──▶ [a b c]        ∂b = the second blocks
        rank 2  c ──▶ [a b c]        ∂c = the third blocks

    Backward, called by every rank: reduce_scatter(sum).

    Args:
        x: this rank's shard, of any dtype. Shapes may differ between ranks along `dim` only, and
            then `sizes` is needed.
        dim: the dim along which the shards are joined; negative counts from the end.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        sizes: the size of every rank's shard along `dim`, by position, zeros included; the same
            list on every rank. Default: all shards are as large as mine.
        algorithm: "auto" (see collectives/auto.py), one of `algorithms("all_gather")`, or "torus"
            if the group is a DeviceMesh of two axes or more.

    Returns a new contiguous tensor of x's shape with sum(sizes) along `dim`. Raises ValueError or
    TypeError for wrong arguments. Each rank sends n(p−1)/p bytes, where the result has n; by
    recursive_doubling it sends more if p isn't a power of two.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.1.

    Example:
        >>> def program():
        ...     return p101.all_gather(torch.tensor([dist.get_rank()]))
        >>> p101.launch(program, world_size=3, backend="sim").results
        [tensor([0, 1, 2]), tensor([0, 1, 2]), tensor([0, 1, 2])]
    """

    def forward(x: Tensor) -> Tensor:
        return raw.all_gather(x, dim, group=group, sizes=sizes, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return reduce_scatter(g, dim, group=group, sizes=sizes, algorithm=reverse(algorithm))

    return differentiable("all_gather", x, group, forward, backward)


def reduce_scatter(
    x: Tensor,
    dim: int = 0,
    op: str = "sum",
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Return this rank's block, along `dim`, of the arrays of all ranks combined by `op`.

        rank 0  [a₀ a₁] ──▶ a₀+b₀        ∂[a₀ a₁] = [g₀ g₁]        (of a mean: divided by 2)
        rank 1  [b₀ b₁] ──▶ a₁+b₁        ∂[b₀ b₁] = [g₀ g₁]

    Backward, called by every rank: all_gather. Only "sum" and "mean" have one.

    Args:
        x: this rank's array, of the same shape and dtype on every rank.
        dim: the dim along which the result is split; negative counts from the end.
        op: "sum", "mean", "product", "max" or "min". collectives/reductions.py says for which
            dtypes.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        sizes: the size of every rank's block along `dim`, by position, zeros included. Default:
            `split_sizes(x.shape[dim], p)`.
        algorithm: "auto" (see collectives/auto.py), one of `algorithms("reduce_scatter")`, or
            "torus" if the group is a DeviceMesh of two axes or more.

    Returns a new contiguous tensor of x's shape with sizes[position] along `dim`. Raises ValueError
    or TypeError for wrong arguments. Each rank sends n(p−1)/p bytes, where x has n; by
    recursive_halving up to n if p isn't a power of two.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.3.

    Example:
        >>> def program():
        ...     return p101.reduce_scatter(torch.arange(6))
        >>> p101.launch(program, world_size=3, backend="sim").results
        [tensor([0, 3]), tensor([6, 9]), tensor([12, 15])]
    """

    def forward(x: Tensor) -> Tensor:
        return raw.reduce_scatter(x, dim, op, group=group, sizes=sizes, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        cut = sizes or balanced(shape[dim], p)
        return all_gather(
            scaled(g, op, p), dim, group=group, sizes=cut, algorithm=reverse(algorithm)
        )

    return differentiable("reduce_scatter", x, group, forward, backward)


def all_reduce(
    x: Tensor, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto"
) -> Tensor:
    """Return the arrays of all ranks combined by `op`, on every rank: the same bits on each.

        rank 0  a ──▶ a+b+c        ∂a = g₀ + g₁ + g₂
        rank 1  b ──▶ a+b+c        ∂b = g₀ + g₁ + g₂        (of a mean: divided by 3)
        rank 2  c ──▶ a+b+c        ∂c = g₀ + g₁ + g₂

    Backward, called by every rank: all_reduce(sum) again. Only "sum" and "mean" have one.

    Args:
        x: this rank's array, of the same shape and dtype on every rank.
        op: "sum", "mean", "product", "max" or "min". collectives/reductions.py says for which
            dtypes.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        algorithm: "auto" (see collectives/auto.py), one of `algorithms("all_reduce")`, or, if the
            group is a DeviceMesh of two axes or more, "torus" or "two_level".

    Returns a new contiguous tensor like x, with the same bits in every run. Raises ValueError or
    TypeError for wrong arguments.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.5.

    Example:
        >>> def program():
        ...     return p101.all_reduce(torch.ones(4), algorithm="ring")
        >>> run = p101.launch(program, world_size=4, backend="sim")
        >>> run.results[0], run.trace.bytes_sent
        (tensor([4., 4., 4., 4.]), [24, 24, 24, 24])
    """

    def forward(x: Tensor) -> Tensor:
        return raw.all_reduce(x, op, group=group, algorithm=algorithm)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return all_reduce(scaled(g, op, p), group=group, algorithm=algorithm)

    return differentiable("all_reduce", x, group, forward, backward)


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
    """Send the j-th block of x to position j, and return the blocks that arrive, joined.

        rank 0  [a₀ a₁] ──▶ [a₀ b₀]        each block of the gradients goes back to where
        rank 1  [b₀ b₁] ──▶ [a₁ b₁]        the block of x came from

    So an array that was sharded along `concat_dim` is then sharded along `split_dim`. Backward,
    called by every rank: all_to_all with its dims swapped.

    Args:
        x: this rank's array. Shapes may differ between ranks along `concat_dim` only, and then
            `concat_sizes` is needed.
        split_dim: the dim along which x is split.
        concat_dim: the dim along which the blocks are joined, in the order of the group.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        split_sizes: the sizes of x's blocks along `split_dim`, by position. Default:
            `split_sizes(x.shape[split_dim], p)` of mesh.py.
        concat_sizes: the size along `concat_dim` of the block from each rank, by position. Default:
            all as large as mine. If the two dims differ, both lists are the same on every rank; if
            they are one dim, each rank has its own two lists (MPI's alltoallv).
        algorithm: "auto", one of `algorithms("all_to_all")`, or "torus" if the group is a
            DeviceMesh of two axes or more. "auto" goes by the mean bytes of the ranks' x (see
            collectives/auto.py). Bruck and torus must know the blocks that only pass through a
            rank, so they refuse `concat_sizes` if the two dims are one.

    Returns a new contiguous tensor. Raises ValueError or TypeError for wrong arguments. Each rank
    sends n(p−1)/p bytes, where x has n (by bruck about n lg p / 2, by torus n Σ (pᵢ−1)/pᵢ).
    Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems" (1997); Thakur, Rabenseifner, Gropp (2005),
    section 4.

    Example:
        >>> def program():
        ...     return p101.all_to_all(10 * dist.get_rank() + torch.arange(3))
        >>> p101.launch(program, world_size=3, backend="sim").results
        [tensor([ 0, 10, 20]), tensor([ 1, 11, 21]), tensor([ 2, 12, 22])]
    """

    def forward(x: Tensor) -> Tensor:
        sizes = {"split_sizes": split_sizes, "concat_sizes": concat_sizes}
        return raw.all_to_all(x, split_dim, concat_dim, group=group, algorithm=algorithm, **sizes)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        one_dim = split_dim % len(shape) == concat_dim % len(shape)
        cut = split_sizes or balanced(shape[split_dim], p)
        mine = cut[group_of(group).position or 0] if one_dim else shape[concat_dim]
        joined = concat_sizes or [mine] * p
        # these two refuse sizes along one dim: see the docstring
        back = "auto" if one_dim and algorithm in ("bruck", "torus") else algorithm
        sizes = {"split_sizes": joined, "concat_sizes": cut}
        return all_to_all(g, concat_dim, split_dim, group=group, algorithm=back, **sizes)

    return differentiable("all_to_all", x, group, forward, backward)


def algorithms(operation: str) -> dict[str, Callable[..., Any]]:
    """Return the operation with each of its algorithms, by name.

    `algorithms("all_reduce")["ring"](x)` is `all_reduce(x, algorithm="ring")`. These are the
    algorithms for any flat group of any size; "torus" and "two_level", which need a mesh, are not
    among them. `inspect.getsource` shows the few lines of each. Raises ValueError for an unknown
    operation.

    Example:
        >>> list(p101.algorithms("reduce_scatter"))
        ['direct', 'ring', 'bidirectional_ring', 'recursive_halving']
    """
    return raw.fixed(operation, globals())
