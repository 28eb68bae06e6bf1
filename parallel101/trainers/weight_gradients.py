"""A linear layer whose weight gradient can be computed later than its input's gradient.

    B    g ─▶ ∂x = g·W,  ∂W = gᵀ·x                 autograd's backward makes both
    I    g ─▶ ∂x = g·W                             the stage (or rank) before waits for this one only
    W              later: ∂W = gᵀ·x                into a bubble, or while a message is in flight

Two users: zero-bubble schedules, in which W is an action of its own, and column-parallel layers,
which compute ∂W while the all-reduce of ∂x is in flight. Asking autograd for ∂x and then for ∂W
would run each custom backward twice, its messages too. Here everything runs once: parameters of
linear layers wait in a list, and all others get their gradients with I. Source: Qi et al., "Zero
Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2; DeepSeek's DualPipe keeps such a list
too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

Parameters = tuple[nn.Parameter, nn.Parameter | None]  # weight and bias

_forward = threading.local()  # .of: the WeightGradients of the forward that this thread computes


class WeightGradients:
    """The weight gradients that one microbatch's backward has left for later.

    Args:
        split: whether the schedule computes them in an action of its own, W.
    """

    def __init__(self, *, split: bool = False):
        self.split = split
        # so that a layer whose input needs no gradient has a backward
        self.anchor = torch.empty(0, requires_grad=True)
        self.pending: list[tuple[Tensor, Tensor, nn.Parameter, nn.Parameter | None]] = []

    def run(self) -> None:
        """Compute them. backward() on a parameter adds to its .grad and calls its hooks."""
        pending, self.pending = self.pending, []
        totals: dict[nn.Parameter, Tensor] = {}
        for x, g, weight, bias in pending:
            for p, gradient in zip((weight, bias), _weight_gradients(x, g, weight, bias)):
                if p is not None and gradient is not None:
                    totals[p] = totals[p] + gradient if p in totals else gradient
        for p, total in totals.items():
            p.backward(total.to(p.dtype))

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, a forward is computed whose backward leaves its weight gradients here, if
        they are split.
        """
        before, _forward.of = current(), self
        try:
            with _LinearLater(self) if self.split else contextlib.nullcontext():
                yield
        finally:
            _forward.of = before


def current() -> WeightGradients | None:
    """That of the microbatch whose forward runs in this thread.

    None outside of a trainer's step.
    """
    return getattr(_forward, "of", None)


def at_entry() -> tuple[WeightGradients, bool]:
    """Where layers with one common input leave their weight gradients, and whether their backward
    itself must `run` them.

    That is the microbatch's list, if the schedule has W actions; else a new one, to be run while
    the gradient of the input travels.
    """
    of_microbatch = current()
    if of_microbatch is not None and of_microbatch.split:
        return of_microbatch, False
    return WeightGradients(), True


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, later: WeightGradients | None = None
) -> Tensor:
    """torch.nn.functional.linear; with `later`, its backward computes ∂x and leaves ∂weight and
    ∂bias there, both parameters.

    Args: x (…, in), weight (out, in), bias (out). Returns (…, out).
    """
    if later is None or not torch.is_grad_enabled() or not weight.requires_grad:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, later.anchor, (weight, bias), later)


class _LinearLater(TorchFunctionMode):
    """While it is active, every nn.Linear and F.linear over parameters leaves its weight
    gradient for later.
    """

    def __init__(self, later: WeightGradients):
        super().__init__()
        self.later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args)) | kwargs
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            if isinstance(weight, nn.Parameter) and (
                bias is None or isinstance(bias, nn.Parameter)
            ):
                return linear(x, weight, bias, self.later)
        return func(*args, **kwargs)


class _Linear(Function):
    """The parameters are no inputs of this node, so that autograd does not take their gradients
    for complete after its backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, parameters: Parameters, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, parameters[0])
        ctx.parameters, ctx.later = parameters, later
        ctx.autocast = (
            (x.device.type, torch.get_autocast_dtype(x.device.type))
            if torch.is_autocast_enabled(x.device.type)
            else None
        )
        # which is no view, so that an operation in place may follow
        return F.linear(x, *parameters).data

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        with (
            torch.autocast(ctx.autocast[0], ctx.autocast[1])
            if ctx.autocast
            else contextlib.nullcontext()
        ):
            gradient = g @ weight if ctx.needs_input_grad[0] else None
        ctx.later.pending.append((x, g, *ctx.parameters))
        return gradient, None, None, None


@torch.no_grad()
def _weight_gradients(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    rows = g.flatten(0, -2) if g.dim() > 1 else g.unsqueeze(0)
    columns = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return rows.t() @ columns.to(rows.dtype), rows.sum(
        0
    ) if bias is not None and bias.requires_grad else None
