"""Exercise 15b: an MLP, whose first matrix is cut by its outputs and whose second by its inputs."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.laboratory.exercises.tensor_parallel_exercises import (
    BIAS_N_TIMES,
    MISSING_DX,
    MLP_PARTS,
    N_TIMES,
    NUMBER,
    OUTPUT_NOT_SUMMED,
    WHOLE_ON_EVERY_RANK,
    cut_mlp,
    gives,
    gradients_of,
    graph_cut,
    keeps_at_most,
    least_received,
    mlp,
    ring,
    run_module,
    sends_at_most,
    sent_in,
)
from parallel101.laboratory.grade.compared_values import same
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    COLLECTIVES,
    P2P,
    Case,
    Draw,
    Exercise,
    Misconception,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import MESSAGES, ask_sent, value, wrong_trials


def draw_weights(width: int, hidden: int, seed: int) -> list[Tensor]:
    """Draw the weights of an MLP for one process, as in hw6.py."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for shape in shapes
    ]


def gelu_of_partial_sums(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, n: int
) -> list[Tensor]:
    """Return the results if the first layer is cut by its inputs, with GELU on partial sums.

    The biases are on every rank, on one rank, in parts, or nowhere.
    """
    partial = [
        F.linear(mine, block) for mine, block in zip(x.tensor_split(n, 1), w1.tensor_split(n, 1))
    ]
    zero = torch.zeros_like(b1)
    shares = [[b1] * n, [b1, *[zero] * (n - 1)], [b1 / n] * n, [zero] * n]
    hidden = [[F.gelu(z + b) for z, b in zip(partial, bias)] for bias in shares]
    sums = [F.linear(torch.stack(parts).sum(0), w2) for parts in hidden]
    return [total + k * b2 for total in sums for k in (1, n)]


def mlp_case(draw: Draw, n: int, samples: int, width: int, hidden: int) -> Case:
    seed = draw.integer(1, 10**6)
    x, c = (draw.tensor(samples, width, dtype=torch.float64) for _ in range(2))
    whole = draw_weights(width, hidden, seed)
    y = mlp(x, *whole)
    dx, *gradients, db2 = gradients_of(lambda *tensors: (mlp(*tensors) * c).sum(), x, *whole)
    blocks = cut_mlp(whole[:3], n)
    zero = torch.zeros_like(whole[3])
    S, names = NUMBER * samples * width, ("w1", "b1", "w2", "b2")
    return Case(
        [(width, hidden, seed, x, c)] * n,
        [
            [y, dx, dict(zip(names, (*mine, db2))), dict(zip(names, (*block, whole[3]))), ANYTHING]
            for mine, block in zip(cut_mlp(gradients, n), blocks)
        ],
        note=f"{samples} samples, {width} → {hidden} → {width}",
        facts={
            "parts of y": [[mlp(x, *block, whole[3]) for block in blocks]],
            "whole": {name: p.numel() for name, p in zip(names, whole)},
            "parts of dx": [
                [
                    gradients_of(lambda x, block=block: (mlp(x, *block, zero) * c).sum(), x)[0]
                    for block in blocks
                ]
            ],
            "y with n biases": [[y + (n - 1) * whole[3]] * n],
            "gelu of partial sums": [[form] * n for form in gelu_of_partial_sums(x, *whole, n)],
            "forward": ring(S, n, 2),
            "backward": ring(S, n, 2),
            "least": ring(S, n, 2),
            "kept": NUMBER * samples * (2 * width + 3 * math.ceil(hidden / n)) + 256,
        },
    )


@mistake(
    "same seed, same shard",
    "Every rank draws its block with the same seed, so all ranks hold the same block. The "
    "joined matrix repeats it n times.",
)
def same_shards(trials: Sequence[Trial]) -> bool:
    """Check whether the ranks hold the same block where the blocks should differ."""
    several = [trial.results for trial in wrong_trials(trials) if trial.world_size > 1]
    return any(
        isinstance(results[0][3], dict)
        and any(
            isinstance(own := results[0][3].get(name), Tensor)
            and own.numel()  # empty blocks are always equal
            and same(own, results[1][3].get(name))
            for name in ("w1", "w2")
        )
        for results in several
    )


PARALLEL_MLP = Exercise(
    number="15b",
    function="ParallelMLP",
    title="MLP: column, then row",
    points=10,
    weights={"value": 0.4, "bytes": 0.4, "memory": 0.2},
    cases=lambda draw: [
        mlp_case(draw, n, *sizes)
        for n, sizes in (
            (1, (3, 6, 8)),
            (2, (4, 6, 11)),
            (3, (2, 7, 13)),
            (4, (5, 8, 32)),
            (4, (2, 4, 3)),
        )
    ],
    checks=(
        value("y, the ranks' weights and all gradients are those of one process", parts=MLP_PARTS),
        sends_at_most("forward", "forward: one all-reduce, 2(n − 1)/n·S bytes a rank"),
        sends_at_most("backward", "backward: one all-reduce, 2(n − 1)/n·S bytes a rank"),
        keeps_at_most("each rank keeps hidden / n features for backward"),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        graph_cut(lambda result: result[2].get("w2")),
        WHOLE_ON_EVERY_RANK,
        Misconception(
            "GELU on partial sums",
            "GELU is applied before the sum over the ranks is complete. GELU of a sum is not "
            "the sum of the GELUs.",
            gives("gelu of partial sums", 0),
        ),
        same_shards,
        BIAS_N_TIMES,
        OUTPUT_NOT_SUMMED,
        MISSING_DX,
        N_TIMES,
    ),
    hints=(
        "After the first layer, a rank has some of the hidden features. Which columns of W2 do "
        "they need? What is missing from y then?",
        "Two autograd functions: one copies x into the ranks' work (its backward is an "
        "all-reduce), the other sums the partial outputs (its backward passes the gradient on). "
        "Add b2 after the sum.",
        "Draw the whole matrices on every rank and keep this rank's block: rows of w1 "
        "and b1, but columns of w2. In forward, each of your two functions is used "
        "once. Which comes before the first layer, and which after the second?",
    ),
    questions=(
        ask_sent(
            "A batch of 5 samples goes 8 → 32 → 8 features in float64, on 4 ranks. How many "
            "bytes does each rank send in forward?",
            lambda: mlp_case(Draw("question"), 4, 5, 8, 32),
            lambda trial: sent_in(trial, "forward"),
        ),
    ),
    program=run_module,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)


EXERCISES = [PARALLEL_MLP]
