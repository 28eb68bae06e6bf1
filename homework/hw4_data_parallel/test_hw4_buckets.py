"""Exercise 11: gradients are all-reduced in buckets."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallel101 import MisuseError, Network
from parallel101.laboratory.exercises.training_exercises import (
    SUM_FOR_MEAN,
    all_reduce_bytes,
    flat,
    scale,
)
from parallel101.laboratory.grade.compared_values import close, difference, factor, same
from parallel101.laboratory.grade.exercise import (
    COLLECTIVES,
    P2P,
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
    MESSAGES,
    all_show,
    bytes_sent,
    failed,
    not_every_rank,
    right,
    value,
    wrong_trials,
)

# the two halves of an all-reduce; any other collective is one call
CALLS = {"reduce_scatter": 0.5, "all_gather": 0.5}


def average(
    function, names: list[str], shapes: list[list[int]], values: Tensor, cap: int
) -> dict[str, Tensor]:
    """Run the function on each rank. values: all gradients, one after the other."""
    pieces = values.split([math.prod(shape) for shape in shapes])
    return function(
        {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes)}, cap
    )


def bucket_case(
    draw: Draw,
    n: int,
    shapes: list[list[int]],
    cap: int,
    dtype: torch.dtype,
    shuffled: bool,
    note: str,
) -> Case:
    names = [f"layer{number}" for number in range(len(shapes))]
    gradients = [
        {name: draw.tensor(*shape, dtype=dtype) for name, shape in zip(names, shapes)}
        for _ in range(n)
    ]
    orders = [names[-rank:] + names[:-rank] if shuffled else names for rank in range(n)]
    flats = [
        torch.cat([own[name].flatten() for name in order]) for own, order in zip(gradients, orders)
    ]
    mean = {
        name: torch.stack([own[name].double() for own in gradients]).mean(0).to(dtype)
        for name in names
    }
    item = dtype.itemsize
    sizes = {name: math.prod(shape) * item for name, shape in zip(names, shapes)}
    return Case(
        [
            (order, [shapes[names.index(name)] for name in order], flat_, cap)
            for order, flat_ in zip(orders, flats)
        ],
        [mean] * n,
        note=note,
        facts={
            "bytes": sum(sizes.values()),
            "largest": max(sizes.values()),
            "cap": cap,
            "shuffled": shuffled,
            "count": len(names),
            # two neighbours together are larger than the cap
            "buckets": math.floor(2 * sum(sizes.values()) / cap) + 1,
            "local": gradients,
            "orders": orders,
            "in own order": torch.stack(flats).double().mean(0),
        },
        network=Network(latency=1.0, bandwidth=math.inf),
    )


def bucket_cases(draw: Draw) -> list[Case]:
    mixed = [[3, 4], [2], [5, 3], [7], [4], [2, 6], [1], [3, 3], [8], [5], [2, 2], [6]]
    same = [[2, 3]] * 10
    total = 4 * sum(map(math.prod, mixed))
    return [
        bucket_case(draw, 1, mixed, total // 3, torch.float32, False, "three buckets"),
        bucket_case(
            draw, 2, mixed, total // 3, torch.float32, False, "the same order on all ranks"
        ),
        bucket_case(draw, 2, same, 150, torch.float64, True, "orders that differ"),
        bucket_case(
            draw,
            3,
            mixed,
            40,
            torch.float32,
            True,
            "orders that differ, and gradients above the cap",
        ),
        bucket_case(
            draw, 4, mixed, 10 * total, torch.float64, False, "a cap above all gradients together"
        ),
        bucket_case(draw, 4, mixed, total // 2, torch.float32, True, "orders that differ"),
    ]


def calls(trial: Trial) -> float:
    """Return the all-reduces of the busiest rank; 2(n−1) messages count as one, as in a ring."""
    n = max(trial.world_size, 2)
    count = [0.0] * trial.world_size
    for event in trial.trace.events:
        if not event.dtype.startswith("float"):
            continue  # not gradients: an order, for example
        if event.kind == "send":
            count[event.rank] += 1 / (2 * (n - 1))
        elif event.kind in COLLECTIVES:
            count[event.rank] += CALLS.get(event.kind, 1.0)
    return max(count)


def few_calls() -> Check:
    def wrong(trial: Trial) -> str | None:
        most = trial.case.facts["buckets"] + 1  # one more, to agree on an order
        found = calls(trial)
        if found > most:
            return (
                f"{found:g} all-reduces for {trial.case.facts['count']} gradients; {most - 1} "
                "buckets are enough"
            )
        return under_the_cap().wrong(trial)  # otherwise, fewer calls earn nothing

    return Check("steps", "no more all-reduces than buckets", wrong)


def largest_payload(trial: Trial) -> int:
    return max(
        (
            e.nbytes
            for e in trial.trace.events
            if e.kind in COLLECTIVES and e.dtype.startswith("float")
        ),
        default=0,
    )


def under_the_cap() -> Check:
    def wrong(trial: Trial) -> str | None:
        facts = trial.case.facts
        most, found = max(facts["cap"], facts["largest"]), largest_payload(trial)
        return (
            None if found <= most + 32 else f"a bucket has {found} bytes; the cap is {facts['cap']}"
        )

    return Check("memory", "no bucket above the cap, unless it holds one gradient", wrong)


@mistake(
    "order that differs between ranks",
    "Each rank fills its buckets in its own order. An all-reduce adds what is at the same place, "
    "so different gradients are added to each other, or buckets of different sizes meet.",
)
def own_order(trials: Sequence[Trial]) -> bool:
    """Check whether results are wrong only if the ranks' orders differ.

    Then buckets of different sizes meet, or different gradients are added.
    """
    several = [trial for trial in trials if trial.world_size > 1]
    wrong = [trial for trial in several if not right(trial)]
    if not wrong or not all(trial.case.facts["shuffled"] for trial in wrong):
        return False

    def in_own_order(trial: Trial) -> bool:
        mean = trial.case.facts["in own order"]
        pairs = list(zip(trial.results, trial.case.facts["orders"]))
        if not all(
            isinstance(found, dict) and all(isinstance(found.get(name), Tensor) for name in order)
            for found, order in pairs
        ):
            return False
        return all(close(flat(found, order).double(), mean, 1e-5) for found, order in pairs)

    return any(
        isinstance(trial.error, MisuseError) or (trial.error is None and in_own_order(trial))
        for trial in wrong
    )


@mistake(
    "last bucket never flushed",
    "A bucket is all-reduced when the next gradient no longer fits. After the last gradient "
    "nothing follows, so the last bucket is never all-reduced.",
)
def never_flushed(trials: Sequence[Trial]) -> bool:
    """Check whether some gradients are right, and the others are the rank's own, perhaps scaled."""
    wrong = [
        trial
        for trial in failed(trials)
        if trial.error is None and trial.world_size > 1 and not trial.case.facts["shuffled"]
    ]
    if not wrong:
        return False

    def state(trial: Trial, rank: int, name: str) -> str:
        found = trial.results[rank].get(name) if isinstance(trial.results[rank], dict) else None
        expected, own = trial.case.expected[rank][name], trial.case.facts["local"][rank][name]
        if found is None:
            return "missing"
        if difference(found, expected) is None:
            return "right"
        return "own" if same(found, own) or factor(found, own) is not None else "other"

    states = [
        {state(trial, rank, name) for name in trial.case.expected[rank]}
        for trial in wrong
        for rank in range(trial.world_size)
    ]
    return all(found <= {"right", "own", "missing"} for found in states) and any(
        "right" in found and found & {"own", "missing"} for found in states
    )


def dict_times_n(trials: Sequence[Trial]) -> bool:

    def is_so(trial: Trial, found: Any, expected: Any) -> bool:
        k = scale(found, expected) if isinstance(found, dict) else None
        return k is not None and abs(k / trial.world_size - 1) < 1e-4

    wrong = [trial for trial in wrong_trials(trials) if not trial.case.facts["shuffled"]]
    return all_show(((t, *pair) for t in wrong for pair in zip(t.results, t.case.expected)), is_so)


BUCKETS_SUMMED = replace(SUM_FOR_MEAN, seen=dict_times_n)
ABOVE_THE_CAP = Misconception(
    "bucket above its cap",
    "A bucket holds more than the cap: it is closed when the gradient that no longer fits is "
    "already in it, or never before the end.",
    lambda trials: (
        all(map(right, trials))
        and any(
            t.case.facts["largest"] < t.case.facts["cap"] < largest_payload(t) - 32 for t in trials
        )
    ),
)
ONE_BY_ONE = Misconception(
    "one all-reduce for each gradient",
    "Every gradient has an all-reduce of its own, so every gradient pays the latency.",
    lambda trials: (
        all(map(right, trials))
        and all(calls(t) >= t.case.facts["count"] for t in trials if t.world_size > 1)
    ),
)


EXERCISES = [
    Exercise(
        number="11",
        function="average_in_buckets",
        title="Buckets",
        points=10,
        weights={"value": 0.3, "bytes": 0.1, "steps": 0.5, "memory": 0.1},
        cases=bucket_cases,
        program=average,
        allowed=P2P | COLLECTIVES,
        checks=(
            value("every gradient is the mean over the ranks"),
            bytes_sent(
                lambda case: (
                    [all_reduce_bytes(case.facts["bytes"], case.world_size)] * case.world_size
                ),
                "2(n−1)/n of the gradients' bytes",
                lambda case: 256 + case.facts["buckets"] * 16 * case.world_size,
            ),
            few_calls(),
            under_the_cap(),
        ),
        least_received=lambda case: (
            [case.facts["bytes"] - 64 if case.world_size > 1 else 0] * case.world_size
        ),
        misconceptions=(
            *MESSAGES,
            not_every_rank,
            never_flushed,
            BUCKETS_SUMMED,
            own_order,
            ONE_BY_ONE,
            ABOVE_THE_CAP,
        ),
        hints=(
            "Which order do all ranks know without asking each other?",
            "Go through the sorted names. Keep a list of the names in the open bucket, and its "
            "bytes. If the next gradient doesn't fit, all-reduce the bucket and open a new one. "
            "What is still open at the end?",
            "torch.cat joins the flattened gradients of a bucket, split cuts the sum "
            "apart again, and view_as gives each piece its shape. All of that happens in "
            "two places: where a bucket is full, and in one more.",
        ),
        questions=(
            Question(
                "calls",
                "Ten gradients of 48 bytes each, and a cap of 150 bytes: how many all-reduces?",
                lambda: bucket_case(
                    Draw("question"),
                    2,
                    [[2, 3]] * 10,
                    150,
                    torch.float64,
                    True,
                    "ten gradients of 48 bytes, cap 150",
                ),
                calls,
                "all-reduces",
            ),
        ),
        picture="lanes",
    )
]
