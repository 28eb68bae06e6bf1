"""Is a loss a mean over samples? A trainer computes it for parts of a batch, and takes their mean.

loss_fn of some outputs   =   the weighted mean of loss_fn of two parts of them
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parallel101.trainers.batches import map_tensors, split, tensors_of
from parallel101.trainers.losses import loss_and_weight
from parallel101.trainers.options import Trainer
from parallel101.trainers.verify.snapshot import Snapshot

EXACT = 1e-9  # relative; rounding in float64 is less
NO_MEAN = (
    "loss_fn isn't a mean over samples: of the same outputs it gives {:.6g}, and on average of two "
    "parts of them {:.6g}. Return (sum of losses, their weight) from loss_fn, such as the number "
    "of targets that count, and each is divided by the whole batch's weight. A loss that compares "
    "samples with each other can't be cut along them."
)


@torch.no_grad()
def problem_of_loss(trainer: Trainer, outputs: Any, targets: Any) -> str:
    """Return what is wrong with cutting these outputs along the samples; "" if nothing is, or if
    it can't be told. What loss_fn has changed, such as a counter, is put back after each call.
    """
    loss_fn = trainer.loss_fn
    (samples, *others) = {len(t) if t.dim() else 0 for t in tensors_of(outputs)} or {0}
    if loss_fn is None or others or samples < 2:
        return ""
    snapshot = Snapshot(loss_fn, skip=(trainer, trainer.model))
    # where loss_fn can't compute in float64
    bound = 16 * max(torch.finfo(t.dtype).eps for t in trainer.model.parameters())

    def mean_loss(y: Any, t: Any, sizes: Sequence[int]) -> float:
        """Return what a trainer computes from the losses of parts of these sizes; NaN if loss_fn
        can't compute some of them.
        """
        total, weights = 0.0, 0.0
        # loss_fn may change them in place
        ys, ts = (split(tree, sizes) for tree in map_tensors(torch.clone, (y, t)))
        for of_part, size in zip(zip(ys, ts), sizes):
            try:
                loss, weight = loss_and_weight(loss_fn, *of_part)
            except Exception:
                return math.nan
            finally:
                snapshot.restore()
            total += loss.item() * (size if weight is None else 1)
            weights += size if weight is None else weight
        return total / weights if weights else 0.0

    exactly = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (outputs, targets))
    for (y, t), most in ((exactly, EXACT), ((outputs, targets), bound)):
        whole, *means = (mean_loss(y, t, sizes) for sizes in ([samples], *two_parts(samples)))
        if not math.isnan(whole):
            moved = map_tensors(lambda t: t.roll(1, 0), (y, t))
            rolled = mean_loss(moved[0], moved[1], [samples])
            right = [math.isclose(whole, mean, rel_tol=most) for mean in (rolled, *means)]
            wrong = [mean for mean, same in zip(means, right[1:]) if not (same or math.isnan(mean))]
            # if their order matters, samples may belong together, and stay so in one of these ways
            together = not right[0] and any(right)
            return "" if together or not wrong else NO_MEAN.format(whole, wrong[0])
    return ""


def two_parts(samples: int) -> Iterator[list[int]]:
    """Yield ways to split samples in two, unequally if possible: with equal parts, a loss that
    divides by something else may be the mean by chance.

    Some keep pairs, and groups of 4, 8, …, together, and others groups of 3.
    """
    unit = samples & -samples  # the largest power of two that divides it
    for together in {unit // 2 if unit == samples else unit, 1 if samples % 3 else 3}:
        if samples >= 2 * together:
            size = max(together, samples // 3 // together * together)
            yield from ([samples - size, size], [size, samples - size])
