"""The shares of a batch that the ranks are given, and the losses of their microbatches, whose sum
over all ranks is the loss of the whole batch.

rank 0   tp 0   samples 0 … 3  ┐ the same: ranks along tp, pp and cp work on one share
rank 1   tp 1   samples 0 … 3  ┘
rank 2   tp 0   samples 4 … 6    another one along dp and ep, of any size, even none

loss_fn returns a mean        microbatch of 3 samples, batch of 8: mean · 3/8
                              of half of their positions in time (cp): · 1/2
loss_fn returns (sum, weight) the sum as it is; at the end, gradients are divided by all weights
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from parallel101.collectives.meta_device import number_in
from parallel101.trainers.batches import (
    Batch,
    check_pair,
    copied,
    count_samples,
    in_words,
    number_of_shape,
    number_of_values,
)
from parallel101.trainers.options import LossFn, Trainer

# ── shares, before the first message of a step ──


def check_shares(trainer: Trainer, inputs: Batch, targets: Batch) -> int:
    """Return the number of samples in the whole batch. Collective.

    Raises, on all ranks, TypeError or ValueError if the shares don't fit together, or if something
    is trained that was frozen when the trainer was built.
    """
    shares, agree, step = trainer.axes.shares, trainer.agree, trainer.steps
    problem, told = None, (-1, 0, 0)
    several = len(shares) > len(set(shares))  # ranks have the same samples
    try:
        if trainer.loss_fn is not None:
            check_pair((inputs, targets))
        elif targets is not None:
            raise ValueError(
                "loss_fn is None, so the model returns its loss: expected step(inputs), without "
                "separate targets"
            )
        for name, p in trainer.local.items():
            if p.requires_grad and name not in trainer.trained:
                raise ValueError(
                    f"{name!r} was frozen when the trainer was built, and now requires a gradient: "
                    "build a new trainer for it"
                )
        for check in trainer.checks:
            check(inputs, targets)
        values = number_of_values((inputs, targets)) if several else 0
        told = count_samples(inputs), number_of_shape(inputs), values
    except (TypeError, ValueError) as error:
        problem = error
    of_ranks = list(zip(*agree.numbers(*(told if several else told[:1]))))
    counts = [int(count) for count, *_ in of_ranks]
    if min(counts) < 0:
        agree.raise_problem(problem, f"take its batch in step {step}")
    firsts: dict[int, int] = {}  # place along dp and ep → the first rank there
    for position, here in enumerate(of_ranks):
        first = firsts.setdefault(shares[position], position)
        if here != of_ranks[first]:
            one, other = counts[first], counts[position]
            given = "different samples" if one == other else f"{one} and {other} samples"
            raise ValueError(
                f"rank {agree.ranks[first]} and rank {agree.ranks[position]} were given {given}, "
                "but ranks that differ only along tp, pp or cp work on the same ones: pass the "
                "same batch to all of them. share(batch) cuts over dp and ep only; a "
                "DistributedSampler, or a loader that shuffles with a seed of its own on each "
                "rank, gives them different samples"
            )
    total, (least, why) = sum(counts[first] for first in firsts.values()), trainer.least
    if not total:
        raise ValueError(f"the batch of step {step} has no samples: expected at least one")
    if (fewest := min(counts)) < least:
        raise ValueError(
            f"rank {agree.ranks[counts.index(fewest)]} has {fewest} of the {total} samples, and "
            f"{why}: leave such a batch out, or use fewer ranks"
        )
    return total


# ── losses ──


class Losses:
    """One rank's losses in one step.

    Args:
        loss_fn: (outputs, targets) → mean loss, or (sum, weight). None: outputs have the loss.
        samples: of the whole batch.
        scale: a factor of what backward starts from, and not of the loss that is reported.
        training: whether backward follows, so that the loss must depend on a weight.

    Attributes:
        part: how much of each sample this rank has, if time is cut.
        keep: the number of a microbatch; `kept` are its outputs and targets afterwards.
    """

    part = 1.0
    keep: int | None = None
    kept: tuple[Any, Any] | None = None

    def __init__(
        self, loss_fn: LossFn | None, samples: int, scale: float = 1.0, training: bool = True
    ):
        self.loss_fn, self.samples, self.scale, self.training = loss_fn, samples, scale, training
        self.parts: list[Tensor] = []
        self.weights: list[float] = []

    def add(self, outputs: Any, targets: Any, samples: int) -> Tensor:
        """Return a microbatch's part of the loss, from which backward starts."""
        if self.keep == len(self.parts):
            self.kept = copied((outputs, targets))
        loss, weight = loss_and_weight(self.loss_fn, outputs, targets)
        if self.training and not loss.requires_grad:
            raise ValueError(
                "the loss doesn't depend on any trained weight: was it detached, made of whole "
                "numbers (argmax), or computed under torch.no_grad()?"
            )
        if weight is None:
            loss = loss * (samples * self.part / self.samples)
        else:
            self.weights.append(weight)
        self.parts.append(loss.detach())
        return loss if self.scale == 1 else loss * self.scale

    def sum(self) -> float:
        return sum(number_in(part) for part in self.parts)

    def weight(self) -> float:
        """Return the sum of the weights; −1 if the parts are means or are another rank's."""
        return math.fsum(self.weights) if self.weights else -1.0


class NoTargets(ValueError):
    """The error of a batch in which no target counts."""


def agree_on_loss(
    trainer: Trainer, losses: Losses, unused: int
) -> tuple[float, float | None, bool]:
    """Return the loss of the whole batch, the same float on every rank, the weight by which to
    divide gradients (None: they are of the mean already), and whether a rank's samples left out a
    parameter. Collective.

    Args:
        unused: how many parameters this rank's samples did not reach.

    Raises, on every rank, FloatingPointError if one rank's loss is not finite, and NoTargets if
    no target counts.
    """
    agree, step = trainer.agree, trainer.steps
    parts, weights, counts = agree.numbers(losses.sum(), losses.weight(), unused)
    pairs = zip(parts, agree.ranks)
    where = ", ".join(f"{part} on rank {rank}" for part, rank in pairs if not math.isfinite(part))
    if where:
        raise FloatingPointError(
            f"step {step}: the loss is {where}; no weight was changed. "
            "Look at that rank's samples (a mean over no targets is nan: loss_fn may return a sum "
            "and its weight), or lower the learning rate, or set clip_norm"
        )
    once = trainer.axes.without_tp
    loss, weight = math.fsum(parts[i] for i in once), None
    if max(weights) >= 0:
        weight = math.fsum(max(weights[i], 0.0) for i in once)
        if not weight:
            raise NoTargets(
                f"step {step}: the weights of the loss add up to 0, so no target counts; "
                "no weight was changed"
            )
        loss /= weight
    return loss, weight, any(counts)


# ── what loss_fn returns ──


def loss_and_weight(
    loss_fn: LossFn | None, outputs: Any, targets: Any
) -> tuple[Tensor, float | None]:
    """Return the loss, and its weight if it is a sum. Raises ValueError for anything else.

    Args: loss_fn: returns a mean over the samples, or (sum, weight). None: the model returns its
        loss, or outputs with a `loss`.
    """
    if loss_fn is not None:
        loss = loss_fn(outputs, targets)
    else:
        in_dict = isinstance(outputs, Mapping)
        loss = outputs.get("loss") if in_dict else getattr(outputs, "loss", outputs)
    weight = None
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, given = loss
        tracked = isinstance(given, Tensor) and given.requires_grad
        weight = float(given.detach() if tracked else given)
        if tracked or not weight >= 0:
            raise ValueError(
                f"the weight of the loss {'needs a gradient' if tracked else f'is {weight}'}: "
                "expected (sum of losses, their weight), by which gradients are divided: 0 or "
                "more, and weight.detach(); or their mean"
            )
    if not isinstance(loss, Tensor) or loss.dim():
        who, expected = "loss_fn returned", "the mean over the samples, a tensor without dims"
        if loss_fn is None:
            who = "loss_fn is None, and the model's loss is"
            expected = "a model that returns its loss, or outputs with a loss"
        what = in_words(loss) if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(
            f"{who} {what}: expected {expected}, or loss_fn=lambda outputs, targets: (sum, weight)"
        )
    return loss, weight
