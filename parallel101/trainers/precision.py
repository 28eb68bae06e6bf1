"""In which dtypes a trainer computes, and the master weights of mixed precision.

    bytes a weight      weight   gradient   master weight   Adam's moments   together
    "fp32"                 4        4             –               8             16
    "bf16-mixed"           2        2             4               8             16
      32-bit gradients     2        4             4               8             18
    "bf16"                 2        2             –               4              8

An update is often smaller than half of the distance between two numbers in 16 bit, and would be
rounded away. So the optimizer updates **master weights** in 32 bit, and the model computes with
their rounded copy:

    forward, backward in 16 bit ─▶ gradients, summed ─▶ in 32 bit ─▶ optimizer ─▶ rounded to 16 bit

Source: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3; Rajbhandari
et al., "ZeRO" (arXiv 1910.02054), section 3.1, counts these bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel101.trainers.agreement import Agreement
from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.support.batches import Batch, map_tensors

FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000  # as torch.amp.GradScaler's


class Precision(NamedTuple):
    """In which dtypes a trainer computes.

    Attributes:
        weights: of weights, buffers and activations. None: as the model comes.
        gradients: of gradients, and of the messages that sum them. None: as the weights.
        master: whether the optimizer updates master weights.
        scaled: whether the loss is scaled up, so that small gradients are not rounded to zero.
        autocast: of those operations of the forward that allow it. The weights keep their dtype.
    """

    weights: torch.dtype | None = None
    gradients: torch.dtype | None = None
    master: bool = False
    scaled: bool = False
    autocast: torch.dtype | None = None

    def cast(self, inputs: Batch) -> Batch:
        """Floating-point inputs in the weights' dtype."""
        if self.weights is None:
            return inputs
        return map_tensors(lambda t: t.to(self.weights) if t.is_floating_point() else t, inputs)

    def of_loss(self, loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """The same loss of outputs in at least 32 bit: a sum over a batch needs them."""
        if loss_fn is None or self.weights in (None, torch.float32):
            return loss_fn
        return lambda outputs, targets: loss_fn(map_tensors(_in_32_bit, outputs), targets)

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a checkpoint has a tensor of this dtype."""
        if self.weights is None or not dtype.is_floating_point:
            return dtype
        return torch.promote_types(dtype, torch.float32) if self.master else self.weights

    def forward(self, device: torch.device) -> Any:
        """Goes around a forward."""
        on = self.autocast is not None
        return torch.autocast(device.type, dtype=self.autocast, enabled=on)

    def cast_model(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Round the model's weights and buffers, in place. Returns the master weights, if there
        are some: the weights as they were, by name, in at least 32 bit.
        """
        named = model.named_parameters() if self.master else ()
        masters = {name: _in_32_bit(p.detach()) for name, p in named}
        if self.weights is not None:
            for t in (*model.parameters(), *model.buffers()):
                if t.is_floating_point():
                    t.data = t.data.to(self.weights)
        return masters

    def gradients_of(self, parameters: Sequence[nn.Parameter]) -> None:
        """Choose the dtype of these parameters' .grad; backward then adds up in it."""
        for p in parameters:
            p.grad_dtype = self.gradients or p.dtype


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "bf16-mixed": Precision(torch.bfloat16, master=True),
    "fp16-mixed": Precision(torch.float16, master=True, scaled=True),
}


def choose_precision(
    precision: str | None,
    gradient_dtype: torch.dtype | None,
    autocast: torch.dtype | None,
    device: torch.device,
) -> Precision:
    """Raises ValueError for what doesn't go together, or what the device can't compute."""
    if precision is None and gradient_dtype is None:
        return Precision(autocast=autocast)
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r}: expected one of {', '.join(map(repr, PRECISIONS))}, or None "
            "for the model as it is, without gradient_dtype"
        )
    if autocast is not None:
        raise ValueError(
            f"precision={precision!r} and autocast={autocast}: expected one of the two. autocast "
            "keeps the weights as they are and computes some operations in another dtype; "
            "precision also chooses the weights' dtype"
        )
    chosen = PRECISIONS[precision]
    allowed = {None, chosen.weights, torch.float32} if chosen.master else {None, chosen.weights}
    if gradient_dtype not in allowed:
        raise ValueError(
            f"precision={precision!r} with gradient_dtype={gradient_dtype}: expected "
            f"{' or '.join(sorted(map(str, allowed - {None})))}, or None for the weights' dtype"
        )
    try:
        a = torch.ones(2, 2, dtype=chosen.weights, device=device)
        nn.functional.layer_norm(a @ a, (2,))
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"precision={precision!r}: {device} can't compute in {chosen.weights} ({error}). Use "
            'another precision, such as "fp32"'
        ) from error
    return chosen._replace(gradients=gradient_dtype)


class MasterWeights(GradientSync):
    """A GradientSync whose `owned` are master weights, of what `sync` owns.

    After the step, .grad of a master weight is the rounded gradient again: its 32 bits are needed
    for the optimizer's step only.

    Args:
        sync: synchronises the gradients of the rounded weights.
        values: name → the master weight at first.
        local: names of all trained parameters on this rank, owned or not.
        scaled: scale the loss by `scale`. If a gradient overflows on any rank, no rank changes a
            weight in this step, and the scale is halved; after 2,000 steps without, it doubles.
    """

    LEARNT = ("scale", "steps_at_scale")

    def __init__(
        self,
        sync: GradientSync,
        values: Mapping[str, Tensor],
        local: Sequence[str],
        scaled: bool,
        agree: Agreement,
    ):
        masters = {name: nn.Parameter(values[name].clone()) for name in sync.owned}
        super().__init__(masters)
        for master in masters.values():
            master.grad_dtype = None  # in 32 bit, and rounded
        self.sync, self.local, self.scaled, self.agree = sync, local, scaled, agree
        self.placements = sync.placements
        self.scale, self.steps_at_scale = (FIRST_SCALE if scaled else 1.0), 0

    def begin(self) -> None:
        for p in self.sync.owned.values():
            p.grad = None
        self.sync.begin()

    def finish(self) -> list[str]:
        unused = self.sync.finish()
        for name, p in self.sync.owned.items():
            master = self.owned[name]
            master.grad = None if p.grad is None else p.grad.to(master.dtype)
            if self.scaled and master.grad is not None:
                master.grad /= self.scale
        return list(self.local) if self.scaled and self.overflow() else unused

    def overflow(self) -> bool:
        """Whether a gradient isn't finite on some rank. Then no master weight has a gradient, and
        the optimizer does nothing. Collective.
        """
        gradients = [p.grad for p in self.owned.values() if p.grad is not None]
        mine = not all(bool(g.isfinite().all()) for g in gradients)
        (of_ranks,) = self.agree.numbers(float(mine))
        if found := any(of_ranks):
            for p in self.owned.values():
                p.grad = None
        self.steps_at_scale = 0 if found else self.steps_at_scale + 1
        if found:
            self.scale /= 2
        elif self.steps_at_scale == GROWTH_STEPS:
            self.scale, self.steps_at_scale = self.scale * 2, 0
        return found

    @torch.no_grad()
    def publish(self) -> None:
        for name, p in self.sync.owned.items():
            master = self.owned[name]
            p.copy_(master)
            if p.grad is not None and master.grad is not None:
                master.grad = p.grad.copy_(master.grad)
        self.sync.publish()

    def held(self) -> Mapping[str, list[Tensor]]:
        gradients = [p.grad for p in self.sync.owned.values() if p.grad is not None]
        held = dict(self.sync.held())
        masters: list[Tensor] = list(self.owned.values())
        return held | {
            "gradients": [*held.get("gradients", ()), *gradients],
            "master weights": masters,
        }

    def peaks(self) -> Mapping[str, int]:
        return self.sync.peaks()

    def describe(self) -> str:
        scale = f", and the loss is scaled by {self.scale:g}" if self.scaled else ""
        return f"{self.sync.describe()}; the optimizer updates master weights{scale}"


def _in_32_bit(value: Tensor) -> Tensor:
    """At least; whole numbers stay as they are."""
    if not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))
