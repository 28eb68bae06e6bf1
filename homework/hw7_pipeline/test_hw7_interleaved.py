"""Exercise 20a: interleaved 1F1B, the order of work of a rank that has several stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel101 import DeadlockError, compute, span
from parallel101.grade.exercise import (
    AUTOGRAD,
    Case,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
)
from parallel101.grade.exercise_checks import failed, value
from parallel101.grade.pipeline_exercises import (
    ROWS,
    WIDTH,
    example,
    holds_at_most,
    in_flight,
    make_case,
    mean_square,
    slots,
    stage_of,
)


def run_order(
    order: Callable[..., list[str]],
    seed: int,
    inputs: Any,
    targets: Any,
    microbatches: int,
    chunks: int,
) -> list[Any]:
    """Run the order of work that the learner's function gives for this rank.

    Returns the order, the loss and the gradients by stage.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    actions = order(rank, n, microbatches, chunks)
    last = n * chunks - 1
    stages = {number: stage_of(seed, number) for number in range(rank, n * chunks, n)}
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    sends, losses = [], []

    def receive(stage: int, tag: int) -> Tensor:
        tensor = torch.empty(ROWS, WIDTH, dtype=torch.float64)
        dist.recv(tensor, stage % n, tag=tag) if stage % n != rank else tensor.copy_(local.pop(tag))
        return tensor

    def send(tensor: Tensor, stage: int, tag: int) -> None:
        if stage % n != rank:
            sends.append((dist.isend(tensor, stage % n, tag=tag), tensor))
        else:
            local[tag] = tensor

    local: dict[int, Tensor] = {}
    for text in actions:
        number, kind, i = _parsed(text)
        if number not in stages:
            raise ValueError(
                f"rank {rank} is told {text}, but stage {number} is on rank {number % n} (stage s "
                f"is on rank s mod {n})"
            )
        if kind == "B" and (number, i) not in held:
            raise ValueError(
                f"rank {rank} is told {text} before {number}F{i}: the backward of a microbatch "
                "comes after its forward"
            )
        if kind == "F":
            x = (
                inputs[i]
                if number == 0
                else receive(number - 1, 1000 * (number - 1) + i).requires_grad_()
            )
            with span("forward", stage=number, microbatch=i):
                compute(1.0 / chunks)
                y = stages[number](x)
            if number == last:
                y = mean_square(y, targets[i]) / microbatches
                losses.append(y.detach())
            else:
                send(y.detach(), number + 1, 1000 * number + i)
            held[number, i] = x, y
        else:
            dy = None if number == last else receive(number + 1, 100_000 + 1000 * (number + 1) + i)
            x, y = held.pop((number, i))
            with span("backward", stage=number, microbatch=i):
                compute(1.0 / chunks)
                y.backward(dy)
            if number:
                send(x.grad, number - 1, 100_000 + 1000 * number + i)
    for work, _ in sends:
        work.wait()
    return [
        actions,
        sum(losses) if losses else None,
        [[p.grad for p in stage.parameters()] for stage in stages.values()],
    ]


def _parsed(text: str) -> tuple[int, str, int]:
    """ "4F1" as (4, "F", 1)."""
    for kind in "FB":
        stage, found, i = str(text).partition(kind)
        if found and stage.isdigit() and i.isdigit():
            return int(stage), kind, int(i)
    raise ValueError(f"{text!r} is not an action: expected, for example, '4F1' or '4B1'")


def order_cases(draw: Draw) -> list[Case]:
    return [
        make_case(draw, p, m, chunks)
        for p, m, chunks in ((1, 2, 2), (2, 4, 1), (2, 2, 2), (2, 4, 3), (3, 6, 2), (4, 8, 2))
    ]


def messages_between_chunks(case: Case) -> list[int]:
    p, chunks, each = (
        case.facts["p"],
        case.facts["chunks"],
        case.facts["m"] * case.facts["activation"],
    )
    if p == 1:
        return [0]
    return [
        each * sum((s < p * chunks - 1) + (s > 0) for s in range(rank, p * chunks, p))
        for rank in range(p)
    ]


def interleaved_slots(case: Case) -> float:
    p, m, v = case.facts["p"], case.facts["m"], case.facts["chunks"]
    return 2 * m + 2 * (p - 1) / v


def interleaved_peak(case: Case, rank: int) -> int:
    p, m, v = case.facts["p"], case.facts["m"], case.facts["chunks"]
    return min(m * v, (v - 1) * p + 2 * (p - rank - 1) + 1 if v > 1 else p - rank)


def _chunk_map(trials: Sequence[Trial]) -> bool:
    wrong = [t.error for t in trials if t.error is not None]
    return bool(wrong) and all("stage s is on rank s mod" in str(error) for error in wrong)


CHUNK_MAP = Misconception(
    "wrong chunk map",
    "A rank's order has stages of other ranks, such as the neighbours of its first. Stage s is on "
    "rank s mod P: the stages of a rank are P apart.",
    _chunk_map,
)
ALL_FORWARDS = Misconception(
    "GPipe with a new name",
    (
        "Every rank does all its forwards before its first backward. The bubble is as short, but "
        "the activations of all microbatches are held."
    ),
    lambda trials: (
        not failed(trials)
        and all(max(in_flight(t)) == t.case.facts["m"] * t.case.facts["chunks"] for t in trials)
    ),
)


def _warm_up_of_one_chunk(trials: Sequence[Trial]) -> bool:
    """It waits forever as soon as a rank has several chunks, and only then."""
    stuck = {
        t.case.facts["chunks"] > 1
        for t in trials
        if isinstance(t.error, DeadlockError) or "comes after its forward" in str(t.error)
    }
    return stuck == {True} and not any(t.error for t in trials if t.case.facts["chunks"] == 1)


SHORT_WARM_UP = Misconception(
    "warm-up of one chunk",
    "The warm-up is that of plain 1F1B. With several chunks a backward is then due before the "
    "forward through the later chunks: the ranks wait.",
    _warm_up_of_one_chunk,
)


EXERCISES = [
    Exercise(
        number="20a",
        function="interleaved_schedule",
        title="Interleaved 1F1B",
        points=5,
        cases=order_cases,
        program=run_order,
        imports=AUTOGRAD,
        checks=(
            value(
                "the order runs, and the loss and every gradient equal one process",
                parts=("the order", "the loss", "the gradients"),
            ),
            slots(interleaved_slots, "2M + 2(P − 1)/v slots"),
            holds_at_most(interleaved_peak, "few activations in flight"),
        ),
        least_received=messages_between_chunks,
        misconceptions=(CHUNK_MAP, SHORT_WARM_UP, ALL_FORWARDS),
        questions=(
            Question(
                "slots",
                "P = 4 ranks, M = 8 microbatches, v = 2 chunks: how many slots does the step take?",
                example(make_case, 4, 8, 2),
                lambda trial: trial.trace.makespan,
                "slots",
            ),
        ),
        hints=(
            "Number the forwards of a rank k = 0, 1, 2, … and find, for each k, which chunk and "
            "which microbatch it is.",
            "k // (P·v) counts groups of P microbatches; the rest, divided by P, is the chunk. For "
            "backwards, count the chunks from the last.",
            (
                "The docstring says how many activations a rank may hold: so many forwards, "
                "at most v·M, are its warm-up. After that, backward and forward take turns. "
                "Which stage is chunk c of rank r?"
            ),
        ),
        picture="pipeline",
    ),
]
