"""Exercise 9d: a shift of a tensor that is cut over the ranks, with its backward."""

import torch

from parallel101.laboratory.exercises.adjoint_exercises import (
    AUTOGRAD_NOT_TOLD,
    CHANGED_IN_PLACE,
    bytes_in_total,
    forms,
    least_received,
    right_both_ways,
    run_both_ways,
    total,
)
from parallel101.laboratory.exercises.wrong_values import gives
from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Misconception,
    Question,
)
from parallel101.laboratory.grade.exercise_checks import ITS_INPUT, MESSAGES

Tensors = list[torch.Tensor]


def shifted(blocks: Tensors, k: int, dim: int) -> Tensors:
    """Return each rank's block of the whole tensor shifted by k, which may be negative."""
    return list(torch.cat(blocks, dim).roll(k, dim).chunk(len(blocks), dim))


def without(block: torch.Tensor, start: int, count: int, dim: int) -> torch.Tensor:
    """Return the block with zeros in these entries."""
    result = block.clone()
    result.narrow(dim, start, count).zero_()
    return result


def shift_case(xs: Tensors, gs: Tensors, k: int, dim: int) -> Case:
    n, length = len(xs), xs[0].shape[dim]
    ys, gradients = right = shifted(xs, k, dim), shifted(gs, -k, dim)
    the_same_way, other_way = shifted(gs, k, dim), shifted(xs, -k, dim)
    entries = xs[0].narrow(dim, 0, k).nbytes if n > 1 else 0  # the bytes of one message
    facts = {
        "bytes": 2 * n * entries,
        "least": [2 * entries] * n,
        "same way": forms(right, None, the_same_way),
        "other way": forms(right, other_way, the_same_way),
        "within": forms(right, [x.roll(k, dim) for x in xs], [g.roll(-k, dim) for g in gs]),
        "dropped": forms(right, None, [without(g, length - k, k, dim) for g in gradients]),
        "not joined": forms(
            right,
            [without(ys[0], 0, k, dim), *ys[1:]],
            [*gradients[:-1], without(gradients[-1], length - k, k, dim)],
        ),
    }
    return Case(
        [(x, g, k, dim) for x, g in zip(xs, gs)],
        list(zip(*right)),
        note=f"{tuple(xs[0].shape)} on each, by {k} along dim {dim}",
        facts=facts,
    )


def drawn(draw: Draw, n: int, shape: tuple[int, ...], k: int, dim: int) -> Case:
    xs, gs = (draw.tensors(n, *shape, dtype=torch.float64) for _ in range(2))
    return shift_case(xs, gs, k, dim)


def shift_cases(draw: Draw) -> list[Case]:
    rows = draw.integer(5, 7)
    return [
        drawn(draw, n, shape, k, dim)
        for n, shape, k, dim in (
            (1, (rows, 4), 2, 0),
            (2, (rows, 4), 2, 0),
            (3, (rows, 4), rows, 0),
            (3, (rows, 4), 0, 0),
            (3, (4, rows), draw.integer(1, 2), 1),
            (4, (rows, 4), 1, 0),
            (4, (2, rows, 3), 3, 1),
        )
    ]


def asked() -> Case:
    return drawn(Draw("question"), 4, (6, 4), 2, 0)


EXERCISES = [
    Exercise(
        number="9d",
        function="shift",
        title="A shift, with its backward",
        points=10,
        weights={"value": 0.5, "bytes": 0.5},
        cases=shift_cases,
        checks=(
            right_both_ways("y and the gradient of x are right on every rank, and y is new"),
            bytes_in_total("each rank sends k entries forward, and k backward"),
        ),
        least_received=least_received,
        program=run_both_ways,
        misconceptions=(
            *MESSAGES,
            CHANGED_IN_PLACE,
            *ITS_INPUT,
            AUTOGRAD_NOT_TOLD,
            Misconception(
                "shifted the same way in backward",
                "The gradients move in the same direction as the data did, so a rank gets "
                "gradients of elements that it does not hold.",
                gives("same way"),
            ),
            Misconception(
                "shifted the wrong way",
                "Entry i moves to i − k, not to i + k: the data goes round the ring backwards.",
                gives("other way"),
            ),
            Misconception(
                "shifted within the block",
                "Each rank shifts its own block round. The entries that leave a block belong "
                "to the next rank.",
                gives("within"),
            ),
            Misconception(
                "gradient of what was sent dropped",
                "The entries that a rank sent away get no gradient. They were used too, on "
                "the next rank.",
                gives("dropped"),
            ),
            Misconception(
                "ends not joined",
                "The last rank's entries go nowhere, and rank 0 begins with zeros. The whole "
                "tensor is shifted round: its end follows its beginning.",
                gives("not joined"),
            ),
        ),
        hints=(
            "Draw the whole tensor of two ranks, and shift it by one. Which entries of a rank "
            "leave its block, and which place do they get in the next one?",
            "Forward: the last k entries go to the next rank, and are first there. x.narrow("
            "dim, start, k) cuts them out; a message needs them contiguous. Backward: which "
            "rank now has the gradients of those entries, and at which place?",
            "One function can do both: it sends the k entries at one end to one neighbour, and "
            "receives k from the other. Forward and backward call it with ends and "
            "neighbours exchanged. What remains is torch.cat, in the right order. Neither may "
            "return its argument, also not on one rank.",
        ),
        questions=(
            Question(
                "total",
                "4 ranks hold 6 × 4 float64 numbers each. They shift by 2 along dim 0, "
                "forward and backward. How many bytes do the ranks send in total?",
                asked,
                total,
                "bytes",
            ),
        ),
        watch=asked,
        picture="lanes",
    )
]
