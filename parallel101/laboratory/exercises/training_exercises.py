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
from torch import Tensor, nn

from parallel101.laboratory.exercises.harness import (
    LEARNING_RATE,
    MOMENTUM,
    OptimizerSteps,
    make_model,
)
from parallel101.laboratory.grade.compared_values import close, difference, factor
from parallel101.laboratory.grade.exercise import Case, Check, Misconception, Trial
from parallel101.laboratory.grade.exercise_checks import right

Named = dict[str, Tensor]
ITEM = 8  # bytes of a float64


# ---- what a trial found ----


def measured(trial: Trial, name: str) -> list[Any]:
    """Return what the program returned under this name, by rank."""
    return [found.get(name) if isinstance(found, dict) else None for found in trial.results]


def ended(trials: Sequence[Trial], least: int = 1) -> list[Trial]:
    """Return the trials on `least` ranks or more that ended without an error."""
    return [trial for trial in trials if trial.world_size >= least and trial.error is None]


# ---- what the ranks run, and what one process runs ----


def all_reduce_bytes(nbytes: float, n: int) -> int:
    """Return the least bytes that each rank sends in an all-reduce of `nbytes`."""
    return round(2 * (n - 1) / n * nbytes)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD: with AdamW, gradients that are n times too large would go unnoticed."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def train(
    function, sizes: list[int], tied: bool, weights: Tensor, inputs: Tensor, targets: Tensor
) -> dict[str, Any]:
    """Train with the learner's function on this rank.

    `inputs` has the shape (steps, samples of this rank, features).
    """
    model = make_model(sizes, weights, tied)
    optimizer = make_optimizer(model)
    steps = OptimizerSteps(model, optimizer)
    function(model, F.mse_loss, optimizer, list(zip(inputs, targets)))
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


def recorded(found: Any) -> bool:
    """Return whether a rank returned what `harness.OptimizerSteps` makes."""
    return (
        isinstance(found, dict)
        and all(isinstance(found.get(part), dict) for part in ("start", "weights"))
        and isinstance(found.get("gradients"), list)
        and all(isinstance(step, dict) for step in found["gradients"])
    )


def equals_one_process() -> Check:
    """Return a check of the start weights, each step's gradients, and the final weights."""

    def wrong(trial: Trial) -> str | None:
        for rank, (found, expected) in enumerate(
            zip(trial.results, trial.case.expected, strict=True)
        ):
            if not recorded(found):
                return f"rank {rank} returned {difference(found, expected)}"
            for name in expected["start"] if found["start"] else ():
                if (
                    what := difference(found["start"].get(name), expected["start"][name])
                ) is not None:
                    began = (
                        "rank 0 did not begin with its own weights"
                        if rank == 0
                        else f"rank {rank} began with other weights than rank 0 was given"
                    )
                    return f"{began}: {name}: {what}"
            if len(found["gradients"]) != len(expected["gradients"]):
                return (
                    f"rank {rank} called optimizer.step() {len(found['gradients'])} times; "
                    f"expected {len(expected['gradients'])}"
                )
            for step, (mine, theirs) in enumerate(
                zip(found["gradients"], expected["gradients"]), start=1
            ):
                for name in theirs:
                    if (what := difference(mine.get(name), theirs[name])) is not None:
                        return f"at step {step}, rank {rank}'s gradient of {name}: {what}"
            for name in expected["weights"]:
                if (
                    what := difference(found["weights"].get(name), expected["weights"][name])
                ) is not None:
                    return f"rank {rank}'s {name} at the end: {what}"
        return None

    return Check("value", "every step equals one process with the whole batch", wrong)


# ---- what a wrong program's first step shows ----


def alike(found: Named, expected: Named) -> bool:
    """Return whether all gradients, or weights, are as expected."""
    return all(
        isinstance(found.get(name), Tensor) and close(found[name], value)
        for name, value in expected.items()
    )


def scale(found: Named, expected: Named) -> float | None:
    """Return k if all of `found` is k times `expected`; None if there is no such factor."""
    if not all(
        isinstance(found.get(name), Tensor) and found[name].shape == value.shape
        for name, value in expected.items()
    ):
        return None
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
    ended = [
        trial
        for trial in trials
        if trial.error is None and trial.world_size > 1 and not right(trial)
    ]
    found = [(trial, rank, found) for trial in ended for rank, found in enumerate(trial.results)]
    return [
        (trial, rank, result["gradients"][0])
        for trial, rank, result in found
        if recorded(result) and result["gradients"]
    ]


def scaled(trials: Sequence[Trial], by: Callable[[Trial], float]) -> bool:
    """Return whether all first gradients are `by` times the right ones, or the ranks' mean."""

    def is_so(trial: Trial, found: Named) -> bool:
        ks = [
            scale(found, rule)
            for rule in (trial.case.expected[0]["gradients"][0], mean_of(trial.case.facts["local"]))
        ]
        return any(k is not None and abs(k / by(trial) - 1) < 1e-4 for k in ks)

    found = first_steps(trials)
    return bool(found) and all(is_so(trial, gradients) for trial, _, gradients in found)


def unsynchronized(trials: Sequence[Trial]) -> bool:
    """Return whether every rank begins with the weights that it was given."""
    found = [(trial, rank) for trial, rank, _ in first_steps(trials)]
    return bool(found) and all(
        alike(trial.results[rank]["start"], trial.case.facts["first"][rank])
        for trial, rank in found
    )


def from_another_start(trials: Sequence[Trial]) -> bool:
    """Return whether all ranks begin with the same weights, which are not those of rank 0."""
    several = {id(trial): trial for trial, _, _ in first_steps(trials)}.values()
    return bool(several) and all(
        alike(found["start"], trial.results[0]["start"])
        and not alike(found["start"], trial.case.facts["first"][0])
        for trial in several
        for found in trial.results
    )


def mean_of_means(trials: Sequence[Trial]) -> bool:
    found = first_steps(trials)
    return bool(found) and all(
        alike(gradients, mean_of(trial.case.facts["local"])) for trial, _, gradients in found
    )


def never_reduced(trials: Sequence[Trial]) -> bool:
    """Return whether each rank's gradient is its own, or some share of it."""
    found = first_steps(trials)
    return bool(found) and all(
        scale(gradients, trial.case.facts["local"][rank]) is not None
        for trial, rank, gradients in found
    )


def added_to_the_last(trials: Sequence[Trial]) -> bool:
    """Return whether the first step is right, and the second has the gradients of both.

    The first step's gradients may be in it once, or n times if they were summed again.
    """

    def holds_both(mine: Sequence[Named], theirs: Sequence[Named]) -> bool:
        if (
            len(mine) < 2
            or not alike(mine[0], theirs[0])
            or any(mine[1].get(name) is None for name in theirs[1])
        ):
            return False
        return (
            scale({name: mine[1][name] - value for name, value in theirs[1].items()}, theirs[0])
            is not None
        )

    failed = [trial for trial in trials if trial.error is None and not right(trial)]
    results = [pair for trial in failed for pair in zip(trial.results, trial.case.expected)]
    pairs = [
        (found["gradients"], expected["gradients"])
        for found, expected in results
        if recorded(found)
    ]
    return bool(pairs) and all(holds_both(mine, theirs) for mine, theirs in pairs)


NO_FIRST_SYNCHRONISATION = Misconception(
    "no first synchronisation",
    (
        "Every rank starts from its own weights. Equal gradients then change unequal weights, so "
        "the replicas never become equal."
    ),
    unsynchronized,
)
OTHER_START = Misconception(
    "begins with another rank's weights",
    (
        "All ranks begin with the same weights, but not with those of rank 0: they are another "
        "rank's, or a mean."
    ),
    from_another_start,
)
SUM_FOR_MEAN = Misconception(
    "sum for mean",
    "An all-reduce adds the ranks' gradients. Each of them belongs to a mean over one share, so "
    "their sum is n times the gradient of the mean loss, and each step is n times too long.",
    lambda trials: scaled(trials, lambda trial: trial.world_size),
)
MEAN_TWICE = Misconception(
    "mean taken twice",
    (
        "The gradients are divided by n twice, for example once in the loss and once after the "
        "all-reduce: each step is n times too short."
    ),
    lambda trials: scaled(trials, lambda trial: 1 / trial.world_size),
)
MEAN_OF_MEANS = Misconception(
    "mean of means",
    "Each rank takes the mean over its share, and then all ranks' means count the same. If shares "
    "differ in length, the samples of a short share count more than those of a long one.",
    mean_of_means,
)
NEVER_REDUCED = Misconception(
    "gradients never synchronised",
    (
        "At optimizer.step(), p.grad still holds this rank's own gradient. Each rank takes a "
        "different step."
    ),
    never_reduced,
)
NO_ZERO_GRAD = Misconception(
    "gradients not cleared",
    (
        "backward() adds to p.grad. The gradients of the step before are still there, so they are "
        "counted again."
    ),
    added_to_the_last,
)
