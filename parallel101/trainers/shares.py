"""The ranks' shares of a batch, checked before the first message of a step, on all ranks together.

rank 0   tp 0   samples 0 … 3  ┐ the same: ranks along tp, pp and cp work on one share
rank 1   tp 1   samples 0 … 3  ┘
rank 2   tp 0   samples 4 … 6    another one along dp and ep, of any size, even none
"""

from __future__ import annotations

from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.support.batches import (
    Batch,
    check_pair,
    count_samples,
    number_of_shape,
    number_of_values,
)
from parallel101.trainers.trainer import Trainer


def check_shares(trainer: Trainer, inputs: Batch, targets: Batch) -> int:
    """Return the number of samples in the whole batch. Collective.

    Raises, on all ranks, TypeError or ValueError if the shares don't fit together, or if something
    is trained that was frozen when the trainer was built.
    """
    axes, agree, step = trainer.axes, trainer.agree, trainer.steps
    problem, mine = None, (-1, 0, 0)
    several = len(agree.ranks) > axes.size(SAMPLES)  # ranks with the same samples
    try:
        if trainer.loss_fn is not None:
            check_pair((inputs, targets))
        elif targets is not None:
            raise ValueError(
                "loss_fn is None, so the model returns its loss: expected step(inputs), without "
                "separate targets"
            )
        check_frozen(trainer)
        if trainer.context is not None:
            trainer.context.check(inputs, targets)
        values = number_of_values((inputs, targets)) if several else 0
        mine = count_samples(inputs), number_of_shape(inputs), values
    except (TypeError, ValueError) as error:
        problem = error
    counts, *told = agree.numbers(*mine) if several else agree.numbers(mine[0])
    if min(counts) < 0:
        agree.raise_problem(problem, f"take its batch in step {step}")
    firsts: dict[int, int] = {}  # place along dp and ep → the first rank there
    for position, here in enumerate(zip(counts, *told)):
        first = firsts.setdefault(axes.place(SAMPLES, axes.coordinates(position)), position)
        if here != tuple(of_ranks[first] for of_ranks in (counts, *told)):
            given = (
                f"{counts[first]:.0f} and {counts[position]:.0f} samples"
                if counts[position] != counts[first]
                else "different samples"
            )
            raise ValueError(
                f"rank {agree.ranks[first]} and rank {agree.ranks[position]} were given {given}, "
                "but ranks that differ only along tp, pp or cp work on the same ones: pass the "
                "same batch to all of them. share(batch) cuts over dp and ep only; a "
                "DistributedSampler, or a loader that shuffles with a seed of its own on each "
                "rank, gives them different samples"
            )
    total, fewest = sum(counts[first] for first in firsts.values()), min(counts)
    if not total:
        raise ValueError(f"the batch of step {step} has no samples: expected at least one")
    if fewest < trainer.least:
        raise ValueError(
            f"rank {agree.ranks[counts.index(fewest)]} has {fewest:.0f} of the {total:.0f} "
            f"samples, and {trainer.why_least}: leave such a batch out, or use fewer ranks"
        )
    return int(total)


def check_frozen(trainer: Trainer) -> None:
    """Raise ValueError for a parameter or a norm that was frozen when the trainer was built, and
    is not any more.
    """
    trainer.check_norms()
    trained = set(trainer.trained)
    for name, p in trainer.local.items():
        if p.requires_grad and name not in trained:
            raise ValueError(
                f"{name!r} was frozen when the trainer was built, and now requires a gradient: "
                "build a new trainer for it"
            )
