"""Each collective beside its adjoint: what goes forward as the one comes back as the other.

    broadcast ↔ reduce     scatter ↔ gather     all_gather ↔ reduce_scatter     all_reduce, all_to_all ↔ themselves

One rule fixes them all: the objective of a parallel program is the sum over ranks of what each rank calls `backward()` on. Every rank
must call it, one that got nothing too: its zero-volume result is part of the graph, and its backward takes part in the messages.
Beside this file: `point_to_point` (send ↔ receive), and `replicated` (gradients that count once and not once a rank: Megatron's f and g).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Size, Tensor, is_grad_enabled
from torch.autograd import Function

from parallel101 import collectives as raw
from parallel101.collectives import barrier
from parallel101.collectives.checks import tensor_of
from parallel101.mesh import GroupLike, group_of
from parallel101.mesh import split_sizes as balanced
from parallel101.trace.spans import agree, recorder

__all__ = ["algorithms", "barrier"]
__all__ += ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]

Adjoint = Callable[[Tensor, Size, int], Tensor]  # (gradient of the result, shape of x, ranks in the group) → gradient of x
Public = TypeVar("Public", bound=Callable[..., Any])

# Backward an algorithm runs as its mirror image; this is its name there, where it is another.
MIRRORED = {
    "recursive_doubling": "recursive_halving",
    "recursive_halving": "recursive_doubling",
    "bruck": "recursive_halving",
    "scatter_all_gather": "reduce_scatter_gather",
    "reduce_scatter_gather": "scatter_all_gather",
    "chain": "auto",
}


def mirrored(algorithm: str) -> str:
    return MIRRORED.get(algorithm, algorithm)


class Linear(Function):
    """x ── forward ──▶ y        and back: ∂y ── adjoint ──▶ ∂x, zeros on a rank whose x no rank received."""

    @classmethod
    def apply(cls, x: Tensor, group: GroupLike, forward: Callable[[Tensor], Tensor], adjoint: Adjoint) -> Tensor:
        wanted = not isinstance(x, Tensor) or (x.requires_grad and is_grad_enabled())
        if not wanted and recorder() is None:
            return forward(x)  # no graph, and nobody who compares: the messages alone
        return super().apply(x, group, forward, adjoint)[0]

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupLike, forward: Callable[[Tensor], Tensor], adjoint: Adjoint) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.members, ctx.adjoint = tensor_of(x).shape, group_of(group), adjoint
        result, tie = forward(x), x.new_empty(0)  # tie: a second result, of nothing, that hangs on x as the first does
        ctx.save_for_backward(tie)
        return result, tie

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g = gradients[0]
        if is_grad_enabled():  # create_graph: ∂y hangs on x whatever the rank made of y, so that every rank's has a backward
            g = g + ctx.saved_tensors[0].sum()
        gradient = g if ctx.members.position is None else ctx.adjoint(g, ctx.shape, ctx.members.size)
        if not gradient.numel():  # zeros, but of the graph: their backward takes part in the messages
            gradient = g.new_zeros(ctx.shape).add_(gradient.sum())
        return gradient, None, None, None


class Collective(Linear):
    """The same, called by every rank of the group alike: a checked run sees whether they all want a gradient or none does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupLike, forward: Callable[[Tensor], Tensor], adjoint: Adjoint) -> tuple[Tensor, Tensor]:
        members = group_of(group)
        if members.position is not None:
            agree(_operation(ctx), members.ranks, ctx.needs_input_grad[0])
        return Linear.forward(ctx, x, group, forward, adjoint)


def _operation(ctx: Any) -> str:
    """ "AllReduceBackward", as torch calls the node, is an all_reduce."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(ctx).__name__.removesuffix("Backward")).lower()


def reduction_adjoint(operation: str, op: str, adjoint: Adjoint) -> Adjoint:
    """`adjoint`, where the reduction has one; a mean's is the sum's, over the number of ranks."""
    if op == "sum":
        return adjoint
    if op == "mean":
        return lambda g, shape, p: adjoint(g / p, shape, p)

    def refuse(g: Tensor, shape: Size, p: int) -> Tensor:
        raise NotImplementedError(f"{operation}(op={op!r}) has no backward here, only 'sum' and 'mean' have: call it on x.detach()")

    return refuse


def stand_in(g: Tensor, shape: Sequence[int]) -> Tensor:
    """g at the root; on the others, where g is empty, what gives shape, dtype and graph only and takes no memory."""
    return g if g.shape == Size(shape) else g.sum().expand(shape)


def documented(raw_function: Public, backward: str) -> Callable[[Public], Public]:
    """The public function says what its namesake without gradients says, and what its backward is."""

    def document(function: Public) -> Public:
        function.__doc__ = (raw_function.__doc__ or "").replace("no part of the graph", f"differentiable: backward is {backward}")
        return function

    return document


class Broadcast(Collective):
    """
    root    x ─┬─▶ x        ∂x = g₀ + g₁ + g₂
    rank 1     ├─▶ x        (its own x had no part in it: ∂ = 0)
    rank 2     └─▶ x
    """


@documented(raw.broadcast, backward="reduce(sum) to the root, zeros elsewhere")
def broadcast(x: Tensor, src: int = 0, *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    return Broadcast.apply(
        x,
        group,
        lambda x: raw.broadcast(x, src, group=group, algorithm=algorithm),
        lambda g, shape, p: reduce(g, src, group=group, algorithm=mirrored(algorithm)),
    )


class Reduce(Collective):
    """
    root    a ─┬─▶ a+b+c        ∂a = g
    rank 1  b ─┤                ∂b = g        the root's, broadcast (of a mean: g / 3)
    rank 2  c ─┘                ∂c = g
    """


@documented(raw.reduce, backward="broadcast from the root")
def reduce(x: Tensor, dst: int = 0, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    return Reduce.apply(
        x,
        group,
        lambda x: raw.reduce(x, dst, op, group=group, algorithm=algorithm),
        reduction_adjoint("reduce", op, lambda g, shape, p: broadcast(stand_in(g, shape), dst, group=group, algorithm=mirrored(algorithm))),
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
    return Scatter.apply(
        x,
        group,
        lambda x: raw.scatter(x, src, dim, group=group, sizes=sizes, algorithm=algorithm),
        lambda g, shape, p: gather(g, src, dim, group=group, sizes=sizes or balanced(shape[dim], p), algorithm=algorithm),
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

    return Gather.apply(x, group, lambda x: raw.gather(x, dst, dim, group=group, sizes=sizes, algorithm=algorithm), adjoint)


class AllGather(Collective):
    """
    rank 0  a ──▶ [a b c]        ∂a = the first blocks of g₀, g₁ and g₂, summed
    rank 1  b ──▶ [a b c]        ∂b = the second
    rank 2  c ──▶ [a b c]        ∂c = the third
    """


@documented(raw.all_gather, backward="reduce_scatter(sum)")
def all_gather(x: Tensor, dim: int = 0, *, group: GroupLike = None, sizes: Sequence[int] | None = None, algorithm: str = "auto") -> Tensor:
    return AllGather.apply(
        x,
        group,
        lambda x: raw.all_gather(x, dim, group=group, sizes=sizes, algorithm=algorithm),
        lambda g, shape, p: reduce_scatter(g, dim, group=group, sizes=sizes, algorithm=mirrored(algorithm)),
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

    return ReduceScatter.apply(
        x,
        group,
        lambda x: raw.reduce_scatter(x, dim, op, group=group, sizes=sizes, algorithm=algorithm),
        reduction_adjoint("reduce_scatter", op, adjoint),
    )


class AllReduce(Collective):
    """
    rank 0  a ──▶ a+b+c        ∂a = g₀ + g₁ + g₂
    rank 1  b ──▶ a+b+c        ∂b = g₀ + g₁ + g₂        (of a mean: over 3)
    rank 2  c ──▶ a+b+c        ∂c = g₀ + g₁ + g₂
    """


@documented(raw.all_reduce, backward="all_reduce again")
def all_reduce(x: Tensor, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    return AllReduce.apply(
        x,
        group,
        lambda x: raw.all_reduce(x, op, group=group, algorithm=algorithm),
        reduction_adjoint("all_reduce", op, lambda g, shape, p: all_reduce(g, group=group, algorithm=algorithm)),
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

    return AllToAll.apply(x, group, forward, adjoint)


def algorithms(operation: str) -> dict[str, Callable[..., Any]]:
    """The operation once for each of its algorithms, by name: `algorithms("all_reduce")["ring"](x)` is `all_reduce(x, algorithm="ring")`.

    Those that serve any flat group of any size; all_reduce's "two_level" and "torus" want a mesh and are not among them.
    `inspect.getsource` of each shows its own few lines. Raises ValueError for an unknown operation.
    """
    return raw.fixed(operation, globals())
