"""Does a loss or a model treat each sample on its own? Halves of a batch tell: a trainer computes
them separately.

    loss_fn of some outputs                     is the weighted mean of loss_fn of two parts of them
    the model's outputs of some samples         are those of two parts of them, side by side
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from parallel101.trainers.step import Trainer
from parallel101.trainers.support.arguments import LossFn, loss_and_weight
from parallel101.trainers.support.batches import map_tensors, split, tensors_of
from parallel101.trainers.support.losses import Losses
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.one_process import Share, WholeModel
from parallel101.trainers.verify.snapshot import Snapshot

EXACT = 1e-9  # relative; rounding in float64 is less


class LossCheck:
    """Checks in steps 2, 4, 8, 16, … that the loss is a mean over samples.

    Args:
        loss_fn: as the user gave it.

    Attributes:
        always: check in the next step, whatever its number.
    """

    def __init__(self, trainer: Trainer, loss_fn: LossFn | None):
        self.trainer, self.loss_fn, self.always, self.checks = trainer, loss_fn, False, 0
        self.losses: Losses | None = None

    def watch(self, losses: Losses) -> None:
        """Let a step that begins keep the outputs of a microbatch if they are to be checked."""
        self.losses = None
        if self.always or checked_again(self.trainer):
            losses.keep, self.losses = self.checks % self.trainer.runner.microbatches, losses
            self.checks += 1

    def check(self) -> str:
        """Return what is wrong with the loss of the kept outputs on any rank, or "". Collective."""
        if self.losses is None:
            return ""
        trainer, kept, words = self.trainer, self.losses.kept, ""
        self.losses, snapshot = None, self.snapshot()
        try:
            if kept is not None:
                eps = max(torch.finfo(t.dtype).eps for t in trainer.model.parameters())
                with deterministic(trainer.model, []):
                    words = of_the_loss(trainer.loss_fn, *kept, 16 * eps, snapshot.restore)
        finally:
            snapshot.restore()
        if not any(trainer.agree.numbers(bool(words))[0]):
            return ""
        return next(filter(None, trainer.agree.texts(words)))

    def snapshot(self) -> Snapshot:
        """Return a Snapshot of everything that a call of loss_fn can change."""
        return Snapshot(self.loss_fn, skip=(self.trainer.model, self))


def checked_again(trainer: Trainer) -> bool:
    """Return whether the step that the trainer is taking is step 2, 4, 8, 16, …"""
    step = trainer.steps + 1
    return step > 1 and step & (step - 1) == 0


def of_the_loss(
    loss_fn: LossFn | None,
    outputs: Any,
    targets: Any,
    bound: float,
    restore: Callable[[], object],
) -> str:
    """Return what is wrong with cutting these outputs along the samples; "" if nothing is, or if
    it can't be told.

    Args:
        bound: how much of the loss may be rounding, where loss_fn can't compute in float64.
        restore: puts back what loss_fn has changed since it was called, such as a counter.
    """
    tensors = tensors_of(outputs)
    samples = len(tensors[0]) if tensors and tensors[0].dim() else 0
    if loss_fn is None or samples < 2 or not per_sample(outputs, samples):
        return ""

    def in_parts(y: Any, t: Any) -> tuple[float, list[float]]:
        means = []
        for sizes in two_parts(samples):
            with suppress(RuntimeError, ValueError, IndexError):
                means.append(mean_loss(loss_fn, y, t, sizes, restore))
        return mean_loss(loss_fn, y, t, [samples], restore), means

    try:  # exactly, if loss_fn can; then nothing is rounding
        exactly = map_tensors(in_float64, (outputs, targets))
        whole, of_parts = in_parts(*exactly)
        bound = EXACT
    except Exception:
        try:
            whole, of_parts = in_parts(outputs, targets)
        except Exception:  # as loss_fn may raise for some of the samples
            return ""
    # samples that belong together may stay together in one of two ways
    if not of_parts or not all(far(whole, mean, bound) for mean in of_parts):
        return ""
    return (
        f"loss_fn isn't a mean over samples: of the same outputs it gives {whole:.6g}, and on "
        f"average of two parts of them {of_parts[0]:.6g}. Return (sum of losses, their weight) "
        "from loss_fn, such as the number of targets that count, and each is divided by the whole "
        "batch's weight. A loss that compares samples with each other can't be cut along them."
    )


@torch.no_grad()
def mean_loss(
    loss_fn: LossFn,
    outputs: Any,
    targets: Any,
    sizes: Sequence[int],
    restore: Callable[[], object],
) -> float:
    """Return the mean loss, as a trainer computes it from the losses of parts of these sizes."""
    total, weights = 0.0, 0.0
    # loss_fn may change them in place
    ys, ts = (split(tree, sizes) for tree in map_tensors(torch.clone, (outputs, targets)))
    for y, t, samples in zip(ys, ts, sizes):
        loss, weight = loss_and_weight(loss_fn, y, t)
        restore()
        total += loss.item() * (samples if weight is None else 1)
        weights += samples if weight is None else weight
    return total / weights if weights else 0.0


@torch.no_grad()
def of_the_model(
    whole: WholeModel, share: Share, outputs: Any, bound: float, repeated: bool
) -> str:
    """Return what is wrong with cutting the model's inputs along the samples; "" if nothing is.

    Args:
        whole: inside of its `whole`.
        outputs: of the share.
        bound: how much of the largest output may be rounding.
        repeated: whether a step has several forwards.
    """
    inputs, targets = share
    samples = len(tensors_of(inputs)[0])
    sizes = two_parts(samples)[0] if samples > 1 else [samples]
    if repeated and differ(tensors_of(whole.outputs(inputs)), tensors_of(outputs), bound):
        return (
            "The model's outputs for the same samples change from one forward to the next, as "
            "spectral_norm's do in training, and here it has several forwards in a step. Use fewer "
            "microbatches, or a module without such a state."
        )
    if samples < 2:
        return ""
    try:
        parts = [whole.outputs(part) for part in split(inputs, sizes)]
    except Exception as error:
        how = f"it can't compute some of them alone ({type(error).__name__}: {error})"
    else:
        how = "its outputs for some of the samples change if they come without the others"
        if per_sample(outputs, samples):
            joined = [torch.cat(of_parts) for of_parts in zip(*map(tensors_of, parts))]
            mixes = differ(joined, tensors_of(outputs), bound)
        else:
            total, weights = 0.0, 0.0
            for y, t, size in zip(parts, split(targets, sizes), sizes):
                loss, weight = loss_and_weight(whole.loss_fn, y, t)
                total += loss.item() * (size if weight is None else 1)
                weights += size if weight is None else weight
            loss, weight = loss_and_weight(whole.loss_fn, outputs, targets)
            mixes = far(loss.item() / (weight or 1.0), total / weights, bound)
        if not mixes:
            return ""
    return (
        f"Something in the model mixes samples: {how}. It may look at statistics of the batch, or "
        "samples may not lie along dim 0 (a time-first LSTM, for example), where they are cut. "
        "BatchNorm works with sync_batch_norm=True."
    )


def two_parts(samples: int) -> list[list[int]]:
    """Return ways to split samples in two, unequally if possible: with equal parts, a loss that
    divides by something else may be the mean by chance.

    The first keeps pairs, and groups of 4, 8, …, together; a second one keeps groups of 3.
    """
    unit = samples & -samples  # the largest power of two that divides it
    while 2 * unit > samples:
        unit //= 2
    small = max(unit, samples // 3 // unit * unit)
    ways = [[samples - small, small]]
    if samples % 3 == 0:
        ways.append([samples - samples // 3, samples // 3])
    return ways


def in_float64(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def per_sample(outputs: Any, samples: int) -> bool:
    """Return whether each of these tensors has the samples along dim 0."""
    found = tensors_of(outputs)
    return bool(found) and all(t.dim() and len(t) == samples for t in found)


def far(a: float, b: float, bound: float) -> bool:
    return not (abs(a - b) <= bound * max(abs(a), abs(b)) or (math.isnan(a) and math.isnan(b)))


def differ(a: Iterable[Tensor], b: Iterable[Tensor], bound: float) -> bool:
    """Return whether floating-point tensors differ, relative to the largest number in each."""
    pairs = [(x, y) for x, y in zip(a, b) if y.is_floating_point() and y.numel()]
    return any(
        x.shape != y.shape
        or not torch.allclose(x, y, rtol=0, atol=bound * float(y.abs().max()), equal_nan=True)
        for x, y in pairs
    )
