"""Cross-entropy of logits that are cut along the vocabulary: they are never gathered.

rank 0   logits (…, V₀)  ┐  all-reduce the largest logit of each position        loss = log Σ exp(logit − max) − (logit of the target − max)
rank 1   logits (…, V₁)  ┘  all-reduce Σ exp(logit − max) and the target's       its gradient, softmax − one-hot, needs no message

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel101.collectives import all_reduce
from parallel101.mesh import GroupLike, group_of

IGNORED = -100  # a target that does not count, as in torch.nn.functional.cross_entropy


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, *, group: GroupLike = None) -> Tensor:
    """Mean cross-entropy, in nats, the same on every rank; equal to F.cross_entropy of the joined logits.

    Args:
        logits: (…, V/n), this rank's block along the vocabulary; blocks may differ in size, and one may be empty.
        targets: (…), whole numbers from 0 to V − 1, the same on every rank. −100 marks a position that does not count.
        group: the ranks among which the vocabulary is cut, in its order; see `group_of`. A tensor-parallel trainer passes its tp axis.

    Returns a scalar; of logits in half precision it is computed, and returned, in float32. The loss counts once, as in
    `reduce_from_group`: backward sends nothing. Forward makes two all-reduces, of N + n and of 2N numbers for N positions.

    Raises ValueError, on every rank, for shapes that do not fit, and IndexError for a target that is not in the vocabulary.
    """
    if not logits.is_floating_point() or logits.dim() < 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {logits.dtype} of shape {tuple(logits.shape)} and targets of shape {tuple(targets.shape)}: "
            "expected (…, this rank's part of the vocabulary) and (…)"
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets are {targets.dtype}: expected whole numbers, the position in the vocabulary")
    return VocabularyCrossEntropy.apply(logits, targets, group)


class VocabularyCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: GroupLike) -> Tensor:
        members, ctx.dtype, ctx.shape = group_of(group), logits.dtype, logits.shape
        position = members.position or 0
        values = logits.detach().reshape(targets.numel(), logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        target = targets.reshape(-1)
        count, width = values.shape

        # the ranks' widths travel with the largest logits: each rank knows only its own
        largest = values.new_full((count + members.size,), -torch.inf)
        if width:
            largest[:count] = values.amax(-1)
        largest[count + position] = width
        largest = all_reduce(largest, "max", group=group, algorithm="direct")
        starts = [0, *itertools.accumulate(int(size) for size in largest[count:].tolist())]

        counted = target != IGNORED
        if ((target < 0) | (target >= starts[-1]))[counted].any():
            raise IndexError(f"targets range from {target.min()} to {target.max()}, but the logits have a vocabulary of {starts[-1]}")
        here = counted & (target >= starts[position]) & (target < starts[position + 1])
        row, column = here.nonzero()[:, 0], target[here] - starts[position]

        shifted = values - largest[:count, None]
        sums = values.new_zeros(2, count)
        sums[1, row] = shifted[row, column]
        softmax = shifted.exp_()
        sums[0] = softmax.sum(-1)
        total, chosen = all_reduce(sums, group=group, algorithm="direct")

        number = counted.sum()
        softmax /= total[:, None]
        ctx.save_for_backward(softmax, row, column, counted, number)
        return ((total.log() - chosen) * counted).sum() / number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        softmax, row, column, counted, number = ctx.saved_tensors
        gradient = softmax * counted[:, None]
        gradient[row, column] -= 1
        return gradient.mul_(g / number.clamp(min=1)).view(ctx.shape).to(ctx.dtype), None, None
