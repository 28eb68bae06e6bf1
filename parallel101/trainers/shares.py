"""The ranks' shares of a batch, checked before the first message of a step, on all ranks together.

rank 0   tp 0   samples 0 … 3  ┐ the same: ranks along tp and pp work on one share
rank 1   tp 1   samples 0 … 3  ┘
rank 2   tp 0   samples 4 … 6    another one along dp, of any size, even none
"""

from __future__ import annotations

from typing import Any

from parallel101.trainers.support.batches import (
    Batch,
    check_pair,
    count_samples,
    number_of_shape,
    number_of_values,
)


def check_shares(trainer: Any, inputs: Batch, targets: Batch) -> tuple[int, int]:
    """How many samples the whole batch has, and a number for the shape of one.

    Raises, on all ranks, if the shares don't fit together.
    """
    agree, axes = trainer.agree, trainer.axes
    problem, mine = None, (-1, 0, 0)
    several = len(agree.ranks) > axes.sizes["dp"]  # ranks with the same samples
    try:
        if trainer.prepared.loss_fn is not None:
            check_pair((inputs, targets))
        elif targets is not None:
            raise ValueError(
                "loss_fn is None, so the model returns its loss: expected step(inputs), "
                "without targets of its own"
            )
        check_frozen(trainer)
        values = number_of_values((inputs, targets)) if several else 0
        mine = count_samples(inputs), number_of_shape(inputs), values
    except (TypeError, ValueError) as error:
        problem = error
    counts, *told = agree.numbers(*mine) if several else agree.numbers(mine[0])
    if min(counts) < 0:
        agree.raise_problem(problem, f"take its batch in step {trainer.steps}")
    firsts: dict[int, int] = {}  # position along dp → the first rank there
    for position in range(len(counts)):
        first = firsts.setdefault(axes.coordinates(position)["dp"], position)
        if any(of_ranks[position] != of_ranks[first] for of_ranks in (counts, *told)):
            a, b = agree.ranks[first], agree.ranks[position]
            unlike = (
                f"{counts[first]:.0f} and {counts[position]:.0f} samples"
                if counts[position] != counts[first]
                else "other samples"
            )
            raise ValueError(
                f"rank {a} and rank {b} were given {unlike}, but ranks that differ only along "
                "tp or pp work on the same ones: "
                "pass the same batch to all of them. share(batch) cuts over dp alone; a "
                "DistributedSampler, or a loader that "
                "shuffles with a seed of its own on each rank, gives them different samples"
            )
    total = sum(counts[first] for first in firsts.values())
    if not total:
        raise ValueError(f"the batch of step {trainer.steps} has no samples: expected at least one")
    if trainer.synchronises_norms and not min(counts):
        raise ValueError(
            f"rank {agree.ranks[counts.index(0)]} has none of the {total:.0f} samples, and "
            "sync_batch_norm needs one on each rank: "
            "leave such a batch out, or use fewer ranks"
        )
    return int(total), mine[1]


def check_frozen(trainer: Any) -> None:
    """Raises ValueError for a parameter or a norm that was frozen when the trainer was built,
    and is not any more.
    """
    trainer.check_norms()
    for name, p in trainer.frozen:
        if p.requires_grad:
            raise ValueError(
                f"{name!r} was frozen when the trainer was built, and now requires a gradient: "
                "build a new trainer for it"
            )


def holds_share(trainer: Any) -> bool:
    """True on one of the ranks that have the same samples."""
    return all(trainer.axes.here.get(axis, 0) == 0 for axis in trainer.axes.sizes if axis != "dp")
