"""Exercise 9e: an all-gather of blocks of different sizes, with its backward."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch

from parallel101.laboratory.exercises.adjoint_exercises import (
    AUTOGRAD_NOT_TOLD,
    CHANGED_IN_PLACE,
    bytes_in_total,
    forms,
    least_received,
    only_equal_blocks,
    right_both_ways,
    run_both_ways,
    total,
    wrong_parts,
)
from parallel101.laboratory.exercises.wrong_values import every, gives
from parallel101.laboratory.grade.compared_values import same
from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import ITS_INPUT, MESSAGES, failed

COLUMNS = 4


def uneven_case(draw: Draw, sizes: Sequence[int]) -> Case:
    n = len(sizes)
    xs = [draw.tensor(size, COLUMNS, dtype=torch.float64) for size in sizes]
    gs = draw.tensors(n, sum(sizes), COLUMNS, dtype=torch.float64)
    y, summed = torch.cat(xs), torch.stack(gs).sum(0)
    gradients = summed.split(list(sizes))
    right = [y] * n, gradients
    S = y.nbytes
    return Case(
        [(x, g, list(sizes)) for x, g in zip(xs, gs)],
        list(zip(*right)),
        note=f"blocks of {', '.join(map(str, sizes))} rows",
        facts={
            "sizes": list(sizes),
            "xs": xs,
            "bytes": 2 * (n - 1) * S,
            "least": [S if n > 1 else 0] * n,
            "own": forms(right, None, [g.split(list(sizes))[r] for r, g in enumerate(gs)]),
            "mean": forms(right, None, [gradient / n for gradient in gradients]),
            "n times": forms(right, None, [gradient * n for gradient in gradients]),
        },
    )


def uneven_cases(draw: Draw) -> list[Case]:
    a, b = draw.integer(2, 4), draw.integer(5, 7)
    shapes = ((b,), (a, b), (a, a, a), (a, b, 1), (b, 0, a), (0, a, 1, b), (a, 1, b, 0))
    return [uneven_case(draw, sizes) for sizes in shapes]


def asked() -> Case:
    return uneven_case(Draw("question"), (3, 0, 2, 1))


def padded(trial: Trial) -> torch.Tensor:
    """Return all blocks stacked, each padded with NaN to the size of the largest."""
    sizes, xs = trial.case.facts["sizes"], trial.case.facts["xs"]
    filled = [x.new_full((max(sizes), COLUMNS), torch.nan) for x in xs]
    for block, x in zip(filled, xs):
        block[: len(x)] = x
    return torch.cat(filled)


def wrong_ys(trials: Sequence[Trial]) -> list[tuple[Trial, Any]]:
    return [(trial, found) for trial, part, found in wrong_parts(trials) if part == 0]


@mistake(
    "padding not removed",
    "The blocks are filled up to one size for the messages, and the filling is still in y.",
)
@every(wrong_ys)
def padding_left(trial: Trial, found: Any) -> bool:
    """Check whether each wrong y contains the padding: all of it, or as much as fits."""
    if not isinstance(found, torch.Tensor) or found.shape[1:] != (COLUMNS,):
        return False
    expected = padded(trial)
    if found.shape != expected.shape:
        expected = expected[: sum(trial.case.facts["sizes"])]
    known = ~expected.isnan()
    return found.shape == expected.shape and same(found[known], expected[known])


@mistake(
    "blocks in the wrong order",
    "y has every block, but not in the order of the ranks, such as in the order in which they "
    "arrived.",
)
@every(wrong_ys)
def other_order(trial: Trial, found: Any) -> bool:
    """Check whether each wrong y has all blocks, but in a different order."""
    return any(same(found, torch.cat(blocks)) for blocks in permutations(trial.case.facts["xs"]))


def costs(per_rank: int) -> Any:
    """Return a check whether values are right, but cost about per_rank·(n − 1)·S bytes or more."""

    def seen(trials: Sequence[Trial]) -> bool:
        large = [trial for trial in trials if trial.world_size > 2]
        return not failed(trials) and all(
            total(trial) >= 0.99 * per_rank * trial.case.facts["bytes"] / 2 for trial in large
        )

    return seen


@mistake(
    "padding is sent",
    "The values are right, but every message is as large as the largest block. A rank with "
    "few rows, or none, sends mostly padding.",
)
def sends_padding(trials: Sequence[Trial]) -> bool:
    """Check whether all values are right, and too much is sent only if the blocks' sizes differ."""
    more = {
        len(set(trial.case.facts["sizes"])) == 1
        for trial in trials
        if total(trial) > trial.case.facts["bytes"] + 64 * trial.world_size
    }
    return not failed(trials) and more == {False}


EXERCISES = [
    Exercise(
        number="9e",
        function="all_gather_uneven",
        title="An all-gather of uneven blocks, with its backward",
        points=10,
        weights={"value": 0.5, "bytes": 0.5},
        cases=uneven_cases,
        checks=(
            right_both_ways("y and the gradient of x are right on every rank, and y is new"),
            bytes_in_total("2·(n − 1)·S bytes in total, forward and backward"),
        ),
        least_received=least_received,
        program=run_both_ways,
        misconceptions=(
            *MESSAGES,
            CHANGED_IN_PLACE,
            *ITS_INPUT,
            AUTOGRAD_NOT_TOLD,
            padding_left,
            other_order,
            Misconception(
                "slice of the gradient without the sum",
                "Each rank keeps its block of its own g. But x went to all ranks, and each of "
                "them has its own loss: their parts are missing.",
                gives("own"),
            ),
            Misconception(
                "mean for sum",
                "The gradient is divided by n. The loss is the sum of the ranks' losses, so "
                "gradients are added, and nothing is averaged.",
                gives("mean"),
            ),
            Misconception(
                "gradient n times too large",
                "The gradient is n times the right one: it is multiplied by n, or added up "
                "once too often.",
                gives("n times"),
            ),
            only_equal_blocks,
            sends_padding,
            Misconception(
                "all-reduce then slice",
                "The gradients are summed whole on every rank, and then each rank keeps one "
                "block. The values are right, but each rank receives blocks that it throws "
                "away: twice the bytes.",
                costs(3),
            ),
        ),
        hints=(
            "All ranks know sizes. So a rank knows, without any message, how large each block is "
            "that it will receive, and which rows of y it fills.",
            "torch.empty(sum(sizes), …).split(sizes) gives views of y, one for each block: "
            "receive into them. In backward, rank r needs rows from every rank's g. Which "
            "rows, and what does it do with them?",
            "Two loops over the other ranks suffice. Forward: send x to each, and receive "
            "each block into its view. Backward: send each rank the rows of g that belong to "
            "its block, and collect theirs for yours. Start all messages before you wait for "
            "any. A message may have 0 rows, or you leave it out on both sides.",
        ),
        questions=(
            Question(
                "total",
                "4 ranks have 3, 0, 2 and 1 rows of 4 float64 numbers. How many bytes do the "
                "ranks send in total, forward and backward?",
                asked,
                total,
                "bytes",
            ),
        ),
        watch=asked,
        picture="lanes",
    )
]
