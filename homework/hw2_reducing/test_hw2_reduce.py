"""Exercise 4: reduce. The root returns the sum or the mean, the others None."""

from collections.abc import Iterator, Sequence

import torch

from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.exercises.wrong_values import (
    divided_too_often,
    sum_for_mean,
    wrong_sums,
)
from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
)
from parallel101.laboratory.grade.exercise_checks import (
    ITS_INPUT,
    MESSAGES,
    bytes_sent,
    only_root_zero,
    only_where_none_is_due,
    received,
    steps,
    unwritten_was_sent,
    value,
)


def reduce_case(xs: Sequence[torch.Tensor], root: int, op: str = "sum", note: str = "") -> Case:
    n, total = len(xs), torch.stack(list(xs)).sum(0)
    result = total / n if op == "mean" else total
    expected = [result if rank == root else None for rank in range(n)]
    return Case(
        [(x, root, op) for x in xs],
        expected,
        f"root {root}, {op}{note and ', '}{note}",
        facts={"xs": xs, "root": root, "op": op},
    )


def reduce_cases(draw: Draw) -> list[Case]:
    rows = draw.integer(40, 60)
    cases = [
        reduce_case(draw.tensors(1, rows, 2), 0),
        reduce_case(draw.tensors(2, rows, 2), 0),
        reduce_case(draw.tensors(2, rows, 2), 1, "mean"),
    ]
    cases += [
        reduce_case(draw.tensors(3, rows, 2), 0, "mean"),
        reduce_case(draw.tensors(4, rows, 2), 0),
    ]
    cases.append(
        reduce_case(
            [x.t() for x in draw.tensors(3, 2, rows, dtype=torch.float64)],
            draw.integer(1, 2),
            "sum",
            "transposed, float64",
        )
    )
    cases.append(
        reduce_case(
            draw.tensors(4, 3, dtype=torch.int64), draw.integer(1, 3), "sum", "3 whole numbers"
        )
    )
    return [
        *cases,
        reduce_case(draw.tensors(4, rows, 2), draw.integer(1, 3), "mean"),
        reduce_case(draw.tensors(5, rows), 4, "mean"),
    ]


def x_from_others(case: Case) -> list[int]:
    return [
        0 if rank == case.facts["root"] else case.facts["xs"][0].nbytes
        for rank in range(case.world_size)
    ]


def x_at_root(case: Case) -> list[int]:
    n = case.world_size
    return [
        case.facts["xs"][0].nbytes if n > 1 and rank == case.facts["root"] else 0
        for rank in range(n)
    ]


def root_pieces(trial: Trial) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    yield trial.results[trial.case.facts["root"]], trial.case.facts["xs"]


REDUCE_QUESTION = lambda: reduce_case([torch.ones(1000)] * 4, 0)  # noqa: E731
REDUCE = Exercise(
    number="4",
    function="reduce",
    title="Reduce",
    points=10,
    weights={"value": 0.4, "bytes": 0.3, "steps": 0.3},
    cases=reduce_cases,
    checks=(
        value(
            "the root returns the sum or the mean, the others None; every x stays as it is",
            keeps="x",
        ),
        bytes_sent(x_from_others, "every rank but the root sends x once"),
        steps(
            lambda case: case.world_size - 1, "n − 1 steps", slack=lambda case: case.world_size - 1
        ),
    ),
    least_received=x_at_root,
    misconceptions=(
        *MESSAGES,
        unwritten_was_sent,
        only_where_none_is_due,
        Misconception(
            "mean divides on every rank",
            "More than one rank divides by n, so some of the data is divided by n twice or "
            "more: the result is too small.",
            divided_too_often(root_pieces),
        ),
        sum_for_mean,
        *ITS_INPUT,
        *wrong_sums(root_pieces),
        only_root_zero,
    ),
    hints=(
        "It is a gather with an addition in place of each copy. Where is the one place at which "
        "the mean can be divided?",
        "The root adds what it receives to a clone of its own x: x itself must stay as it is. "
        "It divides once, at the end.",
        "Every other rank makes one call. The root makes n − 1, and has two tensors "
        "of its own: the total, and one to receive into, which it can use again and "
        "again. When is the total complete, and so when may it be divided?",
    ),
    questions=(
        Question(
            "received",
            "4 ranks, 1000 float32 numbers each: how many bytes does the root receive?",
            REDUCE_QUESTION,
            lambda trial: received(trial)[0],
            "bytes",
        ),
    ),
    watch=lambda: reduce_case([origin_tensor(rank, 4, 6) for rank in range(4)], 1),
)


EXERCISES = [REDUCE]
