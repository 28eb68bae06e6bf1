"""Shared code of exercises on collectives with a backward: the run, its checks, usual mistakes.

The learner's function takes x and returns y, with a backward that autograd calls. A case holds what
is right, and what the usual mistakes would give, so that they can be named.

    x ──▶ function ──▶ y        g ──▶ y.backward(g) ──▶ the gradient of x
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.laboratory.grade.compared_values import difference, same
from parallel101.laboratory.grade.exercise import Case, Check, Misconception, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import (
    all_show,
    at_most,
    communicated,
    failed,
    on_ranks,
    right,
)
from parallel101.spans import compute, span, wait_span

PARTS = ("y", "the gradient of x")
REFUSED = "refused with a ValueError"


def forward_and_backward(function: Callable, x: Tensor, g: Tensor, *rest: Any) -> Any:
    """Run function(x, *rest) forward and backward, with g as the gradient of y.

    Returns y, the gradient of x, and whether y has memory of its own; REFUSED if the function
    raised a ValueError. If y has no backward, the gradient is None. If y has another shape than g,
    its gradient is zeros, so that all ranks take part in the backward.
    """
    leaf = x.detach().requires_grad_()
    try:
        with wait_span("forward"):
            y = function(leaf, *rest)
    except ValueError:
        return REFUSED
    if not isinstance(y, Tensor):
        return y, None, True
    own = not y.numel() or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    with span("loss"):
        compute(1.0)
    with wait_span("backward"):
        if y.requires_grad:
            y.backward(g if g.shape == y.shape else torch.zeros_like(y))
    return y.detach(), leaf.grad, own


def right_both_ways(says: str) -> Check:
    """Return a check that y and the gradient are right everywhere.

    On every rank, y must also be a new tensor, and x and g must be untouched.
    """

    def wrong(trial: Trial) -> str | None:
        for rank, (found, expected) in enumerate(
            zip(trial.results, trial.case.expected, strict=True)
        ):
            if REFUSED in (found, expected):
                if found != expected:
                    return (
                        f"rank {rank} raised a ValueError"
                        if found == REFUSED
                        else f"rank {rank} raised no ValueError, but a block is too short"
                    )
                continue
            for part, mine, theirs in zip(PARTS, found, expected):
                if (what := difference(mine, theirs)) is not None:
                    return f"on rank {rank}, {part} is {what}"
            if not found[2]:
                return f"on rank {rank}, y shares its memory with x; expected a new tensor"
        for rank, places in enumerate(trial.changed):
            if places:
                return f"rank {rank} changed its {'xg'[places[0]]}, which must stay as it is"
        return None

    return Check("value", says, wrong)


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


def wrong_parts(trials: Sequence[Trial]) -> Iterator[tuple[Trial, int, int, Any]]:
    """Yield (trial, rank, part, value) for each wrong y (part 0) and gradient (part 1).

    Only runs that ended without an error are looked at.
    """
    for trial, rank in on_ranks(trial for trial in trials if trial.error is None):
        found, expected = trial.results[rank], trial.case.expected[rank]
        for part in () if REFUSED in (found, expected) else range(2):
            if not same(found[part], expected[part]):
                yield trial, rank, part, found[part]


def gives(name: str) -> Callable[[Sequence[Trial]], bool]:
    """Return a test of whether every wrong value is one that this mistake gives.

    case.facts[name] has, by rank, the possible values of y and those of the gradient.
    """
    return lambda trials: all_show(
        wrong_parts(trials),
        lambda trial, rank, part, found: any(
            same(found, value) for value in trial.case.facts[name][rank][part]
        ),
    )


@mistake(
    "result shares memory with its input",
    "Where nothing has to be sent, y is x itself. A caller that changes y in place would then "
    "change x too, but only on some numbers of ranks.",
)
def shares_memory(trials: Sequence[Trial]) -> bool:
    """Return whether all values are right, but some y has the memory of its x."""
    values_right = not any(True for _ in wrong_parts(trials))
    return values_right and any(
        found != REFUSED and not found[2]
        for trial in trials
        if trial.error is None
        for found in trial.results
    )


@mistake(
    "equal blocks assumed",
    "It is right if all blocks are equally large, and only then. Somewhere a tensor is cut "
    "into equal parts, or a buffer gets the shape of the rank's own block.",
)
def only_equal_blocks(trials: Sequence[Trial]) -> bool:
    """Return whether the runs with equal blocks are right, and some other run is not.

    A run that isn't right has wrong values or ended early.
    """
    several = [trial for trial in trials if trial.world_size > 1]
    equal = [trial for trial in several if len(set(trial.case.facts["sizes"])) == 1]
    return bool(equal) and bool(failed(several)) and all(map(right, equal))


AUTOGRAD_NOT_TOLD = Misconception(
    "autograd not told",
    "y is right, but it has no backward: autograd does not record what messages do. x gets no "
    "gradient.",
    lambda trials: all_show(
        wrong_parts(trials), lambda _trial, _rank, part, found: part == 1 and found is None
    ),
)
CHANGED_IN_PLACE = Misconception(
    "incoming gradient overwritten",
    "The function writes its result into g. Autograd may pass the same g to other backward "
    "functions, which then see wrong values.",
    lambda trials: any(1 in places for trial in trials for places in trial.changed),
)
