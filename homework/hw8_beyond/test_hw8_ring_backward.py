"""Exercise 21c: ring attention backward. Gradients of keys and values travel home."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.laboratory.exercises.adjoint_exercises import only_equal_blocks
from parallel101.laboratory.exercises.attention_exercises import (
    HEADS,
    ITEM,
    WIDTH,
    AttentionBlocks,
    Cut,
    all_gathered,
    block_a_second,
    block_bytes,
    few_blocks,
    unpacked,
)
from parallel101.laboratory.exercises.wrong_values import gives
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    Case,
    Draw,
    Exercise,
    Misconception,
)
from parallel101.laboratory.grade.exercise_checks import (
    CHANGES_ITS_INPUT,
    MESSAGES,
    ask_sent,
    bytes_sent,
    value,
)

Three = tuple[Tensor, Tensor, Tensor]


def run_backward(
    function: Callable,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sizes: list[int],
) -> list[Any]:
    blocks = AttentionBlocks(sizes, dout, q, k, v, out)
    found = function(dout, q, k, v, out, lse, sizes, blocks.attend_backward)
    return [*unpacked(found, 3), *blocks.counted]


def backward_case(draw: Draw, sizes: Sequence[int], scale: float = 1.0) -> Case:
    cut = Cut(draw, sizes, scale)
    given = zip(cut.dout, cut.q, cut.k, cut.v, cut.out, cut.lse)
    return Case(
        [(*tensors, cut.sizes) for tensors in given],
        [[*gradients, ANYTHING, ANYTHING] for gradients in zip(cut.dq, cut.dk, cut.dv)],
        note=cut.label(scale),
        facts={"sizes": cut.sizes, "large": scale > 10, **backward_mistakes(cut)},
        network=block_a_second(sizes),
    )


def backward_mistakes(cut: Cut) -> dict[str, list]:
    """By mistake, its forms; of each form (dq, dk, dv) on every rank."""
    n, ranks = cut.n, range(cut.n)
    own_softmax = [[cut.part(rank, other) for other in ranks] for rank in ranks]

    def gradients(
        of: Callable[[int, int], Three], meets: Callable[[int, int], bool]
    ) -> list[Three]:
        """(dq, dk, dv) by rank, from those that queries of a rank and keys of another add."""
        dqs = [torch.zeros_like(q) for q in cut.q]
        dks, dvs = ([torch.zeros_like(k) for k in cut.k] for _ in range(2))
        for rank in ranks:
            for other in ranks:
                if meets(rank, other):
                    dq, dk, dv = of(rank, other)
                    dqs[rank] += dq
                    dks[other] += dk
                    dvs[other] += dv
        return list(zip(dqs, dks, dvs))

    def past(rank: int, other: int) -> bool:
        return other <= rank

    own = [cut.part_backward(rank, rank) for rank in ranks]
    local = [cut.part_backward(rank, rank, out_lse=own_softmax[rank][rank]) for rank in ranks]
    right = list(zip(cut.dq, cut.dk, cut.dv))
    last = [cut.part_backward(rank, 0)[0] for rank in ranks]
    facts = {
        "own block": [own, local],
        "lost": [[(dq, dk, dv) for (dq, _, _), (_, dk, dv) in zip(right, own)]],
        "local mask": [
            gradients(lambda rank, other: cut.part_backward(rank, other, True), past),
            gradients(lambda rank, other: cut.part_backward(rank, other, True), lambda *pair: True),
        ],
        "future": [
            gradients(cut.part_backward, lambda *pair: True),
            gradients(
                lambda rank, other: cut.part_backward(rank, other, False), lambda *pair: True
            ),
            gradients(lambda rank, other: cut.part_backward(rank, other, False), past),
        ],
        "softmax of a block": [
            gradients(
                lambda rank, other: cut.part_backward(
                    rank, other, out_lse=own_softmax[rank][other]
                ),
                past,
            ),
            gradients(
                lambda rank, other: cut.part_backward(
                    rank, other, out_lse=(cut.out[rank], own_softmax[rank][other][1])
                ),
                past,
            ),
        ],
        "dq of a block": [
            [(dq, dk, dv) for dq, dk, dv in zip(dqs, cut.dk, cut.dv)]
            for dqs in (last, [dq for dq, _, _ in own])
        ],
    }
    if len(set(cut.sizes)) == 1:
        visited = []
        for rank in ranks:
            parts = [cut.part_backward(rank, other)[1:] for other in range(rank + 1)]
            visited.append((sum(dk for dk, _ in parts), sum(dv for _, dv in parts)))
        neighbours = ([right[(rank + by) % n][1:] for rank in ranks] for by in (1, -1))
        facts["left"] = [
            [(dq, *pair) for dq, pair in zip(cut.dq, pairs)] for pairs in (*neighbours, visited)
        ]
    return facts


def backward_cases(draw: Draw) -> list[Case]:
    a, b = draw.integer(2, 4), draw.integer(6, 8)
    shapes = (b,), (a, b), (b, a, 5), (4, 4, 4, 4), (5, 5, 4, 4, 5)
    return [*(backward_case(draw, sizes) for sizes in shapes), backward_case(draw, (5, 5, 5), 30.0)]


def both_ways(case: Case) -> list[int]:
    n = case.world_size
    return [(2 * n - 1) * block_bytes(case.facts["sizes"]) if n > 1 else 0] * n


def least(case: Case) -> list[int]:
    n = case.world_size
    return [HEADS * min(case.facts["sizes"]) * WIDTH * ITEM if n > 1 else 0] * n


EXERCISES = [
    Exercise(
        number="21c",
        function="ring_attention_backward",
        title="Ring attention, backward",
        points=10,
        cases=backward_cases,
        program=run_backward,
        weights={"value": 0.25, "bytes": 0.25, "memory": 0.5},
        checks=(
            value(
                "dq, dk and dv are those of one process with the whole sequence",
                parts=("dq", "dk", "dv"),
            ),
            bytes_sent(
                both_ways, "every rank sends n − 1 blocks of K and V, and n blocks of dK and dV"
            ),
            few_blocks("no rank holds more than a few blocks"),
        ),
        least_received=least,
        misconceptions=(
            *MESSAGES,
            CHANGES_ITS_INPUT,
            only_equal_blocks,
            Misconception(
                "K and V not rotated in backward",
                "The gradients come from this rank's own block alone. Its queries used the keys of "
                "all earlier ranks, and its keys were used by all later ones.",
                gives("own block", 0, 1, 2),
            ),
            Misconception(
                "gradients of K and V not sent back",
                "dq is right. dk and dv have the part of this rank's own queries only: what other "
                "ranks computed for its keys must come back and be added.",
                gives("lost", 0, 1, 2),
            ),
            Misconception(
                "gradient left on the wrong rank",
                "dq is right, but a rank's dk and dv are gradients of another rank's keys. A block "
                "that has visited all ranks needs one more exchange to be home again.",
                gives("left", 0, 1, 2),
            ),
            Misconception(
                "causal mask in local positions",
                "Every block gets the triangle, as if its first key had the position of this "
                "rank's first query. All keys of an earlier rank are in the past.",
                gives("local mask", 0, 1, 2),
            ),
            Misconception(
                "future positions seen",
                "Gradients flow between queries and keys of later positions, which had no part in "
                "the result.",
                gives("future", 0, 1, 2),
            ),
            Misconception(
                "softmax of one block",
                "The weights are those of a softmax over one block. lse and out must be those of "
                "the whole row, which forward has returned.",
                gives("softmax of a block", 0, 1, 2),
            ),
            Misconception(
                "overwritten, not added",
                "dq is what a single block gives. The gradients of all blocks must be added.",
                gives("dq of a block", 0, 1, 2),
            ),
            Misconception(
                "whole K and V on every rank",
                "All K and V are collected first, and then used. The values are right, but each "
                "rank holds the whole sequence, which the ring is there to avoid.",
                all_gathered,
            ),
        ),
        hints=(
            "Which ranks compute a part of dk of rank 0's keys? And where is the sum of these "
            "parts needed?",
            "Let dK and dV travel with the block to which they belong. Each rank adds its part to "
            "what has arrived, and passes it on. K and V make n − 1 exchanges, dK and dV one more.",
            "In step s you hold K and V of rank (rank − s) mod n, and receive the dK and dV that "
            "belong to them. So the order is: receive dK and dV (in step 0 they are zeros), add "
            "this rank's part, send them to rank + 1. After the last step, what you receive is "
            "your own.",
        ),
        questions=(
            ask_sent(
                "4 ranks have 8 positions each, with 2 heads of 16 features in float64. dK and dV "
                "travel round with K and V, and then home. How many bytes does each rank send?",
                lambda: backward_case(Draw("question"), [8] * 4),
            ),
        ),
        watch=lambda: backward_case(Draw("question"), [8] * 4),
        picture="lanes",
    )
]
