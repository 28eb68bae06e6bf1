"""Exercise 17: sequence parallel. The norm acts on each rank's own positions."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.laboratory.exercises.adjoint_exercises import forward_backward
from parallel101.laboratory.exercises.tensor_parallel_exercises import (
    BIAS_N_TIMES,
    NUMBER,
    costs,
    cut_mlp,
    gives,
    gradients_of,
    gradients_times,
    graph_cut,
    keeps_at_most,
    leaf,
    least_received,
    mlp,
    ring,
    sends_at_most,
    sent_in,
)
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    COLLECTIVES,
    P2P,
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Trial,
)
from parallel101.laboratory.grade.exercise_checks import MESSAGES, ask_sent, failed, value


def run_block(function: Callable, x: Tensor, *rest: Tensor) -> list[Any]:
    """Run the block forward and backward.

    The loss is the sum of c · y over this rank's positions; c comes last.
    """
    *weights, c = rest
    leaves = [leaf(weight) for weight in weights]
    x = leaf(x)
    y, kept = forward_backward(lambda: function(x, *leaves), c.clone(), leaves)
    gradients = [weight.grad for weight in leaves]
    return [y, x.grad, gradients[:2], gradients[2:5], gradients[5], kept]


def block_of(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
) -> Tensor:
    return x + mlp(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias), w1, b1, w2, b2)


def block_case(draw: Draw, n: int, positions: int, width: int, hidden: int) -> Case:
    """Return a case. positions: the number of positions of each rank."""
    double = functools.partial(draw.tensor, dtype=torch.float64)
    time = n * positions
    x, c = double(time, width), double(time, width)
    norm = [double(width), double(width)]
    w1, b1, w2, b2 = (
        double(n * hidden, width),
        double(n * hidden),
        double(width, n * hidden),
        double(width),
    )
    tensors = (x, *norm, w1, b1, w2, b2)
    y = block_of(*tensors)
    dx, *dnorm, dw1, db1, dw2, db2 = gradients_of(lambda *t: (block_of(*t) * c).sum(), *tensors)
    blocks, gradient_blocks = cut_mlp((w1, b1, w2), n), cut_mlp((dw1, db1, dw2), n)
    xs, ys, dxs, cs = (whole.chunk(n) for whole in (x, y, dx, c))

    normed = F.layer_norm(x, (width,), *norm)
    (dnormed,) = gradients_of(lambda normed: (mlp(normed, w1, b1, w2, b2) * c).sum(), normed)

    def norm_parts(rank: int) -> list[Tensor]:
        """Return the gradients of the norm's weights from this rank's positions."""
        return gradients_of(
            lambda a, b: (F.layer_norm(xs[rank], (width,), a, b) * dnormed.chunk(n)[rank]).sum(),
            *norm,
        )

    def dx_of_own(rank: int) -> Tensor:
        """Return the gradient of this rank's x if its MLP's part of dX is cut but not summed."""
        (part,) = gradients_of(
            lambda normed: (mlp(normed, *blocks[rank], 0 * b2) * c).sum(), normed
        )
        return gradients_of(
            lambda x: (x * cs[rank] + F.layer_norm(x, (width,), *norm) * part.chunk(n)[rank]).sum(),
            xs[rank],
        )[0]

    S, small = NUMBER * time * width, NUMBER * 3 * width
    return Case(
        [(xs[rank], *norm, *blocks[rank], b2, cs[rank]) for rank in range(n)],
        [[ys[rank], dxs[rank], dnorm, gradient_blocks[rank], db2, ANYTHING] for rank in range(n)],
        note=f"{time} positions, {width} → {n * hidden} → {width}",
        facts={
            "parts of norm": [[norm_parts(rank) for rank in range(n)]],
            "parts of db2": [[(part, c.sum(0)) for part, c in zip(ys, cs)]],
            "dx without sum": [[(part, dx_of_own(rank)) for rank, part in enumerate(ys)]],
            "y with n biases": [[part + (n - 1) * b2 for part in ys]],
            "forward": ring(S, n, 2),
            "backward": ring(S, n, 3) + ring(small, n, 2),
            "least": ring(S, n, 3),
            "kept": NUMBER * time * (width + 3 * width // n + 2 * hidden) + 256,
        },
    )


def own_positions() -> Check:
    """Check that a rank keeps and sums only its own positions between the layers."""
    kept = keeps_at_most("a rank has time / n positions, besides the gathered input of w1")

    def wrong(trial: Trial) -> str | None:
        if trial.world_size > 1 and sent_in(trial, "forward") > 1.2 * trial.case.facts["forward"]:
            return "in forward, the ranks sent as much as it takes to have all positions on each"
        return kept.wrong(trial)

    return replace(kept, wrong=wrong)


SEQUENCE_PARALLEL = Exercise(
    number="17",
    function="sequence_parallel_mlp",
    title="Sequence parallel: the norm on its own positions",
    points=10,
    weights={"value": 0.25, "bytes": 0.25, "memory": 0.5},
    cases=lambda draw: [
        block_case(draw, n, *sizes)
        for n, sizes in ((1, (3, 6, 8)), (2, (2, 6, 5)), (3, (1, 5, 4)), (4, (3, 8, 4)))
    ],
    checks=(
        value(
            "y and all gradients are those of one process",
            parts=(
                "y",
                "the gradient of x",
                "the gradients of the norm's weight and bias",
                "the gradients of w1, b1 and w2",
                "the gradient of b2",
            ),
        ),
        sends_at_most("forward", "forward: as one all-reduce, 2(n − 1)/n·S bytes a rank"),
        sends_at_most(
            "backward",
            "backward: the same, besides the norm's and b2's gradients (or gathering once more)",
        ),
        own_positions(),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        graph_cut(lambda result: result[3][2]),
        BIAS_N_TIMES,
        Misconception(
            "slice of the gradient without the sum",
            "The backward of the all-gather keeps this rank's positions of its own gradient. Every "
            "rank used these positions with its own block of the MLP, and the parts of the others "
            "are missing.",
            gives("dx without sum", 0, 1),
        ),
        Misconception(
            "norm's gradients never reduced",
            "Each rank has the gradient of the norm's weights from its own positions alone. Their "
            "gradient is the sum over all positions. Without it the ranks' norms drift apart.",
            gives("parts of norm", 2),
        ),
        Misconception(
            "bias's gradient never reduced",
            "b2 is added to this rank's positions alone, so its gradient on this rank is a "
            "part. The parts of all ranks must be added.",
            gives("parts of db2", 0, 4),
        ),
        Misconception(
            "mean for sum",
            "A gradient is divided by n. The loss is the sum over all positions, so the ranks' "
            "parts are added.",
            lambda trials: any(
                gradients_times(part, lambda n: 1 / n)(trials) for part in (1, 2, 4)
            ),
        ),
        Misconception(
            "gradient n times too large",
            "A gradient is n times the right one: parts that are the same on all ranks are "
            "added, or the whole sum is added again.",
            lambda trials: any(gradients_times(part, lambda n: n)(trials) for part in (1, 2, 4)),
        ),
        Misconception(
            "norm of the whole sequence",
            "The positions of all ranks are gathered before the norm, so every rank keeps and "
            "normalizes all of them. The norm acts on each position alone: gather after it.",
            lambda trials: (
                bool(trials)
                and not failed(trials)
                and any(keeps_at_most("").wrong(trial) for trial in trials)
            ),
        ),
        Misconception(
            "all-reduce then slice",
            "The output is summed whole on every rank, and then each rank keeps its positions. The "
            "values are right, for more bytes than a reduce-scatter sends.",
            costs("forward", 1.5),
        ),
    ),
    hints=(
        "An all-reduce is a reduce-scatter and then an all-gather. The norm acts on each position "
        "alone, so it fits between the two.",
        "Two autograd functions: all-gather along time (backward: reduce-scatter), and "
        "reduce-scatter along time (backward: all-gather). Then ask for each weight: on how many "
        "positions does this rank use it?",
        "norm_weight, norm_bias and b2 meet only this rank's positions, so each rank has a part of "
        "their gradient. In 15b you wrote a function that changes nothing in forward and adds up "
        "gradients in backward. It can be applied to weights, too.",
    ),
    questions=(
        ask_sent(
            "12 positions, 8 → 16 → 8 features, in float64 on 4 ranks. How many bytes does "
            "each rank send in forward?",
            lambda: block_case(Draw("question"), 4, 3, 8, 4),
            lambda trial: sent_in(trial, "forward"),
        ),
    ),
    program=run_block,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)


EXERCISES = [SEQUENCE_PARALLEL]
