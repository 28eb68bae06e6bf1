"""Exercise 16a: attention, cut by heads."""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.laboratory.exercises.tensor_parallel_exercises import (
    MISSING_DX,
    MLP_PARTS,
    N_TIMES,
    NUMBER,
    OUTPUT_NOT_SUMMED,
    WHOLE_ON_EVERY_RANK,
    costs,
    gives,
    gradients_of,
    graph_cut,
    keeps_at_most,
    least_received,
    ring,
    run_module,
    sends_at_most,
    sent_in,
)
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    COLLECTIVES,
    P2P,
    Case,
    Draw,
    Exercise,
    Misconception,
)
from parallel101.laboratory.grade.exercise_checks import MESSAGES, ask_sent, value


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    """Compute causal attention in one process, as in hw6.py."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (x @ qkv.T).chunk(3, dim=-1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ out.T


def cut_attention(qkv: Tensor, out: Tensor, n: int) -> list[tuple[Tensor, Tensor]]:
    thirds = [part.chunk(n) for part in qkv.chunk(3)]
    return [(torch.cat(blocks), columns) for blocks, columns in zip(zip(*thirds), out.chunk(n, 1))]


def attention_case(draw: Draw, n: int, time: int, heads: int, d: int) -> Case:
    double = functools.partial(draw.tensor, dtype=torch.float64)
    width = heads * d
    x, c, qkv, out = (
        double(time, width),
        double(time, width),
        double(3 * width, width) / 2,
        double(width, width),
    )
    y = attention(x, qkv, out, heads)
    dx, dqkv, dout = gradients_of(
        lambda x, qkv, out: (attention(x, qkv, out, heads) * c).sum(), x, qkv, out
    )
    blocks = cut_attention(qkv, out, n)
    contiguous = [
        attention(x, rows, columns, heads // n)
        for rows, columns in zip(qkv.chunk(n), out.chunk(n, 1))
    ]
    S = NUMBER * time * width
    return Case(
        [(qkv, out, heads, x, c)] * n,
        [
            [y, dx, {"qkv": g, "out": h}, {"qkv": rows, "out": columns}, ANYTHING]
            for (g, h), (rows, columns) in zip(cut_attention(dqkv, dout, n), blocks)
        ],
        note=f"{time} positions, {heads} heads of {d}",
        facts={
            "parts of y": [[attention(x, *block, heads // n) for block in blocks]],
            "whole": {"qkv": qkv.numel(), "out": out.numel()},
            "parts of dx": [
                [
                    gradients_of(lambda x, b=b: (attention(x, *b, heads // n) * c).sum(), x)[0]
                    for b in blocks
                ]
            ],
            "contiguous": [[sum(contiguous)] * n],
            "forward": ring(S, n, 2),
            "backward": ring(S, n, 2),
            "least": ring(S, n, 2),
            "kept": NUMBER * (time * (2 * width + 8 * width // n) + 3 * time * time * heads // n)
            + 256,
        },
    )


PARALLEL_ATTENTION = Exercise(
    number="16a",
    function="ParallelAttention",
    title="Attention, cut by heads",
    points=10,
    weights={"value": 0.3, "bytes": 0.6, "memory": 0.1},
    cases=lambda draw: [
        attention_case(draw, n, *sizes)
        for n, sizes in ((1, (3, 2, 2)), (2, (4, 4, 3)), (3, (5, 6, 2)), (4, (3, 8, 2)))
    ],
    checks=(
        value("y, the ranks' weights and all gradients are those of one process", parts=MLP_PARTS),
        sends_at_most("forward", "forward: one all-reduce, 2(n − 1)/n·S bytes a rank"),
        replace(
            sends_at_most("backward", "backward: one all-reduce, 2(n − 1)/n·S bytes a rank"),
            weight=5.0,
        ),
        keeps_at_most("each rank keeps the activations of heads / n heads for backward"),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        graph_cut(lambda result: result[2].get("out")),
        WHOLE_ON_EVERY_RANK,
        Misconception(
            "fused QKV cut contiguously",
            "The fused matrix is cut into n equal pieces from top to bottom. So the first ranks "
            "get queries only, and the last ones values only. Each rank needs the rows of its own "
            "heads in all three parts.",
            gives("contiguous", 0),
        ),
        OUTPUT_NOT_SUMMED,
        MISSING_DX,
        N_TIMES,
        Misconception(
            "an all-reduce each for query, key and value",
            "The gradient of x is all-reduced three times, once for each of query, key and value. "
            "On each rank their sum needs no message, so one all-reduce of this sum is enough.",
            costs("backward", 3),
        ),
    ),
    hints=(
        "No head looks at another head. So a rank that has all rows of a head, in queries, keys "
        "and values, needs no message to attend.",
        "It is the same pair as the MLP: qkv is cut by its outputs, at the borders of heads, and "
        "out by its inputs. Cut each third of qkv alike.",
        "qkv.chunk(3) gives all queries, all keys and all values. Each of the three "
        "has whole heads in order. attention(…) works on your part as it is, with "
        "fewer heads. Along which dim of out do the heads lie?",
    ),
    questions=(
        ask_sent(
            "3 positions, 8 heads of 2 features, in float64 on 4 ranks. How many bytes does "
            "each rank send in backward?",
            lambda: attention_case(Draw("question"), 4, 3, 8, 2),
            lambda trial: sent_in(trial, "backward"),
        ),
    ),
    program=run_module,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)


EXERCISES = [PARALLEL_ATTENTION]
