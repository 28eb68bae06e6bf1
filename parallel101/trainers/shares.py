"""The ranks' shares of a batch, checked before the first message of a step, on all ranks together.

rank 0   tp 0   samples 0 … 3  ┐ the same: ranks along tp, pp and cp work on one share
rank 1   tp 1   samples 0 … 3  ┘
rank 2   tp 0   samples 4 … 6    another one along dp and ep, of any size, even none
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from parallel101.trainers.agreement import Agreement
from parallel101.trainers.layout import SAMPLES, Axes
from parallel101.trainers.support.batches import (
    Batch,
    check_pair,
    count_samples,
    number_of_shape,
    number_of_values,
)


class Shares:
    """The check of each step's shares.

    Args:
        axes, agree: of the ranks that train together.
        has_loss: whether there is a loss_fn, which needs targets.
        least: how many samples each rank needs; `why` in words, for an error.
        check_time: raises ValueError for inputs and targets that can't be cut along time.
        check_frozen: raises ValueError for what was frozen when the trainer was built, and isn't.
    """

    def __init__(
        self,
        axes: Axes,
        agree: Agreement,
        has_loss: bool,
        least: int,
        why: str,
        check_time: Callable[[Batch, Batch], None] | None,
        check_frozen: Callable[[], None],
    ):
        self.axes, self.agree = axes, agree
        self.has_loss, self.least, self.why = has_loss, least, why
        self.check_time, self.check_frozen = check_time, check_frozen

    def check(self, inputs: Batch, targets: Batch, step: int) -> int:
        """Return the number of samples in the whole batch.

        Raises, on all ranks, TypeError or ValueError if the shares don't fit together.
        """
        problem, mine = None, (-1, 0, 0)
        several = len(self.agree.ranks) > self.axes.size(SAMPLES)  # ranks with the same samples
        try:
            if self.has_loss:
                check_pair((inputs, targets))
            elif targets is not None:
                raise ValueError(
                    "loss_fn is None, so the model returns its loss: expected step(inputs), "
                    "without separate targets"
                )
            self.check_frozen()
            if self.check_time is not None:
                self.check_time(inputs, targets)
            values = number_of_values((inputs, targets)) if several else 0
            mine = count_samples(inputs), number_of_shape(inputs), values
        except (TypeError, ValueError) as error:
            problem = error
        counts, *told = self.agree.numbers(*mine) if several else self.agree.numbers(mine[0])
        if min(counts) < 0:
            self.agree.raise_problem(problem, f"take its batch in step {step}")
        firsts: dict[int, int] = {}  # place along dp and ep → the first rank there
        for position in range(len(counts)):
            place = self.axes.place(SAMPLES, self.axes.coordinates(position))
            first = firsts.setdefault(place, position)
            if any(of_ranks[position] != of_ranks[first] for of_ranks in (counts, *told)):
                raise self.unlike(first, position, counts)
        total = sum(counts[first] for first in firsts.values())
        if not total:
            raise ValueError(f"the batch of step {step} has no samples: expected at least one")
        if min(counts) < self.least:
            few = f"{min(counts):.0f}" if min(counts) else "none"
            raise ValueError(
                f"rank {self.agree.ranks[counts.index(min(counts))]} has {few} of the {total:.0f} "
                f"samples, and {self.why}: leave such a batch out, or use fewer ranks"
            )
        return int(total)

    def unlike(self, first: int, position: int, counts: list[float]) -> ValueError:
        """Return the error for two ranks that should have the same samples, and don't."""
        a, b = self.agree.ranks[first], self.agree.ranks[position]
        given = (
            f"{counts[first]:.0f} and {counts[position]:.0f} samples"
            if counts[position] != counts[first]
            else "different samples"
        )
        return ValueError(
            f"rank {a} and rank {b} were given {given}, but ranks that differ only along tp, pp or "
            "cp work on the same ones: pass the same batch to all of them. share(batch) cuts over "
            "dp and ep only; a DistributedSampler, or a loader that shuffles with a seed of its "
            "own on each rank, gives them different samples"
        )


def check_frozen(check_norms: Callable[[], None], frozen: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a parameter or a norm that was frozen when the trainer was built, and
    is not any more.
    """
    check_norms()
    for name, p in frozen.items():
        if p.requires_grad:
            raise ValueError(
                f"{name!r} was frozen when the trainer was built, and now requires a gradient: "
                "build a new trainer for it"
            )
