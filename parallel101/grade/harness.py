"""What the programs of several exercises share: a model whose layers take time on the virtual clock, and what an optimizer's steps saw.

    layer 0   ▇ forward, 1 s                          ▇▇ backward, 2 s     its gradients are ready at the end
    layer 1     ▇                                  ▇▇
    layer 2       ▇                             ▇▇

The models are built inside the ranks' processes, and in the grader's, which computes the expected results from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.record.spans import compute, span

FORWARD, BACKWARD = 1.0, 2.0  # seconds that a layer takes on the virtual clock


class Layer(nn.Linear):
    """A linear layer and a tanh. In the record, its forward is a span "forward", and its backward a span "backward"."""

    def __init__(self, number: int, features: int, outputs: int):
        super().__init__(features, outputs, dtype=torch.float64)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        with span("forward", layer=self.number):
            compute(FORWARD)
            return _BackwardTakesTime.apply(torch.tanh(super().forward(x)), self.number)


class _BackwardTakesTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, number: int) -> Tensor:
        ctx.number = number
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with span("backward", layer=ctx.number):
            compute(BACKWARD)
        return gradients[0], None


def make_model(sizes: Sequence[int], weights: Tensor, tied: bool = False) -> nn.Sequential:
    """Layers from sizes[0] to sizes[1] features, and so on, with these weights: all parameters one after the other.

    With `tied`, the last layer has the weight of the first one: the same Parameter, under two names.
    """
    model = nn.Sequential(*(Layer(number, a, b) for number, (a, b) in enumerate(zip(sizes, sizes[1:]))))
    if tied:
        model[-1].weight = model[0].weight
    with torch.no_grad():
        nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    return model


def count_weights(sizes: Sequence[int], tied: bool = False) -> int:
    """How many numbers `make_model` needs."""
    return sum(a * b + b for a, b in zip(sizes, sizes[1:])) - (sizes[0] * sizes[1] if tied else 0)


class Steps:
    """What the optimizer's steps saw: the weights before the first one, and the gradients of each. The record has a span for each."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model = model
        self.start: dict[str, Tensor] = {}
        self.gradients: list[dict[str, Tensor | None]] = []
        optimizer.register_step_pre_hook(self._before)

    def _before(self, *_: Any) -> None:
        with span("optimizer step", step=len(self.gradients) + 1):
            pass
        named = dict(self.model.named_parameters())
        self.start = self.start or {name: p.detach().clone() for name, p in named.items()}
        self.gradients.append({name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()})

    def result(self) -> dict[str, Any]:
        """As a rank returns it to the grader."""
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"start": self.start, "gradients": self.gradients, "weights": weights}


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradients of `loss`, by name."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()))))


def mark_gradients(model: nn.Module) -> None:
    """In the record, a span "gradient ready" shows when backward has made each gradient. Call it before the learner adds hooks."""

    def ready(name: str) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            with span("gradient ready", parameter=name):
                pass

        return mark

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(ready(name))
