"""Does a loss or a model treat each sample on its own? Halves of a batch tell: a trainer computes
them separately.

    loss_fn of some outputs                     is the weighted mean of loss_fn of two parts of them
    the model's outputs of some samples         are those of two parts of them, side by side
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.trainers.batches import Batch, map_tensors, split, tensors_of
from parallel101.trainers.losses import loss_and_weight
from parallel101.trainers.options import LossFn
from parallel101.trainers.verify.tolerance import distance, largest

EXACT = 1e-9  # relative; rounding in float64 is less
NO_MEAN = (
    "loss_fn isn't a mean over samples: of the same outputs it gives {:.6g}, and on average of two "
    "parts of them {:.6g}. Return (sum of losses, their weight) from loss_fn, such as the number "
    "of targets that count, and each is divided by the whole batch's weight. A loss that compares "
    "samples with each other can't be cut along them."
)
MIXES = (
    "Something in the model mixes samples: {}. It may look at statistics of the batch, or samples "
    "may not lie along dim 0 (a time-first LSTM, for example), where they are cut. BatchNorm works "
    "with sync_batch_norm=True."
)


def problem_of_loss(
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
    samples = max((len(t) for t in tensors_of(outputs) if t.dim()), default=0)
    if loss_fn is None or samples < 2 or not per_sample(outputs, samples):
        return ""

    exactly = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (outputs, targets))
    for (y, t), most in ((exactly, EXACT), ((outputs, targets), bound)):
        ways = [[samples], *two_parts(samples)]
        whole, *of_parts = (mean_loss(loss_fn, y, t, sizes, restore) for sizes in ways)
        if whole is not None:
            known = [mean for mean in of_parts if mean is not None]
            # samples that belong together may stay together in one of two ways
            wrong = known and all(far(whole, mean, most) for mean in known)
            return NO_MEAN.format(whole, known[0]) if wrong else ""
    return ""


@torch.no_grad()
def mean_loss(
    loss_fn: LossFn,
    outputs: Any,
    targets: Any,
    sizes: Sequence[int],
    restore: Callable[[], object],
) -> float | None:
    """Return the mean loss, as a trainer computes it from the losses of parts of these sizes; None
    if loss_fn raises for some of them.
    """
    total, weights = 0.0, 0.0
    # loss_fn may change them in place
    ys, ts = (split(tree, sizes) for tree in map_tensors(torch.clone, (outputs, targets)))
    for y, t, samples in zip(ys, ts, sizes):
        try:
            loss, weight = loss_and_weight(loss_fn, y, t)
        except Exception:
            return None
        finally:
            restore()
        total += loss.item() * (samples if weight is None else 1)
        weights += samples if weight is None else weight
    return total / weights if weights else 0.0


@torch.no_grad()
def problem_of_model(
    outputs_of: Callable[[Batch], Any], inputs: Batch, outputs: Any, bound: float
) -> str:
    """Return what is wrong with cutting the model's inputs along the samples; "" if nothing is.

    Args:
        outputs_of: computes the model's outputs.
        outputs: of these inputs.
        bound: how much of the largest output may be rounding.
    """
    samples = len(tensors_of(inputs)[0])
    if samples < 2 or not per_sample(outputs, samples):
        return ""
    try:
        parts = [outputs_of(part) for part in split(inputs, two_parts(samples)[0])]
    except Exception as error:
        how = f"it can't compute some of them alone ({type(error).__name__}: {error})"
        return MIXES.format(how)
    joined = [torch.cat(of_parts) for of_parts in zip(*map(tensors_of, parts))]
    if not differ(joined, tensors_of(outputs), bound):
        return ""
    return MIXES.format("its outputs for some of them change if they come without the others")


def two_parts(samples: int) -> list[list[int]]:
    """Return ways to split samples in two, unequally if possible: with equal parts, a loss that
    divides by something else may be the mean by chance.

    The first keeps pairs, and groups of 4, 8, …, together; a second one keeps groups of 3.
    """
    unit = samples & -samples  # the largest power of two that divides it
    unit //= 2 if unit == samples else 1
    small = [max(unit, samples // 3 // unit * unit)] + [samples // 3] * (samples % 3 == 0)
    return [[samples - size, size] for size in small]


def per_sample(outputs: Any, samples: int) -> bool:
    """Return whether there are tensors, each with so many samples along dim 0."""
    return {t.shape[:1] for t in tensors_of(outputs)} == {(samples,)}


def far(a: float, b: float, bound: float) -> bool:
    return not (abs(a - b) <= bound * max(abs(a), abs(b)) or (math.isnan(a) and math.isnan(b)))


def differ(a: Iterable[Tensor], b: Iterable[Tensor], bound: float) -> bool:
    """Return whether floating-point tensors differ, relative to the largest number in each."""
    return any(
        x.shape != y.shape or distance(x, y) > bound * largest(y)
        for x, y in zip(a, b)
        if y.is_floating_point()
    )
