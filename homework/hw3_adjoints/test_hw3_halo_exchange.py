"""Exercise 9f: every rank gets the rows around its block; backward gives their gradients back."""

from collections.abc import Sequence

import torch

from parallel101.laboratory.exercises.adjoint_exercises import (
    AUTOGRAD_NOT_TOLD,
    CHANGED_IN_PLACE,
    REFUSED,
    bytes_in_total,
    forms,
    least_received,
    right_both_ways,
    run_both_ways,
    total,
)
from parallel101.laboratory.exercises.wrong_values import every, gives
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    Case,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import ITS_INPUT, MESSAGES, failed

COLUMNS = 5
Tensors = list[torch.Tensor]


def with_halos(xs: Tensors, width: int, wrap: bool = False, other_edge: bool = False) -> Tensors:
    """Return each rank's block between its halos.

    Args:
        wrap: the last rank's rows come before rank 0's, instead of zeros.
        other_edge: each rank sends the edge that is on the far side of the receiver.
    """
    n, result = len(xs), []
    for rank, x in enumerate(xs):
        zeros = x.new_zeros(width, COLUMNS)
        left, right = xs[rank - 1], xs[(rank + 1) % n]
        before = left[:width] if other_edge else left[len(left) - width :]
        after = right[len(right) - width :] if other_edge else right[:width]
        result.append(
            torch.cat(
                [before if wrap or rank > 0 else zeros, x, after if wrap or rank < n - 1 else zeros]
            )
        )
    return result


def given_back(gs: Tensors, width: int, how: str = "added", wrap: bool = False) -> Tensors:
    """Return each rank's gradient, given the gradients of blocks with halos.

    how: the halos' gradients are "added" to those of their owners or "dropped", or they replace
    them: "left last" or "right last" says which of two replaces where they overlap.
    """
    n, result = len(gs), []
    for rank, g in enumerate(gs):
        mine = g[width : len(g) - width].clone()
        left, right = gs[rank - 1], gs[(rank + 1) % n]
        top = (slice(0, width), left[len(left) - width :], wrap or rank > 0)
        bottom = (slice(len(mine) - width, None), right[:width], wrap or rank < n - 1)
        for rows, halo, there in (bottom, top) if how == "left last" else (top, bottom):
            if there and how == "added":
                mine[rows] += halo
            elif there and how != "dropped":
                mine[rows] = halo
        result.append(mine)
    return result


def halo_case(draw: Draw, sizes: Sequence[int], width: int) -> Case:
    n = len(sizes)
    refuse = min(sizes) < width
    xs = [draw.tensor(size, COLUMNS, dtype=torch.float64) for size in sizes]
    gs = [draw.tensor(size + 2 * width, COLUMNS, dtype=torch.float64) for size in sizes]
    arguments = [(x, g, width, list(sizes)) for x, g in zip(xs, gs)]
    note = f"blocks of {', '.join(map(str, sizes))} rows, width {width}"
    if refuse:
        return Case(
            arguments,
            [REFUSED] * n,
            note=note,
            facts={"refuse": True, "bytes": 0, "least": [0] * n},
        )
    halo = 8 * COLUMNS * width
    neighbours = [(rank > 0) + (rank < n - 1) for rank in range(n)]
    right = with_halos(xs, width), given_back(gs, width)
    replaced = (given_back(gs, width, how) for how in ("left last", "right last"))
    return Case(
        arguments,
        list(zip(*right)),
        note=note,
        facts={
            "refuse": False,
            "bytes": 4 * (n - 1) * halo,
            "least": [2 * halo * count for count in neighbours],
            "whole": 2 * (n - 1) * sum(x.nbytes for x in xs),
            "dropped": forms(right, None, given_back(gs, width, "dropped")),
            "overwritten": forms(right, None, *replaced),
            "wrapped": forms(
                right, with_halos(xs, width, wrap=True), given_back(gs, width, wrap=True)
            ),
            "other edge": [[(y, ANYTHING) for y in with_halos(xs, width, other_edge=True)]],
        },
    )


def halo_cases(draw: Draw) -> list[Case]:
    a, b = draw.integer(3, 4), draw.integer(5, 7)
    shapes = (
        ((b,), 2),
        ((a, b), 1),
        ((b, 2, a), 2),
        ((3, 4, b), 3),
        ((a, b, 2, 3), 2),
        ((a, 1, b, a), 1),
        ((b, 1, a), 2),
        ((a, b, 0), 1),
    )
    return [halo_case(draw, sizes, width) for sizes, width in shapes]


def asked() -> Case:
    return halo_case(Draw("question"), (4, 3, 5, 4), 2)


@mistake(
    "only some ranks refuse",
    "Ranks that see no problem with their own block go on, and wait for a neighbour that has "
    "given up. All ranks must come to the same decision.",
)
def only_some_refuse(trials: Sequence[Trial]) -> bool:
    """Check whether, if a block is too short, some ranks refuse and others do not."""
    return any(
        trial.case.facts["refuse"] and 0 < trial.results.count(REFUSED) < trial.world_size
        for trial in trials
    )


@mistake(
    "short block not refused",
    "A block has fewer rows than the halo is wide, and no rank raises a ValueError. A "
    "neighbour then gets too few rows, or none.",
)
@every(failed)
def not_refused(trial: Trial) -> bool:
    """Check whether all is right, except that no rank refuses a block that is too short."""
    return trial.case.facts["refuse"] and REFUSED not in trial.results


@mistake(
    "whole blocks sent",
    "The values are right, but ranks send rows that no neighbour needs. A halo is only as "
    "wide as width, whatever the size of the block.",
)
def sends_whole_blocks(trials: Sequence[Trial]) -> bool:
    """Check whether all is right, but costs more than the halos, such as an all-gather."""
    large = [trial for trial in trials if trial.world_size > 2 and not trial.case.facts["refuse"]]
    return not failed(trials) and all(
        total(trial) > trial.case.facts["bytes"] + 64 * trial.world_size for trial in large
    )


EXERCISES = [
    Exercise(
        number="9f",
        function="halo_exchange",
        title="A halo exchange, with its backward",
        points=10,
        weights={"value": 0.5, "bytes": 0.5},
        cases=halo_cases,
        checks=(
            right_both_ways(
                "y and the gradient of x are right on every rank; short blocks are refused"
            ),
            bytes_in_total("4·(n − 1)·H bytes in total, forward and backward"),
        ),
        least_received=least_received,
        program=run_both_ways,
        misconceptions=(
            only_some_refuse,
            *MESSAGES,
            CHANGED_IN_PLACE,
            *ITS_INPUT,
            AUTOGRAD_NOT_TOLD,
            Misconception(
                "halo gradient dropped",
                "Each rank keeps the gradient of its own rows in its own y. Its edges were "
                "also used by its neighbours, whose parts are missing.",
                gives("dropped"),
            ),
            Misconception(
                "halo gradient overwrites",
                "The gradient that comes from a neighbour replaces the rank's own. The rows "
                "at the edge were used on both ranks.",
                gives("overwritten"),
            ),
            Misconception(
                "boundary wrapped",
                "Rank 0 gets rows of the last rank, or the other way round. Beyond both ends "
                "of the whole tensor there are only zeros.",
                gives("wrapped"),
            ),
            Misconception(
                "other edge sent",
                "A rank gets the far edge of its neighbour's block. The rows next to its own "
                "are at the near edge.",
                gives("other edge"),
            ),
            not_refused,
            sends_whole_blocks,
        ),
        hints=(
            "Draw two neighbours. Which rows does each send to the other in forward? How often is "
            "such a row used, and on which ranks?",
            "A row at an edge has two gradients: one in its owner's g, and one in the halo of "
            "a neighbour's g. The other rows have one. The halos of zeros belong to nobody. "
            "Blocks that are too short can be found from sizes, which every rank knows.",
            "Write one function that sends one tensor to the left neighbour and one to the right, "
            "and receives as many rows from each; without a neighbour it returns zeros. Forward "
            "gives it the two edges of x, and backward the two halos of g. What comes back is put "
            "beside x in forward. In backward, it belongs to rows that already have a gradient.",
        ),
        questions=(
            Question(
                "total",
                "4 ranks have 4, 3, 5 and 4 rows of 5 float64 numbers. The halos are 2 rows "
                "wide. How many bytes do the ranks send in total, forward and backward?",
                asked,
                total,
                "bytes",
            ),
        ),
        watch=asked,
        picture="lanes",
    )
]
