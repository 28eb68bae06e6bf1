"""A collective as a node of PyTorch's graph.

    x ── forward ──▶ y         a linear function of the x of all ranks
    ∂x ◀── backward ── ∂y      its transpose, which all ranks call too

Which backward belongs to which forward is in the other files of this folder. What all of them share
is here. A rank that gets no part of the result, or that the group leaves out, still takes part in
the backward. A backward has a backward itself. A checked run compares whether the ranks call the
same backward. This file sends no message.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Size, Tensor, is_grad_enabled
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual

from parallel101.collectives.checks import compare, uncompared
from parallel101.mesh import Group, GroupLike, group_of
from parallel101.spans import recorder

Forward = Callable[[Tensor], Tensor]
# (gradient of the result, shape of x, number of ranks) → gradient of x
Backward = Callable[[Tensor, Size, int], Tensor]


def differentiable(
    operation: str,
    x: Tensor,
    group: GroupLike,
    forward: Forward,
    backward: Backward,
    *,
    collective: bool = True,
    local_backward: bool = False,
) -> Tensor:
    """Return forward(x); if x requires a gradient, `backward` will compute it.

    Args:
        operation: its name.
        x, group: as the program passed them.
        forward: takes x, inside a node of the graph or without one.
        backward: is called on every rank of the group, and is differentiable itself.
        collective: whether all ranks of the group make this call, as they don't for send and
            receive. A checked run then compares them.
        local_backward: whether backward sends nothing, so that ranks may call it in any order.

    Raises NotImplementedError for forward-mode AD.
    """
    if torch.compiler.is_compiling():  # torch.compile cannot trace messages: break the graph here
        options = {"collective": collective, "local_backward": local_backward}
        outside = torch.compiler.disable(differentiable)
        return outside(operation, x, group, forward, backward, **options)
    if isinstance(x, Tensor) and unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            "x carries a tangent (forward-mode AD), but collectives have only a backward: use "
            "requires_grad"
        )
    wanted = isinstance(x, Tensor) and x.requires_grad and is_grad_enabled()
    number = 0
    if collective and recorder() is not None:
        number = compare(operation, group_of(group), "autograd", requires_grad=wanted)
    if not wanted:
        return forward(x)
    call = f"{operation}, number {number}" if number else ""
    return _node(operation).apply(x, group_of(group), forward, backward, call, local_backward)[0]


class CollectiveFunction(Function):
    """A node of autograd's graph for a collective. It returns a `tie` besides its result.

    The tie has zero volume and depends on x as the result does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        forward: Forward,
        backward: Backward,
        call: str,
        local_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.group, ctx.transpose = x.shape, group, backward
        ctx.call, ctx.local_backward = call, local_backward
        # torch forbids changing a view in place if its node has two results: use the same memory,
        # but not as a view
        result = x.new_empty(0).set_(forward(x))  # type: ignore[call-overload]  # torch's stub lacks this form
        tie = x.new_empty(0)
        ctx.save_for_backward(tie)
        return result, tie

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g = gradients[0]
        # if a rank's loss leaves a result out, its backwards no longer match those of other ranks
        if ctx.call and not ctx.local_backward:
            compare("backward", ctx.group, "backward", collective=ctx.call)
        # create_graph: with the tie, g depends on x on every rank, even where the loss is linear in
        # y, so that all ranks take part in the second backward
        if is_grad_enabled():
            g = g + ctx.saved_tensors[0].sum()
        if ctx.group.position is None:
            gradient = g
        else:
            with uncompared() if ctx.local_backward else contextlib.nullcontext():
                gradient = ctx.transpose(g, ctx.shape, ctx.group.size)
        # no rank received this x: its gradient is zeros that depend on g, for the same reason
        if not gradient.numel():
            gradient = g.new_zeros(ctx.shape).add_(gradient.sum())
        return gradient, None, None, None, None, None


@functools.cache
def _node(operation: str) -> Any:
    """Return the Function under a name that appears in `y.grad_fn`, such as AllReduceBackward."""
    return type(CollectiveFunction)(
        "".join(word.capitalize() for word in operation.split("_")), (CollectiveFunction,), {}
    )  # type: ignore[misc]


def scaled(g: Tensor, op: str, p: int) -> Tensor:
    """Return the gradient of one of p values, from the gradient g of their sum or mean.

    Raises NotImplementedError for the other reductions, which have no backward here.
    """
    if op not in ("sum", "mean"):
        raise NotImplementedError(
            f"op={op!r} has no backward here, only 'sum' and 'mean' have one: call it on x.detach()"
        )
    return g / p if op == "mean" else g


def placeholder(g: Tensor, shape: Sequence[int]) -> Tensor:
    """Return g at the root; on the other ranks, where g is empty, a tensor of the root's shape.

    That tensor depends on g, has its dtype and takes no memory.
    """
    return g if g.shape == Size(shape) else g.sum().expand(shape)


# An algorithm in reverse order has its own name, unless it is listed here.
REVERSED = {
    "recursive_doubling": "recursive_halving",
    "recursive_halving": "recursive_doubling",
    "bruck": "recursive_halving",
    "scatter_all_gather": "reduce_scatter_gather",
    "reduce_scatter_gather": "scatter_all_gather",
    "chain": "pipelined_chain",
}


def reverse(algorithm: str) -> str:
    """Return the algorithm for the backward: the forward's in reverse order."""
    return REVERSED.get(algorithm, algorithm)
