"""Shared parts of the exercises' programs: a model whose layers take virtual time, and counters.

    layer 0   ▇ forward, 1 s                      ▇▇ backward, 2 s: its gradients are ready
    layer 1     ▇                              ▇▇                    at the end
    layer 2       ▇                         ▇▇

The models are built inside the ranks' processes, and in the grader's, which computes the expected
results from the same weights. `OptimizerSteps` keeps what the optimizer's steps saw.
"""

from __future__ import annotations

import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.spans import compute, recorder, span

FORWARD, BACKWARD = 1.0, 2.0  # seconds that a layer takes on the virtual clock
LEARNING_RATE, MOMENTUM = 0.1, 0.9  # of the optimizers that the learner's code makes


class TanhLinear(nn.Linear):
    """A linear layer and a tanh.

    In the record, its forward is a span "forward", and its backward a span "backward".
    """

    def __init__(self, number: int, features: int, outputs: int, device: str | None = None):
        super().__init__(features, outputs, dtype=torch.float64, device=device)
        self.number = number
        # told of the weights with which forward computes
        self.uses: Callable[..., None] = lambda *weights: None

    def forward(self, x: Tensor) -> Tensor:
        self.uses(self.weight, self.bias)
        with span("forward", layer=self.number):
            compute(FORWARD)
            y = torch.tanh(super().forward(x))
        return backward_takes(BACKWARD, y, layer=self.number)


class _BackwardTakesTime(torch.autograd.Function):
    """The identity. Its backward comes first in the backward of what it is applied to."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, seconds: float, labels: dict[str, int]) -> Tensor:
        ctx.seconds, ctx.labels = seconds, labels
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        with span("backward", **ctx.labels):
            compute(ctx.seconds)
        return gradients[0], None, None


def backward_takes(seconds: float, y: Tensor, **labels: int) -> Tensor:
    """Return y. Its backward takes time on the virtual clock, and is a span with these labels."""
    return _BackwardTakesTime.apply(y, seconds, labels)


def make_model(sizes: Sequence[int], weights: Tensor, tied: bool = False) -> nn.Sequential:
    """Return a model with these weights: layers from sizes[0] to sizes[1] features, and so on.

    The weights are all parameters one after the other. With `tied`, the last layer has the weight
    of the first one: the same Parameter, under two names.
    """
    model = nn.Sequential(
        *(TanhLinear(number, a, b) for number, (a, b) in enumerate(zip(sizes, sizes[1:])))
    )
    if tied:
        model[-1].weight = model[0].weight
    with torch.no_grad():
        nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    return model


def count_weights(sizes: Sequence[int], tied: bool = False) -> int:
    """Return the number of weights that `make_model` needs."""
    return sum(a * b + b for a, b in zip(sizes, sizes[1:])) - (sizes[0] * sizes[1] if tied else 0)


def mark(name: str, **labels: Any) -> None:
    """Record a moment: a span that takes no time."""
    with span(name, **labels):
        pass


class SGD(torch.optim.Optimizer):
    """SGD with momentum, as torch's own computes it. The record has a span for each step.

    With AdamW, gradients that are n times too large would go unnoticed.

    Attributes:
        steps: how many steps have begun.
        before: called with this optimizer before each step.
    """

    # without what makes torch import its compiler, in seconds, with the first optimizer
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(
        self,
        parameters: Iterable[Any],
        before: Callable[[SGD], None] = lambda optimizer: None,
        lr: float = LEARNING_RATE,
        momentum: float = MOMENTUM,
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.steps, self.before = 0, before

    @property
    def given(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.steps += 1
        mark("optimizer step", step=self.steps)
        self.before(self)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.mul_(group["momentum"]).add_(p.grad)
                    p.add_(momentum, alpha=-group["lr"])
        return loss


class OptimizerSteps:
    """An optimizer for a model: its weights before the first step, and the gradients at each."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.start: dict[str, Tensor] = {}
        self.gradients: list[dict[str, Tensor | None]] = []
        self.optimizer = SGD(model.parameters(), self._before)

    def _before(self, _: SGD) -> None:
        named = dict(self.model.named_parameters())
        self.start = self.start or {name: p.detach().clone() for name, p in named.items()}
        self.gradients.append(
            {name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()}
        )

    def result(self) -> dict[str, Any]:
        """Return the first weights, the gradients and the last weights, for the grader."""
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"start": self.start, "gradients": self.gradients, "weights": weights}


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `loss`, by name."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()))))


def mark_gradients(model: nn.Module) -> None:
    """Record a span "gradient ready" whenever backward has made a parameter's gradient.

    Call it before the learner adds hooks.
    """

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda _, name=name: mark("gradient ready", parameter=name)
        )


class PeakBytes:
    """The most bytes of some tensors that were alive at once, counted when another one comes.

    It holds weak references to their storages. A storage counts until its last tensor, view or
    place in autograd's graph is gone; of a larger one, only the parts that were watched.
    """

    def __init__(self) -> None:
        self.storages: dict[weakref.ref[torch.UntypedStorage], dict[int, int]] = {}
        self.peak = 0

    def watch(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            parts = self.storages.setdefault(weakref.ref(tensor.untyped_storage()), {})
            parts[int(tensor.storage_offset())] = tensor.nbytes
        if self._now() > self.peak:
            gc.collect()  # what only a cycle of references still holds does not count
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        return sum(
            min(storage.nbytes(), sum(parts.values()))
            for ref, parts in self.storages.items()
            if (storage := ref()) is not None
        )


def clock_seconds() -> float:
    """Return this rank's clock: virtual time on sim and under the grader, otherwise real time."""
    found = recorder()
    if found is not None and hasattr(found, "seconds"):  # the grader's: see rank.py
        return found.seconds()
    now = found.now() if found is not None else None
    return now if isinstance(now, float) else time.perf_counter()


class Optimizers:
    """The optimizers that the learner's code makes, all of them SGD with momentum.

    This counts what they hold, and the gradients of their steps.

    Attributes:
        squares: for each step, the sum of the squared gradients that the optimizers on this rank
            saw.
        gradient_bytes: the most bytes of gradients that the optimizers' parameters had at a step.
    """

    def __init__(self) -> None:
        self.made: list[SGD] = []
        self.squares: list[float] = []
        self.gradient_bytes = 0

    def make(self, parameters: Iterable[Any]) -> SGD:
        """Return an optimizer; the learner's code gets this function as `make_optimizer`."""
        self.made.append(SGD(parameters, self._before))
        return self.made[-1]

    def _before(self, optimizer: SGD) -> None:
        gradients = [p.grad for p in optimizer.given if p.grad is not None]
        self.squares += [0.0] * (optimizer.steps - len(self.squares))
        self.squares[optimizer.steps - 1] += sum(
            float(g.double().square().sum()) for g in gradients
        )
        self.gradient_bytes = max(self.gradient_bytes, sum(g.nbytes for g in gradients))

    def result(self) -> dict[str, Any]:
        """Return what a rank sends to the grader, with the optimizers' state in one flat tensor."""
        tensors = [
            value.detach().flatten()
            for optimizer in self.made
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        state = torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.float64)
        return {"state": state, "squares": self.squares, "gradient bytes": self.gradient_bytes}
