"""Exercise 21b: ring attention forward. Keys and values go round; queries stay."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.laboratory.exercises.adjoint_exercises import only_equal_blocks
from parallel101.laboratory.exercises.attention_exercises import (
    AttentionBlocks,
    Cut,
    Partial,
    all_gathered,
    attend,
    block_a_second,
    block_bytes,
    few_blocks,
    merge,
    never_called,
    unpacked,
)
from parallel101.laboratory.exercises.wrong_values import gives, only_large_overflow, right_but
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    CHANGES_ITS_INPUT,
    MESSAGES,
    ask_sent,
    bytes_sent,
    failed,
    value,
)


def run_forward(function: Callable, q: Tensor, k: Tensor, v: Tensor, sizes: list[int]) -> list[Any]:
    blocks = AttentionBlocks(sizes, q, k, v)
    found = function(q, k, v, sizes, blocks.attend)
    return [*unpacked(found, 2), *blocks.counted]


def forward_case(draw: Draw, sizes: Sequence[int], scale: float = 1.0) -> Case:
    cut = Cut(draw, sizes, scale)
    return Case(
        [(q, k, v, cut.sizes) for q, k, v in zip(cut.q, cut.k, cut.v)],
        [[out, lse, ANYTHING, ANYTHING] for out, lse in zip(cut.out, cut.lse)],
        note=cut.label(scale),
        facts={
            "sizes": cut.sizes,
            "large": scale > 10,
            "needed": [
                sum(cut.k[other].nbytes + cut.v[other].nbytes for other in range(rank))
                for rank in range(cut.n)
            ],
            **forward_mistakes(cut),
        },
        network=block_a_second(sizes),
    )


def forward_mistakes(cut: Cut) -> dict[str, list]:
    """By mistake, its forms; of each form (out, lse) on every rank, or (out,)."""
    n, ranks = cut.n, range(cut.n)
    parts = [[cut.part(rank, other) for other in ranks] for rank in ranks]
    # the order in which a ring brings them
    seen = [[parts[rank][other] for other in range(rank, -1, -1)] for rank in ranks]
    causal = [[cut.part(rank, other, True) for other in ranks] for rank in ranks]
    whole = [[cut.part(rank, other, False) for other in ranks] for rank in ranks]

    def others(rank: int, which: Callable[[int], bool], blocks: list[Partial]) -> Partial:
        """The own block, and those for which this holds."""
        return merge([parts[rank][rank], *(blocks[o] for o in ranks if o != rank and which(o))])

    def believed(rank: int) -> Partial:
        """The block of step s is taken for that of rank + s."""
        found = [parts[rank][rank]]
        found += [whole[rank][(rank - s) % n] for s in range(1, n) if (rank + s) % n < rank]
        return merge(found)

    def again(rank: int) -> Partial:
        """The neighbour's block comes in every step."""
        return merge([parts[rank][rank], *[whole[rank][(rank - 1) % n]] * rank])

    def own_v(rank: int) -> list[Partial]:
        """Blocks of other ranks' keys and this rank's own values."""
        return [attend(cut.q[rank], cut.k[o], cut.v[rank], False) for o in range(rank)]

    facts = {
        "averaged": [
            [torch.stack([out for out, _ in blocks]).mean(0) for blocks in seen],
            [torch.stack([out for out, _ in blocks]).sum(0) for blocks in seen],
            [torch.stack([out for out, _ in blocks]).sum(0) / n for blocks in seen],
            [_running(blocks, lambda old, new: (old + new) / 2) for blocks in seen],
        ],
        "local mask": [
            [merge(causal[rank][: rank + 1]) for rank in ranks],
            [merge(causal[rank]) for rank in ranks],
        ],
        "future": [
            [others(rank, lambda other: True, whole[rank]) for rank in ranks],
            [merge(whole[rank]) for rank in ranks],
            [merge(whole[rank][: rank + 1]) for rank in ranks],
        ],
        "own": [[parts[rank][rank] for rank in ranks]],
        "lse not merged": [
            *([(_two_by_two(blocks, keep), ANYTHING) for blocks in seen] for keep in (True, False)),
            *(
                [(out, lse([lse for _, lse in blocks])) for out, blocks in zip(cut.out, seen)]
                for lse in (
                    lambda lses: lses[-1],
                    lambda lses: lses[0],
                    lambda lses: torch.stack(lses).sum(0),
                    lambda lses: torch.stack(lses).amax(0),
                )
            ),
        ],
    }
    if len(set(cut.sizes)) == 1:  # elsewhere, these mistakes may end a run early
        facts |= {
            "source": [[believed(rank) for rank in ranks]],
            "again": [
                [again(rank) for rank in ranks],
                [others(rank, lambda other: True, [whole[rank][rank - 1]] * n) for rank in ranks],
            ],
            "own v": [[merge([parts[rank][rank], *own_v(rank)]) for rank in ranks]],
        }
    return facts


def _running(blocks: Sequence[Partial], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    result = blocks[0][0]
    for out, _ in blocks[1:]:
        result = join(result, out)
    return result


def _two_by_two(blocks: Sequence[Partial], keep: bool) -> Tensor:
    """Each new block is merged, but the weight of what was there is that of the first or the last.

    keep: the first block's lse is kept. Otherwise the latest block's takes its place.
    """
    result, weight = blocks[0]
    for out, lse in blocks[1:]:
        result, _ = merge([(result, weight), (out, lse)])
        weight = weight if keep else lse
    return result


def forward_cases(draw: Draw) -> list[Case]:
    a, b = draw.integer(2, 4), draw.integer(6, 8)
    shapes = (b,), (a, b), (b, a, 5), (4, 4, 4, 4), (5, 5, 4, 4, 5)
    return [*(forward_case(draw, sizes) for sizes in shapes), forward_case(draw, (5, 5, 5), 1000.0)]


# ---- checks ----


def all_but_one(case: Case) -> list[int]:
    return [(case.world_size - 1) * block_bytes(case.facts["sizes"])] * case.world_size


def messages(trial: Trial) -> list[int]:
    """By rank, how many messages it sends, small ones aside."""
    found = [0] * trial.world_size
    for event in trial.trace.events:
        found[event.rank] += event.kind == "send" and event.nbytes > 64
    return found


def exchanges() -> Check:
    def wrong(trial: Trial) -> str | None:
        most = 2 * (trial.world_size - 1)
        for rank, sent in enumerate(messages(trial)):
            if sent > most:
                return f"rank {rank} sent {sent} messages; n − 1 for K and n − 1 for V are {most}"
        return None

    return Check("steps", "n − 1 exchanges of K and V", wrong)


def seconds(trial: Trial) -> float:
    return round(trial.trace.makespan, 6)


FEW = few_blocks("no rank holds more than a few blocks of K and V")


def hidden() -> Check:
    """Each exchange takes a second at most, and so does each block.

    With all blocks in memory, no ring is needed to hide them.
    """

    def wrong(trial: Trial) -> str | None:
        if (kept := FEW.wrong(trial)) is not None:
            return kept
        n = trial.world_size
        if n > 2 and seconds(trial) > n + 0.75:
            return (
                f"took {seconds(trial):g} s; if each exchange runs while a block is computed, it "
                f"takes at most {n} s"
            )
        return None

    return Check("overlap", "the next block is in flight while one is computed", wrong)


@mistake(
    "one exchange too many",
    "The blocks go round until each is home again. Nobody needs that last exchange.",
)
@right_but(2)
def once_more(trial: Trial) -> bool:
    """All is right, and every rank makes n exchanges."""
    return {*messages(trial)} <= {trial.world_size, 2 * trial.world_size}


@mistake(
    "waits before it computes",
    "The values are right, but ranks exchange first and compute afterwards, or the other way "
    "round. The link is idle while they compute.",
)
def not_overlapped(trials: Sequence[Trial]) -> bool:
    large = [trial for trial in trials if trial.world_size > 2]
    return (
        bool(large)
        and not failed(trials)
        and not any(map(never_called, trials))
        and any(hidden().wrong(t) is not None for t in large)
    )


EXERCISES = [
    Exercise(
        number="21b",
        function="ring_attention_forward",
        title="Ring attention, forward",
        points=10,
        cases=forward_cases,
        program=run_forward,
        weights={"value": 0.2, "bytes": 0.1, "steps": 0.05, "memory": 0.15, "overlap": 0.5},
        checks=(
            value(
                "out and lse are those of one process with the whole sequence", parts=("out", "lse")
            ),
            bytes_sent(all_but_one, "every rank sends n − 1 blocks of K and V"),
            exchanges(),
            FEW,
            hidden(),
        ),
        least_received=lambda case: case.facts["needed"],
        misconceptions=(
            *MESSAGES,
            CHANGES_ITS_INPUT,
            only_equal_blocks,
            Misconception(
                "softmaxes averaged",
                "The results of the blocks are added or averaged. Each was divided by the sum over "
                "its own block, and these sums differ.",
                gives("averaged", 0),
            ),
            Misconception(
                "causal mask in local positions",
                "Every block gets the triangle, as if its first key had the position of this "
                "rank's first query. All keys of an earlier rank are in the past.",
                gives("local mask", 0, 1),
            ),
            Misconception(
                "future positions seen",
                "Queries see keys of later positions. A later rank's block is entirely in the "
                "future, and this rank's own block needs the triangle.",
                gives("future", 0, 1),
            ),
            Misconception(
                "only its own block",
                "Each rank attends to its own positions alone.",
                gives("own", 0, 1),
            ),
            Misconception(
                "block taken for another rank's",
                "Data moves one rank further in each step, so what arrives in step s was sent "
                "first by the rank s places back. The code takes it for the one s places ahead.",
                gives("source", 0, 1),
            ),
            Misconception(
                "sends its own K and V every time",
                "A rank sends its own K and V in each step, so its neighbour gets the same block "
                "again and again: nothing is passed on.",
                gives("again", 0, 1),
            ),
            Misconception(
                "V left at home",
                "Only K travels. The weights belong to another rank's keys, and are applied to "
                "this rank's own values.",
                gives("own v", 0, 1),
            ),
            Misconception(
                "maximum not carried",
                "exp of a large lse is infinite. The result is right for small scores only.",
                only_large_overflow,
            ),
            Misconception(
                "lse not merged",
                "out is merged, but lse is that of one block, or a wrong sum. What is there "
                "already then gets the wrong weight, in the next merge or in backward.",
                gives("lse not merged", 0, 1),
            ),
            Misconception(
                "whole K and V on every rank",
                "All K and V are collected first, and then used. The values are right, but each "
                "rank holds the whole sequence, which the ring is there to avoid.",
                all_gathered,
            ),
            once_more,
            not_overlapped,
        ),
        hints=(
            "A rank that holds the block of rank j: which positions does this block have, "
            "compared with its own? There are three cases, and one of them needs no work.",
            "Before you compute a block, start to send it to rank + 1 and to receive the next one "
            "from rank − 1. Wait for both after the computation. In step s you hold the block of "
            "rank (rank − s) mod n. Its length is in sizes.",
            "Two results are merged as the ranks' results were in 21a: torch.logaddexp "
            "gives the log of the new denominator, and each result counts with its "
            "share. A share has one dimension less than out. Blocks of later ranks are "
            "passed on, but not computed. torch.stack makes one message of k and v.",
        ),
        questions=(
            ask_sent(
                "4 ranks have 8 positions each, with 2 heads of 16 features in float64. How many "
                "bytes does each rank send?",
                lambda: forward_case(Draw("question"), [8] * 4),
            ),
            Question(
                "seconds",
                "On the same 4 ranks, an exchange takes a second, and so does a block without a "
                "mask. If each exchange is hidden, how long does it take in all?",
                lambda: forward_case(Draw("question"), [8] * 4),
                seconds,
                "seconds",
            ),
        ),
        watch=lambda: forward_case(Draw("question"), [8] * 4),
        picture="lanes",
    )
]
