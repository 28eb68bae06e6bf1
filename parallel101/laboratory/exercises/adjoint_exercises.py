"""Shared code of exercises on collectives with a backward: the run, its checks, usual mistakes.

The learner's function takes x and returns y, with a backward that autograd calls. A case holds what
is right, and what the usual mistakes would give, so that they can be named.

    x ──▶ function ──▶ y        g ──▶ y.backward(g) ──▶ the gradient of x
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel101.laboratory.grade.compared_values import same
from parallel101.laboratory.grade.exercise import Case, Check, Misconception, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import (
    all_show,
    at_most,
    communicated,
    ended,
    on_ranks,
    right,
    value,
)
from parallel101.spans import compute, span, wait_span

REFUSED = "nothing: it raised a ValueError"


def forward_backward(
    forward: Callable[[], Any], g: Tensor, weights: Iterable[Tensor] = ()
) -> tuple[Any, int]:
    """Run forward and backward, each in a span, with g as the gradient of the result.

    If the result has another shape than g, its gradient is zeros, so that all ranks take part in
    the backward. There is none if the result has no graph.

    On the virtual clock only messages take time, so the spans are time in which the rank waits; the
    loss between them takes a second.

    Returns:
        The result, and the bytes that autograd keeps for backward besides the weights.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with wait_span("forward"), saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    with span("loss"):
        compute(1.0)
    with wait_span("backward"):
        if isinstance(y, Tensor) and y.requires_grad:
            y.backward(g.to(y.dtype) if g.shape == y.shape else torch.zeros_like(y))
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return y.detach() if isinstance(y, Tensor) else y, sum(kept.values())


def run_both_ways(function: Callable, x: Tensor, g: Tensor, *rest: Any) -> Any:
    """Run function(x, *rest) forward and backward, with g as the gradient of y.

    Returns y and the gradient of x, or None; REFUSED if the function raised a ValueError.
    """
    leaf = x.detach().requires_grad_()
    try:
        y, _ = forward_backward(lambda: function(leaf, *rest), g)
    except ValueError:
        return REFUSED
    return y, leaf.grad


def right_both_ways(says: str) -> Check:
    """Return a check that y and the gradient are right on every rank, and that y is new."""
    return value(says, keeps="xg", parts=("y", "the gradient of x"))


def total(trial: Trial) -> int:
    """Return the bytes that all ranks send together, forward and backward."""
    return sum(communicated(trial))


def bytes_in_total(says: str) -> Check:
    """Return a check that limits the bytes of all ranks together.

    They may send case.facts["bytes"], and 64 more for each rank.
    """
    return at_most(
        "bytes",
        says,
        total,
        lambda case: case.facts["bytes"],
        "the ranks sent {found} bytes; {most} are enough",
        lambda case: 64 * case.world_size,
    )


def least_received(case: Case) -> Sequence[int]:
    """Return the bytes that each rank must receive, by rank: case.facts["least"]."""
    return case.facts["least"]


# ---- the misconceptions ----


def wrong_parts(trials: Sequence[Trial]) -> Iterator[tuple[Trial, int, Any]]:
    """Yield (trial, part, value) for each wrong y (part 0) and gradient (part 1).

    Only runs that ended without an error are looked at.
    """
    for trial, rank in on_ranks(ended(trials)):
        found, expected = trial.results[rank], trial.case.expected[rank]
        for part in () if REFUSED in (found, expected) else range(2):
            if not same(found[part], expected[part]):
                yield trial, part, found[part]


def forms(
    right: tuple[Sequence, Sequence], ys: Sequence | None = None, *gradients: Sequence
) -> list[list[tuple]]:
    """Return the forms of a mistake, of y and the gradient by rank, for `gives`.

    Args:
        right: the right y and gradients, by rank.
        ys: the y that the mistake gives, if it gives another one.
        gradients: the gradients that it may give. One of the two may be right all the same.
    """
    pairs = product((right[0], *([] if ys is None else [ys])), (right[1], *gradients))
    return [list(zip(*pair)) for pair in pairs][1:]  # the first is right


@mistake(
    "equal blocks assumed",
    "It is right if all blocks are equally large, and only then. Somewhere a tensor is cut "
    "into equal parts, or a buffer gets the shape of the rank's own block.",
)
def only_equal_blocks(trials: Sequence[Trial]) -> bool:
    """Return whether the runs with equal blocks are right, and no others.

    A run that isn't right has wrong values or ended early.
    """
    found: dict[bool, set[bool]] = {True: set(), False: set()}
    for trial in (trial for trial in trials if trial.world_size > 1):
        found[len(set(trial.case.facts["sizes"])) == 1].add(right(trial))
    return found == {True: {True}, False: {False}}


AUTOGRAD_NOT_TOLD = Misconception(
    "autograd not told",
    "y is right, but it has no backward: autograd does not record what messages do. x gets no "
    "gradient.",
    lambda trials: all_show(
        wrong_parts(trials), lambda _trial, part, found: part == 1 and found is None
    ),
)
CHANGED_IN_PLACE = Misconception(
    "incoming gradient overwritten",
    "The function writes its result into g. Autograd may pass the same g to other backward "
    "functions, which then see wrong values.",
    lambda trials: any(1 in places for trial in trials for places in trial.changed),
)
