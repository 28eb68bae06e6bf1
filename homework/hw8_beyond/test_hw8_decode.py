"""Exercise 21a: one new query attends to keys and values that are on all ranks."""

import math
from collections.abc import Sequence

import torch

from parallel101.laboratory.exercises.attention_exercises import (
    HEADS,
    ITEM,
    WIDTH,
)
from parallel101.laboratory.exercises.wrong_values import gives, only_large_overflow, right_but
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
    ask_sent,
    bytes_sent,
    communicated,
    value,
)

Tensors = Sequence[torch.Tensor]


def attention(q: torch.Tensor, ks: Tensors, vs: Tensors, scale: float) -> torch.Tensor:
    """Of the query to these keys and values, joined."""
    scores = torch.einsum("hd,htd->ht", q, torch.cat(list(ks), 1)) * scale
    return torch.einsum("ht,htd->hd", scores.softmax(-1), torch.cat(list(vs), 1))


def decode_case(draw: Draw, sizes: Sequence[int], large: float = 1.0) -> Case:
    n = len(sizes)
    q = large * draw.tensor(HEADS, WIDTH, dtype=torch.float64)
    ks = [draw.tensor(HEADS, size, WIDTH, dtype=torch.float64) for size in sizes]
    vs = [draw.tensor(HEADS, size, WIDTH, dtype=torch.float64) for size in sizes]
    right = attention(q, ks, vs, 1 / math.sqrt(WIDTH))
    return Case(
        [(q, ks[rank], vs[rank]) for rank in range(n)],
        [[right]] * n,
        note=f"{list(sizes)} positions" + (", large scores" if large > 1 else ""),
        facts={
            "sizes": list(sizes),
            "large": large > 1,
            "cache": [k.nbytes + v.nbytes for k, v in zip(ks, vs)],
            **decode_mistakes(q, ks, vs),
        },
    )


def decode_mistakes(q: torch.Tensor, ks: Tensors, vs: Tensors) -> dict[str, list]:
    """By mistake, its forms; of each form the result on every rank."""
    n, scale = len(ks), 1 / math.sqrt(WIDTH)
    outs = torch.stack([attention(q, [k], [v], scale) for k, v in zip(ks, vs)])
    share = torch.tensor([k.shape[1] for k in ks], dtype=torch.float64)
    share = (share / share.sum())[:, None, None]
    scores = [torch.einsum("hd,htd->ht", q, k) * scale for k in ks]
    sums = torch.stack([(s - s.amax(-1, keepdim=True)).exp().sum(-1) for s in scores])[..., None]
    unscaled = [attention(q, [k], [v], 1.0) for k, v in zip(ks, vs)]

    def everywhere(*forms: torch.Tensor) -> list:
        return [[form] * n for form in forms]

    return {
        "averaged": everywhere(outs.mean(0), outs.sum(0), (share * outs).sum(0)),
        "own": [list(outs)],
        "scale": [*everywhere(attention(q, ks, vs, 1.0)), unscaled],
        "maximum": everywhere((sums * outs).sum(0) / sums.sum(0)),
    }


def decode_cases(draw: Draw) -> list[Case]:
    a, b = draw.integer(5, 9), draw.integer(10, 14)
    shapes = (a,), (b, a), (a, 1, b), (a, b, 4, 7)
    return [*(decode_case(draw, sizes) for sizes in shapes), decode_case(draw, (b, a, 6), 1000.0)]


def partials(case: Case) -> list[int]:
    n = case.world_size
    return [(n - 1) * HEADS * (WIDTH + 2) * ITEM] * n


def least(case: Case) -> list[int]:
    n = case.world_size
    return [HEADS * WIDTH * ITEM if n > 1 else 0] * n


@mistake(
    "keys and values sent",
    "The values are right, but the cache itself travels. It grows with every token, and the "
    "softmax over a rank's positions fits into a few numbers.",
)
@right_but(2)
def sends_the_cache(trial: Trial) -> bool:
    """All is right, and a rank's keys and values went to other ranks."""
    cache = trial.case.facts["cache"]
    return sum(communicated(trial)) >= sum(cache) - max(cache)


EXERCISES = [
    Exercise(
        number="21a",
        function="decode_attention",
        title="One query, and keys on all ranks",
        points=5,
        cases=decode_cases,
        program=lambda function, *arguments: [function(*arguments)],
        weights={"value": 0.4, "bytes": 0.6},
        checks=(
            value("every rank returns the attention to all positions", parts=("the result",)),
            bytes_sent(
                partials, "to each other rank at most d + 2 numbers a head, for any number of keys"
            ),
        ),
        least_received=least,
        misconceptions=(
            *MESSAGES,
            CHANGES_ITS_INPUT,
            Misconception(
                "softmaxes averaged",
                "The ranks' results are added or averaged. Each of them was divided by the sum "
                "over its own positions, so positions on different ranks no longer compare.",
                gives("averaged", 0),
            ),
            Misconception(
                "results never merged",
                "Each rank returns the attention to its own positions.",
                gives("own", 0),
            ),
            Misconception(
                "softmax maximum kept local",
                "Each rank subtracts its own largest score, and then the sums are added as they "
                "are. They have different factors, so their sum means nothing.",
                gives("maximum", 0),
            ),
            Misconception(
                "scale forgotten", "The scores are not divided by √d.", gives("scale", 0)
            ),
            Misconception(
                "maximum not carried",
                "exp of a large score is infinite. The result is right for small scores only.",
                only_large_overflow,
            ),
            sends_the_cache,
        ),
        hints=(
            "Write the softmax over all positions as a fraction. Numerator and denominator are "
            "sums over positions, so each rank can compute a part of both.",
            "Each rank needs two things of another: its result `out` (heads, d), and the log of "
            "its Σ exp(score), `lse` (heads). exp(lse) says how much of the whole denominator this "
            "rank has. torch.logsumexp never overflows.",
            "A rank's result counts with its share of the whole denominator. The log of the whole "
            "is the logsumexp of all ranks' lse; how do you get a share from two logs? Join out "
            "and lse to one tensor (heads, d + 1), and pass it round the ring, as in exercise 5.",
        ),
        questions=(
            ask_sent(
                "4 ranks have 12 positions each, with 2 heads of 16 features in float64. How many "
                "bytes does each rank send?",
                lambda: decode_case(Draw("question"), [12] * 4),
            ),
        ),
    )
]
