"""Exercise 22a: an all-to-all of uneven sizes, with its backward. Counts travel first."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.laboratory.exercises.adjoint_exercises import (
    AUTOGRAD_NOT_TOLD,
    CHANGED_IN_PLACE,
    forward_backward,
)
from parallel101.laboratory.exercises.attention_exercises import unpacked
from parallel101.laboratory.exercises.wrong_values import every, right_but
from parallel101.laboratory.grade.compared_values import same
from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Misconception,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    CHANGES_ITS_INPUT,
    MESSAGES,
    all_show,
    ask_sent,
    bytes_sent,
    communicated,
    failed,
    on_ranks,
    right,
    value,
    wrong_trials,
)
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.units import listed
from parallel101.laboratory.sim.network import Network

WIDTH = 16
ROW = 8 * WIDTH  # bytes


def run_exchange(function: Callable, x: Tensor, g: Tensor, counts: list[int]) -> list[Any]:
    """Forward and backward, with g as the gradient of y."""
    leaf, received = x.clone().requires_grad_(), None

    def forward() -> Any:
        nonlocal received
        y, received = unpacked_with_graph(function(leaf, list(counts)))
        return y

    y, _ = forward_backward(forward, g.clone())
    gradient = torch.zeros_like(x) if leaf.grad is None and not len(x) else leaf.grad
    return [y, gradient, received]


def unpacked_with_graph(found: Any) -> tuple[Any, Any]:
    if isinstance(found, list | tuple) and len(found) == 2:
        y, received = found
        if isinstance(received, Tensor):
            received = received.tolist()
        return y, received
    return unpacked(found, 2)[0], None


def exchange_case(draw: Draw, counts: Sequence[Sequence[int]]) -> Case:
    """counts[i][j] rows go from rank i to rank j."""
    n = len(counts)
    xs = [draw.tensor(sum(row), WIDTH, dtype=torch.float64) for row in counts]
    into = [[counts[i][j] for i in range(n)] for j in range(n)]
    gs = [draw.tensor(sum(column), WIDTH, dtype=torch.float64) for column in into]
    out_of = [sum(row) - row[rank] for rank, row in enumerate(counts)]
    in_to = [sum(column) - column[rank] for rank, column in enumerate(into)]
    return Case(
        [(x, g, list(row)) for x, g, row in zip(xs, gs, counts)],
        list(map(list, zip(exchanged(xs, counts), exchanged(gs, into), into))),
        network=Network(latency=0.0, bandwidth=ROW),  # a row takes a second
        note=f"{listed([list(row) for row in counts])} rows",
        facts={
            "symmetric": all(counts[i][j] == counts[j][i] for i in range(n) for j in range(n)),
            "equal": len({count for row in counts for count in row}) == 1,
            "idle": not all(map(sum, counts)) or not all(map(sum, into)),
            "bytes": [ROW * (a + b) for a, b in zip(out_of, in_to)],
            "whole": ROW * sum(map(sum, counts)),
            "least": [ROW * b for b in in_to],
            "own": [own_gradient(gs, counts, into, rank) for rank in range(n)],
        },
    )


def exchanged(xs: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[Tensor]:
    blocks = [x.split(list(row)) for x, row in zip(xs, counts)]
    return [torch.cat([mine[rank] for mine in blocks]) for rank in range(len(xs))]


def own_gradient(
    gs: Sequence[Tensor], counts: Sequence[Sequence[int]], into: Sequence[Sequence[int]], rank: int
) -> Tensor:
    """The gradient if only the rows that stay on this rank get one."""
    blocks = [torch.zeros(rows, WIDTH, dtype=torch.float64) for rows in counts[rank]]
    blocks[rank] = gs[rank].split(list(into[rank]))[rank]
    return torch.cat(blocks)


def exchange_cases(draw: Draw) -> list[Case]:
    a, b, c = draw.integer(2, 3), draw.integer(4, 5), draw.integer(6, 7)
    tables = (
        [[b]],
        [[a, b], [b, c]],
        [[b] * 3] * 3,
        [[a, c, b], [0, a, c], [a, b, a]],
        [[a, b, 1, c], [c, a, b, 2], [1, 0, a, b], [b, c, a, 3]],
        [[a, b, c], [0, 0, 0], [b, 1, a]],
        [[0, c, 0], [0, b, 0], [0, a, 0]],
    )
    return [exchange_case(draw, table) for table in tables]


def asked() -> Case:
    return exchange_case(Draw("question"), [[4, 2, 6], [1, 3, 5], [2, 2, 2]])


def sent_rows(trial: Trial) -> int:
    """Bytes of rows that rank 0 sends, without the counts."""
    return sum(
        event.nbytes
        for event in trial.trace.events
        if event.kind == "send" and event.rank == 0 and event.nbytes >= ROW
    )


# ---- misconceptions ----


def fails_only_where(trials: Sequence[Trial], fact: str, holds: bool = True) -> bool:
    """Whether runs of several ranks fail, but none where facts[fact] is not `holds`."""
    several = [trial for trial in trials if trial.world_size > 1]
    others = [trial for trial in several if trial.case.facts[fact] != holds]
    return bool(failed(several)) and bool(others) and all(map(right, others))


def rows_right(trials: Sequence[Trial]) -> bool:
    """Whether y and the gradients are right in all runs, so that only `received` can be wrong."""
    return all(
        trial.error is None and same(trial.results[rank][:2], trial.case.expected[rank][:2])
        for trial, rank in on_ranks(trials)
    )


@mistake(
    "rank without rows stays away",
    "A rank that has nothing to send, or gets nothing, leaves early, or builds no graph. The "
    "others wait for it, forward or backward.",
)
def stays_away(trials: Sequence[Trial]) -> bool:
    return fails_only_where(trials, "idle") and any(
        isinstance(trial.error, DeadlockError) for trial in failed(trials)
    )


@mistake(
    "joined in the wrong order",
    "Every rank has the right rows, but not those of rank 0 first, then those of rank 1, and "
    "so on.",
)
def another_order(trials: Sequence[Trial]) -> bool:
    """Every rank has the right rows, and some have them in another order."""

    def in_order(rows: Tensor) -> Tensor:
        return rows[rows[:, 0].argsort()]

    pairs = [
        (trial.results[rank][0], trial.case.expected[rank][0])
        for trial, rank in on_ranks(wrong_trials(trials))
    ]
    moved = not all(same(*pair) for pair in pairs)
    return moved and all_show(pairs, lambda y, right: same(in_order(y), in_order(right)))


@mistake(
    "gradient not sent back",
    "y is right. In backward, only rows that never left this rank get a gradient. The others' "
    "gradients are on the ranks that got the rows.",
)
@every(wrong_trials)
def never_sent_back(trial: Trial) -> bool:
    right_ys = (same(f[0], e[0]) for f, e in zip(trial.results, trial.case.expected))
    return all(right_ys) and same([f[1] for f in trial.results], trial.case.facts["own"])


@mistake(
    "whole tensor shipped",
    "Every rank sends all its rows to every other rank, which needs few of them.",
)
@right_but(3)
def all_to_everyone(trial: Trial) -> bool:
    """All is right, and the ranks send each row to every other rank, forward at least."""
    return sum(communicated(trial)) >= (trial.world_size - 1) * trial.case.facts["whole"]


def padded(trials: Sequence[Trial]) -> bool:
    """All is right, and no block of rows that is sent is shorter than the longest of them."""
    large = [trial for trial in trials if trial.world_size > 1 and not trial.case.facts["equal"]]
    sizes = [
        [event.nbytes for event in t.trace.events if event.kind == "send" and event.nbytes >= ROW]
        for t in large
    ]
    return (
        bool(large)
        and not failed(trials)
        and any(bytes_sent(lambda case: case.facts["bytes"], "", few).wrong(t) for t in large)
        and all(len(set(own)) == 1 for own in sizes)
    )


def few(case: Case) -> int:
    """The bytes of counts, and of acknowledgements."""
    return 64 + 8 * case.world_size**2


EXERCISES = [
    Exercise(
        number="22a",
        function="exchange_rows",
        title="An uneven all-to-all, with its backward",
        points=5,
        cases=exchange_cases,
        program=run_exchange,
        weights={"value": 0.4, "bytes": 0.6},
        checks=(
            value(
                "y, the gradient of x and the counts are right on every rank",
                parts=("y", "the gradient of x", "received"),
            ),
            bytes_sent(
                lambda case: case.facts["bytes"],
                "each row goes where it must, once forward and once back",
                few,
            ),
        ),
        least_received=lambda case: case.facts["least"],
        misconceptions=(
            *MESSAGES,
            CHANGES_ITS_INPUT,
            CHANGED_IN_PLACE,
            AUTOGRAD_NOT_TOLD,
            stays_away,
            Misconception(
                "counts not exchanged",
                "It is right only if each rank gets as many rows from a rank as it sends there, or "
                "if all numbers are equal. A rank can't know what it gets until the sender tells "
                "it, and in backward both numbers change places.",
                lambda trials: (
                    not rows_right(trials)
                    and any(
                        fails_only_where(trials, f, holds=False) for f in ("symmetric", "equal")
                    )
                ),
            ),
            never_sent_back,
            another_order,
            Misconception(
                "blocks padded to the longest",
                "Every block is filled up to the length of the longest, so that all are equally "
                "long. With a popular expert, most of what is sent is padding.",
                padded,
            ),
            all_to_everyone,
        ),
        hints=(
            "Before rank 1 can receive rows from rank 0, what must it know? And in backward, which "
            "numbers does each rank know already?",
            "Write one function move(rows, sent, received) for the rows alone, without autograd. "
            "Forward first sends each other rank its count, then calls move(x, counts, received). "
            "Backward calls move(g, received, counts).",
            "torch.split cuts the rows into one block for each rank, and torch.cat joins what "
            "arrives. Which block needs no message? A message of no rows can be left out, if both "
            "sides leave it out. But every rank must call the autograd function, also one with no "
            "rows at all, or backward would wait for it.",
        ),
        questions=(
            ask_sent(
                "3 ranks send [4, 2, 6], [1, 3, 5] and [2, 2, 2] rows of 16 float64 numbers. How "
                "many bytes of rows does rank 0 send, forward and backward together?",
                asked,
                sent_rows,
            ),
        ),
        watch=asked,
        picture="lanes",
    )
]
