"""Exercise 8b: all-to-all. Row i of the result is what rank i had for this rank."""

from collections.abc import Sequence

import torch

from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.exercises.wrong_values import every, several_ranks
from parallel101.laboratory.grade.compared_values import same
from parallel101.laboratory.grade.exercise import Case, Draw, Exercise, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import (
    ITS_INPUT,
    MESSAGES,
    ask_sent,
    ask_steps,
    bytes_sent,
    failed,
    received,
    steps,
    unwritten_was_sent,
    value,
)


def all_to_all_case(xs: Sequence[torch.Tensor], note: str = "") -> Case:
    n = len(xs)
    return Case(
        [(x,) for x in xs],
        [torch.stack([x[rank] for x in xs]) for rank in range(n)],
        note,
        facts={"xs": xs},
    )


def all_to_all_cases(draw: Draw) -> list[Case]:
    cases = [all_to_all_case(draw.tensors(n, n, 30, 2)) for n in (1, 2, 3, 4)]
    cases.append(
        all_to_all_case(draw.tensors(3, 3, dtype=torch.int64), "1 whole number for each rank")
    )
    cases.append(
        all_to_all_case(
            [x.t() for x in draw.tensors(4, 51, 4, dtype=torch.float64)], "transposed, float64"
        )
    )
    return [*cases, all_to_all_case(draw.tensors(5, 5, 61))]


def rows_for_others(case: Case) -> list[int]:
    n = case.world_size
    return [(n - 1) * case.facts["xs"][0].nbytes // n] * n


def rows_of(trial: Trial) -> list[list[tuple[int, int]]] | None:
    """Return, for each row of each rank's result, the rank and the row from which it came.

    Return None if a row is not a row of any x.
    """
    xs, n = trial.case.facts["xs"], trial.world_size
    table = []
    for result in trial.results:
        if not isinstance(result, torch.Tensor) or result.shape != xs[0].shape:
            return None
        rows = [
            next(((s, j) for s in range(n) for j in range(n) if same(row, xs[s][j])), None)
            for row in result
        ]
        if None in rows:
            return None
        table.append([row for row in rows if row is not None])
    return table


@mistake(
    "blocks not transposed",
    "Ranks return rows that were meant for other ranks: the row that is sent to rank j must "
    "be row j.",
)
@every(failed)
def not_transposed(trial: Trial) -> bool:
    """Check whether ranks have rows that were meant for other ranks."""
    table = rows_of(trial) or []
    return any(j != rank for rank, rows in enumerate(table) for _, j in rows)


@mistake(
    "joined in the wrong order",
    "Every rank has the rows that were meant for it, but not in the order of the ranks from "
    "which they came.",
)
@every(failed)
def rows_in_other_order(trial: Trial) -> bool:
    """Check whether every rank has its own rows, but not in rank order."""
    table = rows_of(trial)
    return table is not None and all(j == r for r, rows in enumerate(table) for _, j in rows)


@mistake(
    "whole tensor shipped",
    "Every rank sends all of x to every other rank, which needs only one row of it.",
)
@every(several_ranks)
def whole_to_everyone(trial: Trial) -> bool:
    """Check whether every rank receives the whole x of the other ranks."""
    return min(received(trial)) >= (trial.world_size - 1) * trial.case.facts["xs"][0].nbytes


ALL_TO_ALL_QUESTION = lambda: all_to_all_case([torch.ones(4, 250)] * 4)  # noqa: E731
ALL_TO_ALL = Exercise(
    number="8b",
    function="all_to_all",
    title="All-to-all",
    points=10,
    weights={"value": 0.3, "bytes": 0.5, "steps": 0.2},
    cases=all_to_all_cases,
    checks=(
        value("row i of the result is what rank i had for this rank", keeps="x"),
        bytes_sent(rows_for_others, "every rank sends (n − 1)/n of x"),
        steps(
            lambda case: case.world_size - 1,
            "n − 1 steps",
            slack=lambda case: 2 * (case.world_size - 1),
        ),
    ),
    least_received=rows_for_others,
    misconceptions=(
        *MESSAGES,
        unwritten_was_sent,
        whole_to_everyone,
        not_transposed,
        rows_in_other_order,
        *ITS_INPUT,
    ),
    hints=(
        "Which row do you send to rank j? And into which row do you receive what comes from rank "
        "i?",
        "In step s, send to rank + s and receive from rank − s, mod n: then in each step every "
        "rank sends one row and receives one.",
        "A new tensor holds what arrives. One row needs no message. In each step the "
        "send must not wait, or all ranks would wait at once.",
    ),
    questions=(
        ask_sent(
            "4 ranks, 250 float32 numbers for each rank: how many bytes does each rank send?",
            ALL_TO_ALL_QUESTION,
        ),
        ask_steps("How many steps does it take?", ALL_TO_ALL_QUESTION),
    ),
    watch=lambda: all_to_all_case([origin_tensor(rank, 4, 8).reshape(4, 2) for rank in range(4)]),
)


EXERCISES = [ALL_TO_ALL]
