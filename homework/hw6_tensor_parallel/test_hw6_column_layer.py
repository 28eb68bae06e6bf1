"""Exercise 15a: the lecture's layer.

Each rank has columns of the weight; GELU, then an all-gather.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.laboratory.exercises.adjoint_exercises import forward_backward
from parallel101.laboratory.exercises.tensor_parallel_exercises import (
    NUMBER,
    costs,
    gives,
    graph_cut,
    leaf,
    least_received,
    ring,
    sends_at_most,
    sent_in,
)
from parallel101.laboratory.grade.exercise import (
    COLLECTIVES,
    P2P,
    Case,
    Draw,
    Exercise,
    Misconception,
)
from parallel101.laboratory.grade.exercise_checks import MESSAGES, ask_sent, value


def run_columns(
    function: Callable, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, c: Tensor
) -> list[Any]:
    """Run two layers forward and backward. This rank's loss is the sum of c · y."""
    weights = [leaf(tensor) for tensor in (w1, b1, w2, b2)]
    y, _ = forward_backward(lambda: function(function(x, *weights[:2]), *weights[2:]), c.clone())
    return [y, [weight.grad for weight in weights]]


# maps all ranks' gradients of a gathered tensor to the gradient of each rank's part
Join = Callable[[list[Tensor]], list[Tensor]]


def columns_backward(
    join: Join, x: Tensor, weights: list[list[Tensor]], cs: list[Tensor]
) -> list[list[Tensor]]:
    """Return each rank's gradients of both layers if `join` is the backward of the all-gather."""

    def layer(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        leaves = [leaf(tensor) for tensor in (x, w, b)]
        return torch.autograd.grad(F.gelu(F.linear(*leaves)), leaves, g)

    h = torch.cat([F.gelu(F.linear(x, w1, b1)) for w1, b1, _, _ in weights], 1)
    second = [layer(h, w2, b2, g) for (_, _, w2, b2), g in zip(weights, join(cs))]
    first = [
        layer(x, w1, b1, g) for (w1, b1, _, _), g in zip(weights, join([dx for dx, _, _ in second]))
    ]
    return [[dw1, db1, dw2, db2] for (_, dw1, db1), (_, dw2, db2) in zip(first, second)]


def sum_then_cut(gs: list[Tensor]) -> list[Tensor]:
    return list(sum(gs).chunk(len(gs), 1))  # type: ignore[union-attr]


def own_cut(gs: list[Tensor]) -> list[Tensor]:
    return [g.chunk(len(gs), 1)[rank] for rank, g in enumerate(gs)]


def mean_then_cut(gs: list[Tensor]) -> list[Tensor]:
    return [g / len(gs) for g in sum_then_cut(gs)]


def column_case(draw: Draw, n: int, samples: int) -> Case:
    double = functools.partial(draw.tensor, dtype=torch.float64)
    inputs, hidden, outputs = 5, n * draw.integer(2, 3), n * draw.integer(1, 2)
    x, w1, b1, w2, b2 = (
        double(samples, inputs),
        double(hidden, inputs),
        double(hidden),
        double(outputs, hidden),
        double(outputs),
    )
    cs = [double(samples, outputs) for _ in range(n)]
    weights = [list(blocks) for blocks in zip(*(tensor.chunk(n) for tensor in (w1, b1, w2, b2)))]
    y = F.gelu(F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2))
    S = NUMBER * samples * (hidden + outputs)
    return Case(
        [(x, *weights[rank], cs[rank]) for rank in range(n)],
        [[y, gradients] for gradients in columns_backward(sum_then_cut, x, weights, cs)],
        note=f"{samples} samples, {inputs} → {hidden} → {outputs}",
        facts={
            "own": [columns_backward(own_cut, x, weights, cs)],
            "mean": [columns_backward(mean_then_cut, x, weights, cs)],
            "forward": ring(S, n),
            "backward": ring(S, n),
            "least": ring(S, n) + S // n,
        },
    )


COLUMN_LAYER = Exercise(
    number="15a",
    function="column_layer",
    title="The lecture's layer: column, GELU, all-gather",
    points=10,
    weights={"value": 0.4, "bytes": 0.6},
    cases=lambda draw: [
        column_case(draw, n, samples) for n, samples in ((1, 3), (2, 4), (3, 2), (4, 5))
    ],
    checks=(
        value(
            "y and all gradients are those of one process",
            parts=("y", "the gradients of two layers"),
        ),
        sends_at_most("forward", "forward: one all-gather, (n − 1)/n·S bytes a rank"),
        replace(
            sends_at_most("backward", "backward: one reduce-scatter, (n − 1)/n·S bytes a rank"),
            weight=5.0,
        ),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        graph_cut(lambda result: result[1][2]),
        Misconception(
            "slice of the gradient without the sum",
            "Each rank keeps its columns of its own gradient of y. But all ranks went on with "
            "these columns, each to its own loss, and the parts of the others are missing.",
            gives("own", 1),
        ),
        Misconception(
            "mean for sum",
            "The gradient is divided by n. The loss is the sum of the ranks' losses, so their "
            "gradients are added.",
            gives("mean", 1),
        ),
        Misconception(
            "all-reduce then slice",
            "The gradients are summed whole on every rank, and each rank then keeps its columns. "
            "The values are right, for twice the bytes: each rank receives sums that it throws "
            "away.",
            costs("backward", 2),
        ),
    ),
    hints=(
        "GELU acts on each number alone, so each rank may apply it before the all-gather. Autograd "
        "can do all of it but the all-gather.",
        "Write a torch.autograd.Function: forward gathers all ranks' columns. Its backward is the "
        "adjoint of an all-gather; see lesson 03.",
        "The ranks' g differ, so block r of the gradient is a sum over all ranks, and "
        "only rank r needs it. Which collective does that? Its blocks must be "
        "contiguous, and yours are blocks of columns.",
    ),
    questions=(
        ask_sent(
            "Two layers, 5 → 12 → 8, on 4 ranks with 5 samples in float64. How many bytes does "
            "each rank send in backward?",
            lambda: next(
                case
                for seed in range(1000)
                if (case := column_case(Draw(str(seed)), 4, 5)).note.endswith("5 → 12 → 8")
            ),
            lambda trial: sent_in(trial, "backward"),
        ),
    ),
    program=run_columns,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)


EXERCISES = [COLUMN_LAYER]
