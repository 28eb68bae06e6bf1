"""The dtypes in which a trainer computes, and the master weights of mixed precision.

    bytes a weight      weight   gradient   master weight   Adam's moments   together
    "fp32"                 4        4             –               8             16
    "bf16-mixed"           2        2             4               8             16
      32-bit gradients     2        4             4               8             18
    "bf16"                 2        2             –               4              8

An update is often smaller than half the distance between two neighbouring 16-bit numbers, and would
be rounded away. So the optimizer updates **master weights** in 32 bits, and the model computes with
a rounded copy of them:

    16-bit forward, backward ─▶ gradients, summed ─▶ to 32 bits ─▶ optimizer ─▶ rounded to 16 bits

Source: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3; Rajbhandari
et al., "ZeRO" (arXiv 1910.02054), section 3.1, counts these bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel101.collectives.meta_device import number_in
from parallel101.trainers.batches import map_tensors
from parallel101.trainers.expect import expect
from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.options import Options, Trainer

FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000  # as torch.amp.GradScaler's


class Precision(NamedTuple):
    """The dtypes in which a trainer computes.

    Attributes:
        weights: the dtype of weights, buffers and activations. None: the model's own.
        gradients: the dtype of gradients, and of the messages that sum them. None: the weights'.
        master: whether the optimizer updates master weights.
        scaled: whether the loss is scaled up, so that small gradients are not rounded to zero.
        autocast: the dtype of those operations of the forward that autocast converts. The weights
            keep theirs.
    """

    weights: torch.dtype | None = None
    gradients: torch.dtype | None = None
    master: bool = False
    scaled: bool = False
    autocast: torch.dtype | None = None

    def wrap_loss(self, loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Let the loss compute in at least 32 bits, which a sum over a batch needs."""
        if loss_fn is None or self.weights in (None, torch.float32):
            return loss_fn
        return lambda outputs, targets: loss_fn(map_tensors(_in_32_bit, outputs), targets)

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a checkpoint stores a tensor of this dtype."""
        if self.weights is None or not dtype.is_floating_point:
            return dtype
        return torch.promote_types(dtype, torch.float32) if self.master else self.weights

    def cast_model(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Round the model's weights and buffers, in place. Return what the optimizer updates, by
        name: the trained weights, or master weights, as they were, in at least 32 bits.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.master:
            trained = {n: nn.Parameter(_in_32_bit(p.detach())) for n, p in trained.items()}
        if self.weights is not None:
            for t in (*model.parameters(), *model.buffers()):
                if t.is_floating_point():
                    t.data = t.data.to(self.weights)
        return trained


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "bf16-mixed": Precision(torch.bfloat16, master=True),
    "fp16-mixed": Precision(torch.float16, master=True, scaled=True),
}


def choose_precision(options: Options, device: torch.device) -> Precision:
    """Return the Precision for these options. Raises ValueError if they don't go together."""
    autocast, precision, gradients = options.autocast, options.precision, options.gradient_dtype
    possible = autocast is None or device.type != "meta"
    expected = 'None for a model on the meta device, or precision="bf16" or "bf16-mixed"'
    expect("autocast", autocast, possible, expected)
    if precision is None and gradients is None:
        return Precision(autocast=autocast)
    expected = f"one of {', '.join(map(repr, PRECISIONS))}, or None without gradient_dtype"
    expect("precision", precision, precision in PRECISIONS, expected)
    expected = f"None with precision={precision!r}, which also chooses the weights' dtype"
    expect("autocast", autocast, autocast is None, expected)
    chosen = PRECISIONS[str(precision)]
    allowed = {chosen.weights, torch.float32} if chosen.master else {chosen.weights}
    expected = f"{' or '.join(sorted(map(str, allowed)))} with precision={precision!r}, or None"
    expect("gradient_dtype", gradients, gradients is None or gradients in allowed, expected)
    return chosen._replace(gradients=gradients)


class MasterWeights(GradientSync):
    """A GradientSync whose `owned` parameters are the master weights of those that `sync` owns.

    After the step, a master weight's .grad is the rounded gradient again: only the optimizer's step
    needs it in 32 bits.

    Args:
        trainer: whose runner synchronizes the gradients of the rounded weights.
        weights: name → the whole master weight at the start.

    With `scaled`, the loss is scaled by `scale`. If a gradient overflows on any rank, no rank
    changes a weight in this step, and the scale is halved. After 2,000 steps without overflow, it
    doubles.
    """

    def __init__(self, trainer: Trainer, weights: Mapping[str, nn.Parameter]):
        self.sync: GradientSync = trainer.runner.sync
        cut = {n: trainer.layout.cut(n, weights[n].detach()) for n in self.sync.owned}
        super().__init__({name: nn.Parameter(value.clone()) for name, value in cut.items()})
        for master in self.owned.values():
            master.grad_dtype = None  # it may be in 32 bits or rounded
        self.local = [name for name in trainer.trained if name in trainer.local]
        self.scaled, self.agree = trainer.precision.scaled, trainer.agree
        self.scale, self.steps_at_scale = (FIRST_SCALE if self.scaled else 1.0), 0

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
        return self.local if self.scaled and self.overflow() else unused

    def overflow(self) -> bool:
        """Return whether a gradient isn't finite on some rank. If so, the master weights' gradients
        are removed, and the optimizer does nothing. Collective.
        """
        gradients = [p.grad for p in self.owned.values() if p.grad is not None]
        here = sum(number_in(~g.isfinite().all()) for g in gradients)
        self.steps_at_scale += 1
        if overflow := any(self.agree.numbers(here)[0]):
            self.scale, self.steps_at_scale = self.scale / 2, 0
            for p in self.owned.values():
                p.grad = None
        elif self.steps_at_scale == GROWTH_STEPS:
            self.scale, self.steps_at_scale = self.scale * 2, 0
        return overflow

    @torch.no_grad()
    def publish(self) -> None:
        for name, p in self.sync.owned.items():
            master = self.owned[name]
            p.copy_(master)
            if p.grad is not None and master.grad is not None:
                master.grad = p.grad.copy_(master.grad)
        self.sync.publish()


def _in_32_bit(value: Tensor) -> Tensor:
    """Convert a floating-point tensor to at least 32 bits. Integers stay as they are."""
    if not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))
