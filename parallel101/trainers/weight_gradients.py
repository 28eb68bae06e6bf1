"""A linear layer whose weight gradient can be computed later than its input's gradient.

    B    g ─▶ ∂x = g W,  ∂W = gᵀ x              autograd's backward makes both
    I    g ─▶ ∂x = g W                          the stage (or rank) before waits only for this one
    W              later: ∂W = gᵀ x             into a bubble, or while a message is in flight

Two users: zero-bubble schedules, in which W is an action of its own, and column-parallel layers,
which compute ∂W while the all-reduce of ∂x is in flight. Asking autograd for ∂x and then for ∂W
would run each custom backward twice, with its messages. Here everything runs once: the weight
gradients of linear layers wait in a list, and all other parameters get theirs with I. Source: Qi et
al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2; DeepSeek's DualPipe keeps
such a list too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.trainers.torch_functions import GraphNode, Replacing

_thread = threading.local()  # .later: the WeightGradients of the forward that this thread computes


class WeightGradients:
    """The weight gradients that a backward has left for later.

    Args: split: whether the schedule computes those of a microbatch in an action of its own, W.
    """

    def __init__(self, *, split: bool = False):
        self.split = split
        self.pending: dict[Tensor, list[Callable[[], Tensor]]] = {}

    def add(self, p: Tensor | None, gradient: Callable[[], Tensor]) -> None:
        """Leave a gradient of p, or a part of it if p is used several times."""
        if p is not None and p.requires_grad:
            self.pending.setdefault(p, []).append(gradient)

    def run(self) -> None:
        """Compute them, and give each parameter the sum of its own, by a separate backward. So the
        sum is added to .grad, and the parameter's hooks run once.
        """

        def number(p: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            parts = (gradient().to(p.dtype) for gradient in self.pending.pop(p))
            return p.new_zeros(()), lambda _: functools.reduce(torch.add, parts)

        while self.pending:
            with torch.enable_grad():
                total = GraphNode.apply(number, next(iter(self.pending)))
            total.backward()  # p.backward(sum) would copy the sum into .grad: here it becomes .grad

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward inside whose backward leaves its weight gradients here, if they are
        split.
        """
        if not self.split:
            yield
            return
        before, _thread.later = split_backward(), self
        anchor = torch.empty(0, requires_grad=True)
        try:
            with Replacing({F.linear: functools.partial(linear, self, anchor)}):
                yield
        finally:
            _thread.later = before


def split_backward() -> WeightGradients | None:
    """Return the WeightGradients to which this thread's forward leaves those of its backward.

    It is None if that backward computes them itself.
    """
    return getattr(_thread, "later", None)


def linear(
    later: WeightGradients, anchor: Tensor, input: Tensor, weight: Tensor, bias: Any = None
) -> Tensor:
    """Return F.linear, which leaves its weight gradient for later if its weights are parameters."""
    parameters = isinstance(weight, nn.Parameter) and isinstance(bias, nn.Parameter | None)
    if parameters and weight.requires_grad and torch.is_grad_enabled():
        return split_linear(input, weight, bias, later, anchor)
    return F.linear(input, weight, bias)


def split_linear(
    x: Tensor, weight: Any, bias: Any, later: WeightGradients, *anchor: Tensor, keep: Any = None
) -> Tensor:
    """Compute y = x Wᵀ + b, whose backward leaves ∂W and ∂b for later. The parameters are not
    inputs of this node: autograd would call their hooks after its backward.

    The anchor gives it a backward if x needs no gradient. `keep`: what it keeps instead of x, and
    the function that makes x of that.
    """
    kept, again = keep or (x, lambda x: x)

    def forward(x: Tensor) -> tuple[Any, ...]:
        y = F.linear(x, weight, bias).data  # not a view: y may be changed in place
        return y, backward, kept, weight

    def backward(g: Tensor, kept: Tensor, W: Tensor) -> Tensor | None:
        rows, x = positions(g), again(kept)  # (batch · time, features)
        later.add(weight, lambda: rows.t() @ positions(x).to(g.dtype))  # ∂W = gᵀ x
        later.add(bias, lambda: rows.sum(0))  # ∂b
        return g @ W.to(g.dtype) if wanted else None  # ∂x = g W

    wanted = x.requires_grad
    return GraphNode.apply(forward, x, *anchor)


def positions(x: Tensor) -> Tensor:
    """View (…, features) as (positions, features)."""
    return torch.atleast_2d(x).flatten(0, -2)
