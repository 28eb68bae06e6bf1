"""Exercise 8e: choose the algorithm of a broadcast for a size and a network.

The function sends nothing: the broadcast that it chooses is run after it, and timed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel101 import Network, collectives
from parallel101.cost import best_segments, closed_form
from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    Case,
    Check,
    Draw,
    Exercise,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import value
from parallel101.laboratory.record.units import decimal_bytes, human_seconds

NAMES = ("binomial", "scatter_all_gather", "pipelined_chain")
MORE = 0.05  # of the best time


def broadcast_as_chosen(
    function: Callable[..., Any], x: torch.Tensor, latency: float, bandwidth: float
) -> list[Any]:
    """Run on each rank the broadcast that the function chooses.

    Return the choice, the result and the choices for other links.
    """
    name, segments = function(dist.get_world_size(), x.nbytes, latency, bandwidth)
    if name not in NAMES:
        raise ValueError(f"{name!r} is not an algorithm: expected one of {', '.join(NAMES)}")
    others = chosen_elsewhere(function, x.nbytes) if dist.get_rank() == 0 else []
    if name != "pipelined_chain":
        return [name, 1, collectives.broadcast(x, algorithm=name), others]
    if isinstance(segments, bool) or segments < 1 or segments != int(segments):
        raise ValueError(f"{segments!r} segments: expected a whole number of 1 or more")
    segments = min(int(segments), x.numel())
    size = -(-x.nbytes // (segments * x.element_size())) * x.element_size()
    return [name, segments, collectives.broadcast(x, algorithm=name, segment_bytes=size), others]


def chosen_elsewhere(function: Callable[..., Any], nbytes: int) -> list[str]:
    """Return the function's choices for as many bytes on other numbers of ranks and other links."""
    try:
        return [
            str(function(n, nbytes, latency, bandwidth)[0])
            for n in (3, 8, 64)
            for latency in (1e-8, 1e-5, 1e-2)
            for bandwidth in (1e6, 1e9, 1e12)
        ]
    except Exception:  # it isn't graded for these
        return []


def choice_case(x: torch.Tensor, n: int, latency: float, bandwidth: float) -> Case:
    xs = [x] + [torch.zeros_like(x)] * (n - 1)
    return Case(
        [(mine, latency, bandwidth) for mine in xs],
        [[ANYTHING, ANYTHING, x, ANYTHING]] * n,
        f"{decimal_bytes(x.nbytes)}, {human_seconds(latency)}, {decimal_bytes(bandwidth)}/s",
        facts={"n": n, "nbytes": x.nbytes, "latency": latency, "bandwidth": bandwidth},
        network=Network(latency, bandwidth),
    )


def choice_cases(draw: Draw) -> list[Case]:
    """Return sizes for three kinds of links, far from those at which two algorithms tie."""
    nearby, ethernet, far = (2e-6, 2e9), (2e-5, 1.25e9), (5e-4, 1e8)
    cases = [
        (2, 240, ethernet),
        (3, 240, ethernet),
        (3, 240_000, nearby),
        (4, 24_000, far),
        (4, 320_000, ethernet),
        (8, 4_800, nearby),
        (8, 48_000, nearby),
        (8, 48_000, far),
        (8, 480_000, nearby),
        (8, 480_000, ethernet),
    ]
    return [
        choice_case(draw.tensor(nbytes // 4 // n * n + n * draw.integer(0, 2)), n, *links)
        for n, nbytes, links in cases
    ]


# ---- times ----


def time_of(name: str, m: int, n: int, nbytes: int, latency: float, bandwidth: float) -> float:
    """Return the seconds that a choice takes on links with this latency and bandwidth."""
    size = -(-nbytes // (4 * m)) * 4 if name == "pipelined_chain" else None
    return closed_form("broadcast", name, n, nbytes, segment_bytes=size).seconds(latency, bandwidth)


def times(n: int, nbytes: int, latency: float, bandwidth: float) -> dict[str, float]:
    """Return the seconds of each algorithm; the chain has its best number of segments."""
    m = best_segments(n, nbytes, latency, bandwidth)
    return {name: time_of(name, m, n, nbytes, latency, bandwidth) for name in NAMES}


def fastest(n: int, nbytes: int, latency: float, bandwidth: float) -> str:
    found = times(n, nbytes, latency, bandwidth)
    return min(found, key=lambda name: found[name])


def too_slow(trial: Trial) -> str | None:
    best = min(times(**trial.case.facts).values())
    took = trial.trace.makespan
    if took <= (1 + MORE) * best:
        return None
    name, segments, *_ = trial.results[0]
    chosen = f"{name} in {segments} segments" if name == "pipelined_chain" else name
    return f"{chosen} took {1e6 * took:.1f} µs; {1e6 * best:.1f} µs are enough"


# ---- misconceptions ----


def chosen(trials: Sequence[Trial]) -> list[tuple[str, int, dict[str, Any]]]:
    """Return the name, the segments and the facts of each trial on three ranks or more."""
    return [
        (trial.results[0][0], trial.results[0][1], trial.case.facts)
        for trial in trials
        if trial.error is None and trial.world_size > 2
    ]


@mistake(
    "always the same algorithm",
    "The same algorithm is chosen for every size and every network. None is always best.",
)
def always_the_same(trials: Sequence[Trial]) -> bool:
    choices = chosen(trials)
    return len(choices) > 2 and len({name for name, _, _ in choices}) == 1


@mistake(
    "chosen by size alone",
    "The choice depends on the number of bytes only. From which size on an algorithm is best "
    "also depends on n and on latency · bandwidth.",
)
def by_size_alone(trials: Sequence[Trial]) -> bool:
    """Check whether the name depends on the bytes, but not on the ranks or links."""
    names = {name for name, _, _ in chosen(trials)}
    return len(names) > 1 and all(
        set(trial.results[0][3]) == {trial.results[0][0]}
        for trial in trials
        if trial.error is None and trial.world_size > 2
    )


@mistake(
    "bits taken for bytes",
    "The choices are right for links that are eight times as slow, or as fast: a byte has "
    "eight bits, and the bandwidth here is in bytes per second.",
)
def bits_for_bytes(trials: Sequence[Trial]) -> bool:
    """Check whether each choice would be right with 1/8 of the bandwidth, or with 8 times."""
    choices = chosen(trials)

    def right_for(times_bandwidth: float) -> bool:
        return bool(choices) and all(
            name == fastest(**facts | {"bandwidth": times_bandwidth * facts["bandwidth"]})
            for name, _, facts in choices
        )

    return not right_for(1.0) and (right_for(1 / 8) or right_for(8.0))


@mistake(
    "number of segments",
    "The algorithms are well chosen, but a chain has too few segments or too many: the best "
    "number depends on n, the size and the links.",
)
def other_segments(trials: Sequence[Trial]) -> bool:
    """Check whether every name is right, but some chain has too few or too many segments."""
    choices = chosen(trials)
    return (
        bool(choices)
        and all(
            times(**facts)[name] <= (1 + MORE) * min(times(**facts).values())
            for name, _, facts in choices
        )
        and any(
            name == "pipelined_chain"
            and time_of(name, m, **facts) > (1 + MORE) * min(times(**facts).values())
            for name, m, facts in choices
        )
    )


QUESTION = lambda: choice_case(torch.ones(2_000), 8, 2e-5, 1.25e9)  # noqa: E731
CHOOSE_BROADCAST = Exercise(
    number="8e",
    function="choose_broadcast",
    title="The fastest broadcast for a size and a network",
    points=10,
    weights={"value": 0.2, "steps": 0.8},
    cases=choice_cases,
    checks=(
        value("every rank gets the root's x"),
        Check("steps", "it takes at most 5 % longer than the best choice", too_slow),
    ),
    least_received=lambda case: [0] + [case.facts["nbytes"]] * (case.world_size - 1),
    misconceptions=(always_the_same, bits_for_bytes, other_segments, by_size_alone),
    hints=(
        "What does each of the three cost: how many times the latency, and how many bytes over one "
        "link? You can write down all three from lesson 02's table.",
        "Two of them have a fixed cost, steps · latency + bytes / bandwidth. The time of the chain "
        "depends on m: first find the best m, as in lesson 02.",
        "With m segments, the chain takes (n − 2 + m) · (latency + nbytes / m / "
        "bandwidth). Multiply it out: one term grows with m, another shrinks. For "
        "which m is their sum least? m must be a whole number.",
    ),
    questions=(
        Question(
            "microseconds",
            "8 ranks, 8,000 bytes, a latency of 20 µs and 1.25 GB/s: how many microseconds does "
            "your choice take?",
            QUESTION,
            lambda trial: round(1e6 * trial.trace.makespan),
            "µs",
        ),
    ),
    program=broadcast_as_chosen,
    watch=lambda: choice_case(origin_tensor(0, 5, 10), 5, 1e-6, 1e8),
)


EXERCISES = [CHOOSE_BROADCAST]
