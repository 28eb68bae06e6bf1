"""Cross-entropy of logits that are cut along the vocabulary: they are never gathered.

rank 0   logits (…, V₀)  ┐  all-reduce the largest logit of each position
rank 1   logits (…, V₁)  ┘  all-reduce Σ exp(logit − max), and the target's logit − max

loss = log Σ exp(logit − max) − (logit of the target − max)
its gradient, softmax − one-hot, needs no message

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from parallel101.collectives import all_reduce
from parallel101.collectives.meta_device import number_in
from parallel101.mesh import GroupLike, group_of
from parallel101.trainers.expect import expect
from parallel101.trainers.torch_functions import GraphNode


def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: GroupLike = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Return the cross-entropy, in nats, the same on every rank; equal to F.cross_entropy of the
    joined logits.

    Args:
        logits: (…, V/n), this rank's block along the vocabulary; blocks may differ in size, and one
            may be empty.
        targets: (…), whole numbers from 0 to V − 1, the same on every rank.
        group: the ranks among which the vocabulary is cut, in its order; see `group_of`. A
            tensor-parallel trainer passes its tp axis.
        ignore_index: a target that marks a position as not counted.
        reduction: "mean" over the positions that count, or their "sum".

    Returns a scalar; of logits in half precision it is computed, and returned, in float32. The loss
    counts once, as in `reduce_from_group`: backward sends nothing. Forward makes two all-reduces,
    of N + n and of 2N numbers for N positions.

    Raises ValueError, on every rank, for shapes that do not fit and for another reduction, and
    IndexError for a target that is not in the vocabulary.
    """
    whole = not targets.is_floating_point() and targets.dtype != torch.bool
    fits = logits.dim() > 0 and logits.shape[:-1] == targets.shape
    if not (fits and whole and logits.is_floating_point()):
        raise ValueError(
            f"logits {logits.dtype} of shape {tuple(logits.shape)} and targets {targets.dtype} of "
            f"shape {tuple(targets.shape)}: expected (…, this rank's part of the vocabulary), and "
            "whole numbers (…), positions in the vocabulary"
        )
    expect("reduction", reduction, reduction in ("mean", "sum"), '"mean" or "sum"')
    run = partial(cross_entropy, targets, group, ignore_index, reduction == "mean")
    return GraphNode.apply(run, logits)


def cross_entropy(
    targets: Tensor, group: GroupLike, ignore_index: int, mean: bool, logits: Tensor
) -> tuple[Any, ...]:
    """Return log Σ exp(logit) − logit of the target; its gradient is softmax − one-hot."""
    members = group_of(group)
    position = members.position or 0
    target, count, width = targets.reshape(-1), targets.numel(), logits.shape[-1]
    single = torch.promote_types(logits.dtype, torch.float32)
    values = logits.detach().reshape(count, width).to(single)

    # the ranks' widths travel with the largest logits: each rank knows only its own
    largest = values.new_full((count + members.size,), -torch.inf)
    if width:
        largest[:count] = values.amax(-1)
    largest[count + position] = width
    largest = all_reduce(largest, "max", group=group, algorithm="direct")
    start = stop = vocabulary = 0
    if not largest.is_meta:  # there no target has a value
        ends = [0, *largest[count:].cumsum(0).int().tolist()]
        start, stop, vocabulary = ends[position], ends[position + 1], ends[-1]

    counted = target != ignore_index
    if number_in((counted & ((target < 0) | (target >= vocabulary))).any()):
        raise IndexError(
            f"targets range from {target.min()} to {target.max()}, but the logits have a "
            f"vocabulary of {vocabulary}"
        )
    here = counted & (target >= start) & (target < stop)
    column = (target - start)[:, None] * here[:, None]  # 0 where it is another rank's

    shifted = values - largest[:count, None]
    sums = values.new_zeros(2, count)
    if width:
        sums[1] = shifted.gather(1, column)[:, 0] * here
    softmax = shifted.exp_()
    sums[0] = softmax.sum(-1)
    total, chosen = all_reduce(sums, group=group, algorithm="direct")

    number = counted.sum() if mean else counted.new_ones((), dtype=torch.int64)
    softmax /= total[:, None]
    loss = ((total.log() - chosen) * counted).sum() / number
    shape, dtype = logits.shape, logits.dtype

    def backward(
        g: Tensor, softmax: Tensor, here: Tensor, column: Tensor, counted: Tensor, number: Tensor
    ) -> Tensor:
        gradient = softmax * counted[:, None]
        if gradient.shape[1]:
            gradient.scatter_add_(1, column, -here[:, None].to(gradient.dtype))
        gradient.mul_(g / number.clamp(min=1))
        return gradient.view(shape).to(dtype)

    return loss, backward, softmax, here, column, counted, number
