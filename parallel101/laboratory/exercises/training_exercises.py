"""Runs and judges exercises that train a model, against one process that has the whole batch.

    found:     {"start": weights by name, "gradients": [step 1: by name, step 2, …],
                "weights": by name}, from harness.OptimizerSteps
    expected:  the same, from one process

Every step of every rank is compared. What a wrong program does shows best in the gradients of its
first step: facts["local"] has, by rank, those that the rank computes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.laboratory.exercises.harness import (
    OptimizerSteps,
    make_model,
)
from parallel101.laboratory.grade.compared_values import difference, factor, same
from parallel101.laboratory.grade.exercise import Case, Check, Misconception, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import all_show, on_ranks, wrong_trials

Named = dict[str, Tensor]
ITEM = 8  # bytes of a float64


# ---- what a trial found ----


def measured(trial: Trial, name: str) -> list[Any]:
    """Return what the program returned under this name, by rank."""
    return [found[name] for found in trial.results]


# ---- what the ranks run, and what one process runs ----


def all_reduce_bytes(nbytes: float, n: int) -> int:
    """Return the least bytes that each rank sends in an all-reduce of `nbytes`."""
    return round(2 * (n - 1) / n * nbytes)


def train(
    function, sizes: list[int], tied: bool, weights: Tensor, inputs: Tensor, targets: Tensor
) -> dict[str, Any]:
    """Train with the learner's function on this rank.

    `inputs` has the shape (steps, samples of this rank, features).
    """
    model = make_model(sizes, weights, tied)
    steps = OptimizerSteps(model)
    function(model, F.mse_loss, steps.optimizer, list(zip(inputs, targets)))
    return steps.result()


def train_whole(model, loss_fn, optimizer, batches) -> None:
    """Train in one process on the whole batch."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()


def ring_slack(case: Case) -> int:
    """Return the bytes allowed for counts, and for uneven chunks in a learner's own ring."""
    n = case.world_size
    return 64 + case.facts["steps"] * (32 + 6 * 2 * ITEM * (n - 1) ** 2 // n)


# ---- the check ----


def equals_one_process() -> Check:
    """Return a check of the start weights, each step's gradients, and the final weights."""

    def wrong(trial: Trial) -> str | None:
        for rank, (found, expected) in enumerate(zip(trial.results, trial.case.expected)):
            steps, most = found["gradients"], expected["gradients"]
            if len(steps) != len(most):
                return (
                    f"rank {rank} called optimizer.step() {len(steps)} times; expected {len(most)}"
                )
            for says, mine, theirs in (
                ("weights at the start, which must be rank 0's", found["start"], expected["start"]),
                *((f"gradients at step {i}", *two) for i, two in enumerate(zip(steps, most), 1)),
                ("weights at the end", found["weights"], expected["weights"]),
            ):
                mine = {name: mine.get(name) for name in theirs}
                if (what := difference(mine, theirs)) is not None:
                    return f"rank {rank}'s {says}: {what}"
        return None

    return Check("value", "every step equals one process with the whole batch", wrong)


# ---- what a wrong program's first step shows ----


def alike(found: Named, expected: Named) -> bool:
    """Return whether all gradients, or weights, are as expected."""
    return all(same(found.get(name), value) for name, value in expected.items())


def scale(found: Named, expected: Named) -> float | None:
    """Return k if all of `found` is k times `expected`; None if there is no such factor."""
    return (
        1.0 if alike(found, expected) else factor(flat(found, expected), flat(expected, expected))
    )


def flat(named: Named, names: Iterable[str]) -> Tensor:
    return torch.cat([named[name].flatten() for name in names])


def mean_of(local: Sequence[Named]) -> Named:
    """Return the mean of the ranks' gradients, with equal weight for each rank."""
    return {
        name: torch.stack([gradients[name] for gradients in local]).mean(0) for name in local[0]
    }


def first_steps(trials: Sequence[Trial]) -> list[tuple[Trial, int, Named]]:
    """Return (trial, rank, gradients of the first step) for all ranks that got that far.

    The runs are those of two or more ranks with wrong values.
    """
    return [
        (trial, rank, trial.results[rank]["gradients"][0])
        for trial, rank in on_ranks(wrong_trials(trials, 2))
        if trial.results[rank]["gradients"]
    ]


def scaled(trials: Sequence[Trial], by: Callable[[Trial], float]) -> bool:
    """Return whether all first gradients are `by` times the right ones, or the ranks' mean."""

    def is_so(trial: Trial, _: int, found: Named) -> bool:
        rules = (trial.case.expected[0]["gradients"][0], mean_of(trial.case.facts["local"]))
        ks = [scale(found, rule) for rule in rules]
        return any(k is not None and abs(k / by(trial) - 1) < 1e-4 for k in ks)

    return all_show(first_steps(trials), is_so)


@mistake(
    "begins with another rank's weights",
    "All ranks begin with the same weights, but not with those of rank 0: they are another "
    "rank's, or a mean.",
)
def from_another_start(trials: Sequence[Trial]) -> bool:
    """Return whether all ranks begin with the same weights, which are not those of rank 0."""
    return all_show(
        first_steps(trials),
        lambda trial, rank, _: (
            alike(trial.results[rank]["start"], trial.results[0]["start"])
            and not alike(trial.results[rank]["start"], trial.case.facts["first"][0])
        ),
    )


@mistake(
    "gradients not cleared",
    "backward() adds to p.grad. The gradients of the step before are still there, so they are "
    "counted again.",
)
def added_to_the_last(trials: Sequence[Trial]) -> bool:
    """Return whether the first step is right, and the second has the gradients of both.

    The first step's gradients may be in it once, or n times if they were summed again.
    """

    def holds_both(trial: Trial, rank: int) -> bool:
        (first, second, *_), (right_first, right_second, *_) = (
            result[rank]["gradients"] for result in (trial.results, trial.case.expected)
        )
        more = {name: second[name] - value for name, value in right_second.items()}
        return alike(first, right_first) and scale(more, right_first) is not None

    return all_show(on_ranks(wrong_trials(trials)), holds_both)


NO_FIRST_SYNCHRONISATION = Misconception(
    "no first synchronisation",
    "Every rank starts from its own weights. Equal gradients then change unequal weights, so "
    "the replicas never become equal.",
    lambda trials: all_show(
        first_steps(trials),
        lambda trial, rank, _: alike(trial.results[rank]["start"], trial.case.facts["first"][rank]),
    ),
)
SUM_FOR_MEAN = Misconception(
    "sum for mean",
    "An all-reduce adds the ranks' gradients. Each of them belongs to a mean over one share, so "
    "their sum is n times the gradient of the mean loss, and each step is n times too long.",
    lambda trials: scaled(trials, lambda trial: trial.world_size),
)
MEAN_TWICE = Misconception(
    "mean taken twice",
    "The gradients are divided by n twice, for example once in the loss and once after the "
    "all-reduce: each step is n times too short.",
    lambda trials: scaled(trials, lambda trial: 1 / trial.world_size),
)
MEAN_OF_MEANS = Misconception(
    "mean of means",
    "Each rank takes the mean over its share, and then all ranks' means count the same. If shares "
    "differ in length, the samples of a short share count more than those of a long one.",
    lambda trials: all_show(
        first_steps(trials),
        lambda trial, _, gradients: alike(gradients, mean_of(trial.case.facts["local"])),
    ),
)
NEVER_REDUCED = Misconception(
    "gradients never synchronised",
    "At optimizer.step(), p.grad still holds this rank's own gradient. Each rank takes a "
    "different step.",
    lambda trials: all_show(
        first_steps(trials),
        lambda trial, rank, own: scale(own, trial.case.facts["local"][rank]) is not None,
    ),
)
