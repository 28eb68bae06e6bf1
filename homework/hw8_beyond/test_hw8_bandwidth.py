"""Exercise 24a: the bus bandwidth of a collective, as nccl-tests defines it.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

On the virtual clock, a collective takes as long as a ring with links of a known bandwidth. So the
right answer is known: it is that bandwidth, whatever the collective and the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel101 import Network
from parallel101.laboratory.exercises.training_exercises import clock_seconds
from parallel101.laboratory.exercises.wrong_values import every
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
from parallel101.laboratory.grade.exercise_checks import MESSAGES, RING_FACTOR, ended, on_ranks
from parallel101.spans import compute, span

LAUNCH, SET_UP = 1e-9, 5e-3  # seconds of each call, and of the first one
SHARDS = ("all_gather", "reduce_scatter", "all_to_all")
KINDS = ("all_reduce", *SHARDS, "broadcast", "reduce")
TOLERANCE = 0.01


def operation(kind: str, given: Tensor, result: Tensor) -> Callable[[], Any]:
    """Starts one collective."""
    n = dist.get_world_size()
    if kind == "all_reduce":
        return lambda: dist.all_reduce(given, async_op=True)
    if kind == "all_gather":
        return lambda: dist.all_gather(list(result.chunk(n)), given, async_op=True)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter(result, list(given.chunk(n)), async_op=True)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(result, given, async_op=True)
    if kind == "broadcast":
        return lambda: dist.broadcast(given, 0, async_op=True)
    return lambda: dist.reduce(given, 0, async_op=True)


def measure(function, kind: str, given: Tensor, result_numel: int, repeats: int) -> Any:
    """What each rank runs. The ranks begin at different times."""
    in_place = kind in ("all_reduce", "broadcast", "reduce")
    result = given if in_place else given.new_empty(result_numel)
    post = operation(kind, given, result)
    calls: list[None] = []

    def start() -> Any:
        with span("launch" if calls else "set up"):
            compute(LAUNCH if calls else SET_UP)
        calls.append(None)
        return post()

    compute(1e-3 * dist.get_rank())
    found = function(kind, start, given, result, clock_seconds, repeats)
    return float(found) if isinstance(found, int | float | Tensor) else found


def bandwidth_case(
    draw: Draw, n: int, kind: str, bandwidth: float, numel: int = 0, repeats: int = 0
) -> Case:
    each = numel or draw.integer(800, 1200)  # of one rank's shard
    repeats = repeats or draw.integer(3, 6)
    whole = n * each
    given, result = {"all_gather": (each, whole), "reduce_scatter": (whole, each)}.get(
        kind, (whole, whole)
    )
    nbytes = 4 * whole
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(kind, (n - 1) / n)
    return Case(
        [(kind, draw.tensor(given), result, repeats) for _ in range(n)],
        [bandwidth] * n,
        note=f"{kind}, links of {bandwidth / 1e6:g} MB/s",
        facts={
            "kind": kind,
            "nbytes": nbytes,
            "factor": factor,
            "bandwidth": bandwidth,
            "repeats": repeats,
            "seconds": factor * nbytes / bandwidth,
        },
        network=Network(latency=0.0, bandwidth=bandwidth),
    )


def cases(draw: Draw) -> list[Case]:
    runs = [(2, "all_gather"), *((n, kind) for n in (3, 4) for kind in reversed(KINDS))]
    return [bandwidth_case(draw, n, kind, 1e6 * draw.integer(10, 50)) for n, kind in runs]


def least(case: Case) -> list[int]:
    n, facts = case.world_size, case.facts
    each = facts["nbytes"] * RING_FACTOR[facts["kind"]] * (n - 1) / n
    return [round(facts["repeats"] * each) - 64] * n


# ---- checks ----


def is_real(trial: Trial) -> bool:
    """Whether the clock was a real one: then the right answer isn't known."""
    return trial.world not in ("relay", "sim")


def ratio(trial: Trial, rank: int = 0) -> float:
    """What a rank returned, relative to the links' bandwidth."""
    found = trial.results[rank]
    return found / trial.case.facts["bandwidth"] if isinstance(found, float) else math.nan


def about(found: float, expected: float) -> bool:
    return abs(found - expected) <= TOLERANCE * abs(expected)


def measures(kinds: Sequence[str], says: str) -> Check:
    def wrong(trial: Trial) -> str | None:
        for rank, found in enumerate(trial.results if trial.case.facts["kind"] in kinds else ()):
            if not isinstance(found, float) or not math.isfinite(found) or found <= 0:
                return f"rank {rank} returned {found!r}; expected bytes per second"
            if not is_real(trial) and not about(ratio(trial, rank), 1):
                return (
                    f"rank {rank} measured {found / 1e6:.4g} MB/s, but the links carry "
                    f"{trial.case.facts['bandwidth'] / 1e6:g} MB/s"
                )
        return None

    return Check("value", says, wrong)


# ---- misconceptions ----


def wrong_ones(trials: Sequence[Trial]) -> list[Trial]:
    return [
        t for t in ended(trials, 2) if not all(about(ratio(t, r), 1) for r in range(t.world_size))
    ]


def shows(
    expected: Callable[[Trial], float], kinds: Sequence[str] = KINDS
) -> Callable[[Sequence[Trial]], bool]:
    """Whether every wrong run is of these kinds, and its result so many times the right one."""
    return every(lambda trials: on_ranks(wrong_ones(trials)))(
        lambda trial, rank: (
            trial.case.facts["kind"] in kinds and about(ratio(trial, rank), expected(trial))
        )
    )


@mistake(
    "clock read before the work is done",
    "The time is that of starting the collectives. A call that returns a work has not moved a "
    "byte yet: the clock counts once the work is done.",
)
@every(lambda trials: on_ranks(ended(trials, 2)))
def early(trial: Trial, rank: int) -> bool:
    """In every run, the time is that of the launches."""
    facts, found = trial.case.facts, trial.results[rank]
    finite = isinstance(found, float) and math.isfinite(found)
    return finite and 0 < facts["nbytes"] * facts["factor"] / found <= 3 * LAUNCH


@mistake(
    "first call counted",
    "The first call sets up the connections, and its time is counted. Training pays that "
    "once, so it says nothing about the links.",
)
@every(lambda trials: on_ranks(ended(trials, 2)))
def first_call_counts(trial: Trial, rank: int) -> bool:
    """The time of a call is too long by the set-up, shared by one call more or less."""
    facts = trial.case.facts
    more = facts["seconds"] / ratio(trial, rank) - facts["seconds"]
    wait = 1e-3 * trial.world_size  # for ranks that begin later
    most = 1.01 * (SET_UP + wait) + facts["seconds"]
    return (facts["repeats"] + 1) * more >= SET_UP and facts["repeats"] * more <= most


def all_reduce_factor(trial: Trial) -> float:
    n = trial.world_size
    return 2 * (n - 1) / n / trial.case.facts["factor"]


EXERCISES = [
    Exercise(
        number="24a",
        function="bus_bandwidth",
        title="Bus bandwidth",
        points=4,
        cases=cases,
        program=measure,
        allowed=P2P | COLLECTIVES,
        checks=(
            measures(("all_reduce",), "the bus bandwidth of an all-reduce"),
            measures(SHARDS, "of all-gather, reduce-scatter and all-to-all"),
            measures(("broadcast", "reduce"), "of broadcast and reduce"),
        ),
        least_received=least,
        misconceptions=(
            early,
            *MESSAGES,
            Misconception(
                "bits for bytes",
                "The result is in bits per second. Links and nccl-tests give bytes per second.",
                shows(lambda t: 8.0),
            ),
            Misconception(
                "all-reduce with the factor of a reduce-scatter",
                "(n − 1)/n is what a rank sends in a reduce-scatter. In an all-reduce, an "
                "all-gather follows, which sends as much again.",
                lambda trials: (
                    shows(lambda t: 0.5, ("all_reduce",))(trials)
                    or shows(lambda t: (1 - 1 / t.world_size) / t.case.facts["factor"])(trials)
                ),
            ),
            first_call_counts,
            Misconception(
                "factor n too small",
                "For a collective with shards, S was taken to be one rank's shard. In the "
                "formulas, S is the whole array: the larger one of input and output.",
                shows(lambda t: 1 / t.world_size, ("all_gather", "reduce_scatter")),
            ),
            Misconception(
                "factor n too large",
                "S was multiplied by n, although the tensor is the whole array already. Only "
                "a shard has to be multiplied.",
                shows(lambda t: t.world_size),
            ),
            Misconception(
                "algorithm bandwidth",
                "S / t is the algorithm bandwidth. It depends on the collective and on n, so "
                "it can't be compared with the links.",
                shows(lambda t: 1 / t.case.facts["factor"]),
            ),
            Misconception(
                "one factor for all collectives",
                "Every collective got the factor of an all-reduce. The others move less data "
                "over each link for the same S.",
                shows(all_reduce_factor),
            ),
            Misconception(
                "repeats not divided",
                "The time is that of all repeats together, but S is the size of one call.",
                shows(lambda t: 1 / t.case.facts["repeats"]),
            ),
        ),
        hints=(
            "When does the clock start, and when may it stop? And how many bytes must cross the "
            "busiest link for an array of S bytes?",
            "Call start().wait() once before the clock starts. S is max(given.nbytes, "
            "result.nbytes). The factors are in NVIDIA's nccl-tests, doc/PERFORMANCE.md.",
            "In an all-reduce, a rank of the ring sends 2(n − 1)/n of S, so that is its factor. "
            "Work out those of the others in the same way. For two of them, n doesn't matter. Each "
            "of the repeats must be waited for before the clock stops.",
        ),
        questions=(
            Question(
                "algorithm",
                "4 ranks all-reduce an array over links of 30 MB/s. How many MB/s is S / t, "
                "the algorithm bandwidth?",
                lambda: bandwidth_case(Draw("question"), 4, "all_reduce", 3e7, 1000, 4),
                lambda trial: round(trial.results[0] / trial.case.facts["factor"] / 1e6),
                "MB/s",
            ),
        ),
        picture="lanes",
    )
]
