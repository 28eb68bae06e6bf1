"""Exercise 6: ring reduce-scatter. Rank r returns its rows of the sum."""

import math
from collections.abc import Iterator, Sequence

import torch

from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.exercises.wrong_values import (
    every,
    everything_to_everyone,
    several_ranks,
    whole_round_ring,
    wrong_sums,
)
from parallel101.laboratory.grade.compared_values import same
from parallel101.laboratory.grade.exercise import Case, Draw, Exercise, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import (
    ITS_INPUT,
    MESSAGES,
    ask_sent,
    ask_steps,
    bytes_sent,
    failed,
    received,
    right,
    steps,
    unwritten_was_sent,
    value,
)


def share(case: Case) -> float:
    """Return (n − 1)/n of the bytes of x, with all chunks as large as the largest one."""
    x, n = case.facts["xs"][0], case.world_size
    return (n - 1) * math.ceil(x.shape[0] / n) * (x.nbytes // max(1, x.shape[0]))


def reduce_scatter_case(xs: Sequence[torch.Tensor], note: str = "") -> Case:
    n = len(xs)
    chunks = list(torch.tensor_split(torch.stack(list(xs)).sum(0), n))
    return Case([(x,) for x in xs], chunks, note, facts={"xs": xs, "chunks": chunks})


def reduce_scatter_cases(draw: Draw) -> list[Case]:
    cases = [reduce_scatter_case(draw.tensors(n, 24 * n, 2)) for n in (1, 2, 3, 4)]
    cases.append(reduce_scatter_case(draw.tensors(3, 61, 2), "61 rows, which 3 doesn't divide"))
    cases.append(
        reduce_scatter_case(
            draw.tensors(4, 3, dtype=torch.int64), "3 whole numbers, fewer than ranks"
        )
    )
    cases.append(
        reduce_scatter_case(
            [x.t() for x in draw.tensors(4, 3, 83, dtype=torch.float64)], "transposed, float64"
        )
    )
    return [*cases, reduce_scatter_case(draw.tensors(5, 103, 2))]


def own_chunk(case: Case) -> list[int]:
    return [chunk.nbytes if case.world_size > 1 else 0 for chunk in case.facts["chunks"]]


def chunk_pieces(trial: Trial) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    for rank, result in enumerate(trial.results):
        yield (
            result,
            [torch.tensor_split(x, trial.world_size)[rank] for x in trial.case.facts["xs"]],
        )


@mistake(
    "all-reduce then slice",
    "Every rank gets the whole sum, and keeps only its own rows: that moves at least twice as "
    "many bytes as a reduce-scatter.",
)
@every(lambda trials: several_ranks(trials, least=3))
def all_then_slice(trial: Trial) -> bool:
    """Check whether results are right, but the ranks receive the bytes of an all-reduce.

    One step too many on the ring also brings each rank as many bytes as x has, but less in total.
    """
    got, whole = received(trial), trial.case.facts["xs"][0].nbytes
    return right(trial) and min(got) >= whole and sum(got) >= 1.9 * (len(got) - 1) * whole


@mistake(
    "reduce then scatter",
    "One rank receives everybody's data, adds it up and sends the rows out: its link is busy "
    "while the others are idle.",
)
@every(lambda trials: several_ranks(trials, least=3))
def sum_on_one_rank(trial: Trial) -> bool:
    """Check whether one rank receives twice the bytes of x, and another only its own rows.

    The results are right.
    """
    got, nbytes = received(trial), trial.case.facts["xs"][0].nbytes
    only_own = min(got) <= max(own_chunk(trial.case)) + 64
    return right(trial) and max(got) >= 2 * nbytes and only_own


@mistake(
    "owner off by one",
    "The sums are right, but they end at the wrong ranks: every rank returns its neighbour's rows.",
)
def off_by_one(trials: Sequence[Trial]) -> bool:
    """Check whether every rank returns the finished chunk of the next or the previous rank."""
    wrong = failed(trials)
    return bool(wrong) and any(
        all(
            trial.error is None
            and same(result, trial.case.facts["chunks"][(rank + way) % trial.world_size])
            for trial in wrong
            for rank, result in enumerate(trial.results)
        )
        for way in (1, -1)
    )


SCATTER_QUESTION = lambda: reduce_scatter_case([torch.ones(1000)] * 4)  # noqa: E731
RING_REDUCE_SCATTER = Exercise(
    number="6",
    function="ring_reduce_scatter",
    title="Ring reduce-scatter",
    points=10,
    weights={"value": 0.3, "bytes": 0.5, "steps": 0.2},
    cases=reduce_scatter_cases,
    checks=(
        value("rank r returns its rows of the sum", keeps="x"),
        bytes_sent(
            lambda case: [int(share(case))] * case.world_size, "every rank sends (n − 1)/n of x"
        ),
        steps(
            lambda case: case.world_size - 1,
            "n − 1 steps",
            slack=lambda case: 2 * (case.world_size - 1),
        ),
    ),
    least_received=own_chunk,
    misconceptions=(
        *MESSAGES,
        unwritten_was_sent,
        whole_round_ring,
        everything_to_everyone,
        all_then_slice,
        sum_on_one_rank,
        off_by_one,
        *wrong_sums(chunk_pieces),
        *ITS_INPUT,
    ),
    hints=(
        "The all-gather backwards. Follow one chunk: it must arrive at its owner last, so at which "
        "rank does it start?",
        "The sum of chunk c starts at rank c + 1 and goes round the ring to rank c. So in step 1 "
        "rank r sends its part of chunk r − 1. In each step it adds its own part to what has "
        "arrived, and sends that on in the next step.",
        "A rank has one partial sum, and one tensor for what arrives. Chunks may "
        "differ in size: in step s it is chunk r − s − 1 that arrives. Which chunk "
        "does a rank begin with, and which one does it have at the end?",
    ),
    questions=(
        ask_sent(
            "4 ranks, 1000 float32 numbers each: how many bytes does each rank send?",
            SCATTER_QUESTION,
        ),
        ask_steps("How many steps does it take?", SCATTER_QUESTION),
    ),
    watch=lambda: reduce_scatter_case([origin_tensor(rank, 4, 8) for rank in range(4)]),
)


EXERCISES = [RING_REDUCE_SCATTER]
