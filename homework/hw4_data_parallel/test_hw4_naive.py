"""Exercise 10: naive data parallel. Every gradient is all-reduced after backward."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from parallel101 import Network
from parallel101.laboratory.exercises.training_exercises import (
    ITEM,
    MEAN_OF_MEANS,
    MEAN_TWICE,
    NEVER_REDUCED,
    NO_FIRST_SYNCHRONISATION,
    SUM_FOR_MEAN,
    added_to_the_last,
    alike,
    all_reduce_bytes,
    count_weights,
    equals_one_process,
    from_another_start,
    gradients_of,
    make_model,
    ring_slack,
    train,
    train_whole,
)
from parallel101.laboratory.grade.exercise import (
    COLLECTIVES,
    P2P,
    Case,
    Draw,
    Exercise,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    bytes_sent,
    communicated,
    not_every_rank,
    right,
)


def naive_case(draw: Draw, shares: Sequence[int], tied: bool = False, steps: int = 3) -> Case:
    """Return a case. shares: the number of samples of each step's batch that each rank has."""
    n, sizes = len(shares), [8, 8, 8, 8] if tied else [5, 8, 6, 2]
    count = count_weights(sizes, tied)
    first = [0.5 * weights for weights in draw.tensors(n, count, dtype=torch.float64)]
    inputs = [draw.tensor(steps, share, sizes[0], dtype=torch.float64) for share in shares]
    targets = [draw.tensor(steps, share, sizes[-1], dtype=torch.float64) for share in shares]
    expected = train(
        train_whole, sizes, tied, first[0], torch.cat(inputs, 1), torch.cat(targets, 1)
    )
    model = make_model(sizes, first[0], tied)
    local = [gradients_of(model, F.mse_loss(model(x[0]), y[0])) for x, y in zip(inputs, targets)]
    weight = sizes[0] * sizes[1] * ITEM
    return Case(
        [(sizes, tied, first[rank], inputs[rank], targets[rank]) for rank in range(n)],
        [expected] * n,
        note=f"shares of {', '.join(map(str, shares))} samples"
        + (", tied weights" if tied else ""),
        facts={
            "bytes": count * ITEM,
            "steps": steps,
            "tied": {"0.weight": weight} if tied else {},
            "first": [
                dict(make_model(sizes, weights, tied).named_parameters()) for weights in first
            ],
            "local": local,
        },
        network=Network(latency=0.0, bandwidth=count * ITEM / 3),  # all weights in three seconds
    )


def naive_cases(draw: Draw) -> list[Case]:
    k = draw.integer(2, 3)
    return [
        naive_case(draw, [k]),
        naive_case(draw, [k, k]),
        naive_case(draw, [k, k], tied=True),
        naive_case(draw, [2, 4, 1]),
        naive_case(draw, [k] * 4),
        naive_case(draw, [1, k, 3, 1], tied=True),
    ]


def naive_bytes(case: Case) -> list[int]:
    """Return the most bytes by rank. In a chain broadcast, a rank sends the weights once."""
    n, facts = case.world_size, case.facts
    return [
        facts["steps"] * all_reduce_bytes(facts["bytes"], n) + (facts["bytes"] if n > 1 else 0)
    ] * n


def naive_least(case: Case) -> list[int]:
    """Return the bytes that each rank receives at least.

    These are the sum of the others' gradients in each step, and the initial weights on all ranks
    but rank 0.
    """
    n, facts = case.world_size, case.facts
    if n == 1:
        return [0]
    return [
        facts["steps"] * facts["bytes"] + (rank > 0) * facts["bytes"] * (n - 1) // n - 64
        for rank in range(n)
    ]


bytes_check = bytes_sent(
    naive_bytes,
    "2(n−1)/n of the gradients' bytes per step, and the first weights at most once",
    ring_slack,
)


@mistake(
    "tied weights reduced twice",
    "Two layers share one parameter, and its gradient is all-reduced once for each layer. It is "
    "one tensor: the second all-reduce adds up sums, or at least sends the same bytes again.",
)
def tied_twice(trials: Sequence[Trial]) -> bool:
    """Check whether only tied weights are wrong, or their bytes were sent once more."""
    tied = [t for t in trials if t.error is None and t.world_size > 1 and t.case.facts["tied"]]
    others = [t for t in trials if t.error is None and not t.case.facts["tied"]]
    if not tied or not all(right(t) and bytes_check.wrong(t) is None for t in others):
        return False

    def shows(trial: Trial) -> bool:
        facts = trial.case.facts
        again = facts["steps"] * all_reduce_bytes(sum(facts["tied"].values()), trial.world_size)
        if right(trial):
            # torch's broadcast counts (n−1)/n of the weights
            once = naive_bytes(trial.case)[0] - facts["bytes"] // trial.world_size
            return min(communicated(trial)) >= once + 0.9 * again
        expected = trial.case.expected[0]["gradients"][0]
        alone = {name: value for name, value in expected.items() if name not in facts["tied"]}
        return all(
            alike(found["gradients"][0], alone) and not alike(found["gradients"][0], expected)
            for found in trial.results
        )

    return all(shows(trial) for trial in tied)


def bytes_question() -> Case:
    return naive_case(Draw("question"), [2] * 4)


def all_bytes(trial: Trial) -> int:
    """Return the bytes that all ranks send, without a few extra ones such as for the counts."""
    n, facts, found = trial.world_size, trial.case.facts, sum(communicated(trial))
    least = facts["steps"] * n * all_reduce_bytes(facts["bytes"], n) + (n - 1) * facts["bytes"]
    return least if least <= found <= least + facts["steps"] * n * 64 else found


EXERCISES = [
    Exercise(
        number="10",
        function="train_naive",
        title="Naive data parallel",
        points=10,
        weights={"value": 0.5, "bytes": 0.5},
        cases=naive_cases,
        program=train,
        allowed=P2P | COLLECTIVES,
        checks=(equals_one_process(), bytes_check),
        least_received=naive_least,
        misconceptions=(
            *MESSAGES,
            not_every_rank,
            NO_FIRST_SYNCHRONISATION,
            from_another_start,
            NEVER_REDUCED,
            SUM_FOR_MEAN,
            MEAN_TWICE,
            tied_twice,
            MEAN_OF_MEANS,
            added_to_the_last,
        ),
        hints=(
            "Run the loop of one process on each rank. What must be equal on all ranks before the "
            "first step, and what before each step?",
            "Broadcast rank 0's parameters. After backward(), all-reduce each p.grad: that adds. "
            "The mean over all samples is Σ (sum of a rank's losses) / (samples of all ranks).",
            "dist.all_reduce adds. So scale each rank's loss before backward(), such that "
            "the sum of the ranks' gradients is already the right one. What must it be "
            "scaled by, if one rank has 3 samples and another 5? Take care that a tied "
            "parameter isn't added up twice.",
        ),
        questions=(
            Question(
                "total",
                "Four ranks train a model of 116 numbers of float64 for three steps. How many "
                "bytes do all ranks together send, the broadcast of the first weights included?",
                bytes_question,
                all_bytes,
                "bytes",
            ),
        ),
        picture="lanes",
    )
]
