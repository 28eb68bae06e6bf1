"""What all collectives have in common as functions that gradients pass back through; which is whose adjoint, `parallel101.autograd` says.

x ── forward ──▶ y        one linear function of all ranks' x
∂x ◀── adjoint ── ∂y      and its transpose, called by all of them, too
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Size, Tensor, is_grad_enabled
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual

from parallel101.collectives.checks import tensor_of
from parallel101.mesh import Group, GroupLike, group_of
from parallel101.record.spans import recorder

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
    def of(cls, x: Tensor, group: GroupLike, forward: Callable[[Tensor], Tensor], adjoint: Adjoint, alike: dict | None = None) -> Tensor:
        if torch.compiler.is_compiling():  # messages are nothing to compile: the graph breaks here
            return torch.compiler.disable(cls.of)(x, group, forward, adjoint, alike)
        wanted = not isinstance(x, Tensor) or (x.requires_grad and is_grad_enabled())
        if isinstance(x, Tensor) and unpack_dual(x).tangent is not None:
            raise NotImplementedError("x carries a tangent (forward-mode AD), and collectives have a backward only: use requires_grad")
        if not wanted and recorder() is None:
            return forward(x)  # no graph, and nobody who compares: the messages alone
        return cls.apply(x, group, forward, adjoint, alike or {})[0]

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: GroupLike, forward: Callable[[Tensor], Tensor], adjoint: Adjoint, alike: dict
    ) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.members, ctx.adjoint = tensor_of(x).shape, group_of(group), adjoint
        # the same memory, but no view: where there are two results, torch lets none that is a view be written to
        result = x.new_empty(0).set_(forward(x))  # type: ignore[call-overload]  # torch's stub lacks this form
        tie = x.new_empty(0)  # the second, of nothing, hangs on x as the first does
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
        return gradient, None, None, None, None


class Collective(Linear):
    """The same, called by every rank of the group with the same arguments, which a checked run compares; so all want a gradient or none.

    `alike` are those arguments, by name; and "uneven": the dim along which x may have another extent on each rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: GroupLike, forward: Callable[[Tensor], Tensor], adjoint: Adjoint, alike: dict
    ) -> tuple[Tensor, Tensor]:
        members, ctx.number = group_of(group), 0
        if members.position is not None and recorder() is not None:
            terms = _terms(tensor_of(x), **alike)
            ctx.number = agree(_operation(ctx), members, **terms, requires_grad=ctx.needs_input_grad[0])
        return Linear.forward(ctx, x, group, forward, adjoint, alike)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.number:  # a rank that leaves one result out of its loss would answer the others' backward of it with that of another
            agree("backward", ctx.members, call=f"{_operation(ctx)} number {ctx.number}")
        return Linear.backward(ctx, *gradients)


def _terms(x: Tensor, uneven: int | None = None, **alike: Any) -> dict[str, Any]:
    """What must be the same on all ranks; dims counted from the front."""
    dims = max(1, x.dim())
    alike = {name: value % dims if name.endswith("dim") and isinstance(value, int) else value for name, value in alike.items()}
    shape = [extent for dim, extent in enumerate(x.shape) if not isinstance(uneven, int) or dim != uneven % dims]
    return {**alike, "dtype": x.dtype, "shape" if uneven is None else "shape in the other dims": tuple(shape)}


def _operation(ctx: Any) -> str:
    """ "AllReduceBackward", as torch calls the node, is an all_reduce."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(ctx).__name__.removesuffix("Backward")).lower()


def agree(kind: str, members: Group, **alike: Any) -> int:
    target = recorder()
    if target is None:
        return 0
    within = "" if members.process_group is None else members.process_group.group_name
    return target.agree(kind, members.ranks, within, alike)


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

    backward_is = f"backward is {backward}, called by every rank, so that x requires a gradient on all of them or on none"

    def document(function: Public) -> Public:
        function.__doc__ = (raw_function.__doc__ or "").replace("no part of the graph", f"differentiable: {backward_is}")
        return function

    return document
