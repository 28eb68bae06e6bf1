"""Shared code of exercises on pipelines: a model cut into stages, and usual mistakes.

The stages' work takes slots on the virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel101.laboratory.exercises.training_exercises import backward_takes
from parallel101.laboratory.exercises.wrong_values import gives
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    Case,
    Check,
    Draw,
    Misconception,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import all_show, at_most, failed, received
from parallel101.laboratory.record.events import Event
from parallel101.laboratory.sim.network import Network
from parallel101.spans import compute, span

# messages take no time, so a run takes as many seconds as it has slots
FREE = Network(latency=0.0, bandwidth=math.inf)
WIDTH, ROWS = 3, 2  # features, and samples in a microbatch
LEARNING_RATE = 0.5


def stage_of(seed: int, number: int) -> nn.Sequential:
    """Return stage `number` of the model with this seed: the same weights wherever it is made."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return nn.Sequential(linear, nn.Tanh())


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def one_process(
    seed: int, stages: int, inputs: list[Tensor], targets: list[Tensor]
) -> tuple[Tensor, list[list[Any]]]:
    """Return the microbatches' mean loss and each stage's gradients, computed in one process."""
    model = nn.Sequential(*(stage_of(seed, number) for number in range(stages)))
    pairs = zip(inputs, targets, strict=True)
    loss = torch.stack([mean_square(model(x), target) for x, target in pairs]).mean()
    loss.backward()
    return loss.detach(), [[p.grad for p in part.parameters()] for part in model]


class InSlots(nn.Module):
    """A stage whose forwards and backwards take one slot each on the virtual clock.

    The record has a span for each.
    """

    def __init__(self, inner: nn.Module, number: int):
        super().__init__()
        self.inner, self.number, self.calls = inner, number, 0

    def forward(self, x: Tensor) -> Tensor:
        i, self.calls = self.calls, self.calls + 1
        with span("forward", stage=self.number, microbatch=i):
            compute(1.0)
            y = self.inner(x)
        return backward_takes(1.0, y, stage=self.number, microbatch=i)


def run_step(
    step: Callable[..., Any], seed: int, inputs: Any, targets: Any, microbatches: int
) -> list[Any]:
    """Run one step on this rank, and return the loss and the gradients of its stage."""
    rank = dist.get_rank()
    stage = InSlots(stage_of(seed, rank), rank)
    loss = step(stage, inputs, targets, mean_square, (ROWS, WIDTH), microbatches)
    return [loss, [p.grad for p in stage.parameters()]]


def make_case(draw: Draw, p: int, m: int, chunks: int | None = None, split: bool = False) -> Case:
    seed, stages = draw.integer(1, 900), p * (chunks or 1)
    xs, targets = (draw.tensors(m, ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
    loss, gradients = one_process(seed, stages, xs, targets)
    _, last = one_process(seed, stages, xs[-1:], targets[-1:])

    def expected(rank: int) -> list[Any]:
        end = loss if rank == p - 1 else None
        if chunks is not None:
            return [ANYTHING, end, gradients[rank::p]]
        if split:
            pairs = zip(stage_of(seed, rank).parameters(), gradients[rank])
            return [end, [w.detach() - LEARNING_RATE * g for w, g in pairs]]
        return [end, gradients[rank]]

    note = f"{m} microbatch{'es' * (m != 1)}"
    if chunks is not None:
        note += f", {chunks} chunk{'s' * (chunks != 1)}"
    return Case(
        [
            (seed, xs if rank == 0 else None, targets if rank == p - 1 else None, m)
            + (() if chunks is None else (chunks,))
            for rank in range(p)
        ],
        [expected(rank) for rank in range(p)],
        note,
        {
            "p": p,
            "m": m,
            "chunks": chunks or 1,
            "added": [[[m * g for g in own] for own in gradients]],
            "last": [last, [[g / m for g in own] for own in last]],
            "activation": xs[0].nbytes,
        },
        FREE,
    )


def step_cases(draw: Draw) -> list[Case]:
    return [make_case(draw, p, m) for p, m in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 2), (4, 6))]


def example(maker: Callable[..., Case], *size: Any, **kind: Any) -> Callable[[], Case]:
    return lambda: maker(Draw("example"), *size, **kind)


def messages_of(case: Case) -> list[int]:
    """Return the bytes that each rank must send.

    For each microbatch, these are an activation to the next stage and a gradient to the one before.
    """
    p, each = case.facts["p"], case.facts["m"] * case.facts["activation"]
    return [each * ((rank < p - 1) + (rank > 0)) for rank in range(p)]


def in_flight(trial: Trial) -> list[int]:
    """Return, by rank, the most microbatches (of each stage) that it held at once.

    A rank holds a microbatch from the start of its forward to the end of its last gradient.
    """
    peak = []
    for rank in range(trial.world_size):
        changes = [
            (event.start, 1) if event.name == "forward" else (event.end, -1)
            for event in forwards_and_last_halves(trial, rank)
        ]
        peak.append(max(accumulate(change for _, change in sorted(changes)), default=0))
    return peak


def forwards_and_last_halves(trial: Trial, rank: int) -> list[Event]:
    """Return a rank's forwards, and its backwards or what comes last if they are split."""
    last_half = "weight gradient" if trial.trace.spans("weight gradient") else "backward"
    return [
        event
        for event in trial.trace.spans()
        if event.rank == rank and event.name in ("forward", last_half)
    ]


def holds_at_most(
    limit: Callable[[Case, int], int],
    says: str,
    in_slots: Callable[[Case], float] = lambda case: math.inf,
) -> Check:
    """Return a check that no rank holds more than `limit`, in a run of at most `in_slots` slots.

    Holding few microbatches is easy if they go one after the other.
    """
    held = at_most(
        "memory",
        says,
        in_flight,
        lambda case: [limit(case, rank) for rank in range(case.world_size)],
        "rank {rank} held {found} microbatches at once; {most} are enough",
    )
    text = "few are held, but the step took {found:g} slots; it counts with {most:g}"
    took = at_most("memory", says, slots_of, in_slots, text, lambda case: 1e-9)
    return replace(held, wrong=lambda trial: held.wrong(trial) or took.wrong(trial))


def slots(expected: Callable[[Case], float], says: str) -> Check:
    text = "took {found:g} slots; {most:g} are enough"
    return at_most("steps", says, slots_of, expected, text, lambda case: 1e-9)


def slots_of(trial: Trial) -> float:
    return trial.trace.makespan


def two_halves(case: Case) -> float:
    return 2 * (case.facts["m"] + case.facts["p"] - 1)


def detached(trial: Trial) -> bool:
    """Return whether only stages before the last lack gradients, or can't send x.grad."""
    if trial.error is not None:
        failed_at = getattr(trial.error, "rank", 0)
        went_backward = any(span.rank == failed_at for span in trial.trace.spans("backward"))
        return failed_at > 0 and went_backward and "NoneType" in str(trial.error)
    without = [all(g is None or not g.any() for g in grads) for *_, grads in trial.results]
    return any(without[:-1]) and not without[-1] and all(received(trial)[1:])


@mistake(
    "no pipelining",
    "Each microbatch goes all the way forward and back before the next one begins. At any "
    "time, one rank computes and all others wait.",
)
def one_at_a_time(trials: Sequence[Trial]) -> bool:
    """Return whether rank 0 never has two microbatches in flight.

    All runs must be right; those with one rank or one microbatch say nothing.
    """

    def overlap(trial: Trial) -> bool:
        under_way: dict[Any, list[float]] = {}
        for event in forwards_and_last_halves(trial, 0):
            own = under_way.setdefault((event.args or {}).get("microbatch"), [])
            own += [event.start, event.end]
        order = sorted((min(own), max(own)) for own in under_way.values())
        return any(start < end for (_, end), (start, _) in zip(order, order[1:]))

    found = [trial for trial in trials if trial.world_size > 1 and trial.case.facts["m"] > 1]
    return not failed(trials) and all_show(found, lambda trial: not overlap(trial))


NO_AVERAGE = Misconception(
    "no 1/M",
    "The gradients are M times too large: the losses of the microbatches were added, and the "
    "loss of the batch is their mean.",
    gives("added", -1),
)
LAST_ONLY = Misconception(
    "only the last microbatch's gradient",
    "The gradients are those of the last microbatch alone. The gradients of the other "
    "microbatches were lost.",
    gives("last", -1),
)
DETACHED = Misconception(
    "graph detached",
    "Earlier stages get no gradient: the backward ends at the tensor that was received, and "
    "nothing goes back to the stage before.",
    lambda trials: all_show((t for t in failed(trials) if t.world_size > 1), detached),
)
HELD = Question(
    "held",
    "P = 4 stages, M = 6 microbatches: how many microbatches does rank 0 hold at once?",
    example(make_case, 4, 6),
    lambda trial: in_flight(trial)[0],
    "microbatches",
)
SLOTS = Question(
    "slots",
    "P = 4 stages, M = 6 microbatches: how many slots does the step take?",
    example(make_case, 4, 6),
    slots_of,
    "slots",
)
