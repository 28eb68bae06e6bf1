"""Exercise 20b: zero bubble. Backward has two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel101 import compute, schedule, span
from parallel101.laboratory.exercises.pipeline_exercises import (
    LEARNING_RATE,
    ROWS,
    WIDTH,
    example,
    holds_at_most,
    make_case,
    mean_square,
    messages_of,
    one_at_a_time,
    slots,
    stage_of,
)
from parallel101.laboratory.exercises.training_exercises import SGD
from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import MESSAGES, bytes_sent, value


class SplitStage:
    """A stage whose backward has two halves. See zero_bubble_step for what its methods do."""

    def __init__(self, inner: nn.Module, number: int):
        self.inner, self.number = inner, number
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.left: dict[int, tuple[Tensor, Tensor]] = {}

    def _slot(self, name: str, i: int) -> None:
        with span(name, stage=self.number, microbatch=i):
            compute(1.0)

    def forward(self, i: int, x: Tensor) -> Tensor:
        self._slot("forward", i)
        x = x.detach().requires_grad_()
        self.held[i] = x, self.inner(x)
        return self.held[i][1].detach()

    def input_gradient(self, i: int, dy: Tensor) -> Tensor | None:
        self._slot("input gradient", i)
        x, y = self.held.pop(i)
        self.left[i] = y, dy
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        return dx if self.number else None

    def weight_gradient(self, i: int) -> None:
        self._slot("weight gradient", i)
        y, dy = self.left.pop(i)
        parameters = list(self.inner.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(y, parameters, dy), strict=True
        ):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def run_split_step(
    step: Callable[..., Any], seed: int, inputs: Any, targets: Any, microbatches: int
) -> list[Any]:
    """Run one zero-bubble step on this rank, and return the loss and the stage's new weights."""
    rank = dist.get_rank()
    inner = stage_of(seed, rank)
    optimizer = SGD(inner.parameters(), lr=LEARNING_RATE, momentum=0.0)
    loss = step(
        SplitStage(inner, rank),
        inputs,
        targets,
        mean_square,
        (ROWS, WIDTH),
        microbatches,
        optimizer,
    )
    return [loss, [p.detach() for p in inner.parameters()]]


def split_cases(draw: Draw) -> list[Case]:
    return [make_case(draw, p, m, split=True) for p, m in ((1, 2), (2, 4), (3, 3), (4, 2), (4, 6))]


def zero_bubble_slots(case: Case) -> float:
    return schedule("zb-h1", stages=case.facts["p"], microbatches=case.facts["m"]).time().makespan


@mistake(
    "optimizer steps before W is done",
    "The optimizer steps while weight gradients are still missing. They are lost, or reach "
    "the weights only with the next step.",
)
def _stepped_early(trials: Sequence[Trial]) -> bool:
    for trial in trials:
        for rank in range(trial.world_size):
            # the last of each name
            ends = {e.name: (e.start, e.seq) for e in trial.trace.spans() if e.rank == rank}
            if (
                "optimizer step" in ends
                and ends.get("weight gradient", (-1.0, 0)) > ends["optimizer step"]
            ):
                return True
            begun, done = (
                sum(e.rank == rank for e in trial.trace.spans(name))
                for name in ("input gradient", "weight gradient")
            )
            if trial.error is None and "optimizer step" in ends and done < begun:
                return True
    return False


@mistake(
    "W right after B",
    "Each weight gradient runs right after its input gradient, so nothing is left to fill the "
    "bubble with.",
)
def _never_apart(trials: Sequence[Trial]) -> bool:
    """Check whether every weight gradient comes immediately after its input gradient.

    Only runs with several stages count, on every rank.
    """
    order = {
        (number, rank): [
            (e.name, (e.args or {}).get("microbatch"))
            for e in trial.trace.spans()
            if e.rank == rank and e.name != "optimizer step"
        ]
        for number, trial in enumerate(trials)
        if trial.world_size > 1 and trial.error is None
        for rank in range(trial.world_size)
    }
    return bool(order) and all(
        ("weight gradient" in dict(names))
        and all(
            names[k - 1] == ("input gradient", i)
            for k, (name, i) in enumerate(names)
            if name == "weight gradient"
        )
        for names in order.values()
    )


EXERCISES = [
    Exercise(
        number="20b",
        function="zero_bubble_step",
        title="Zero bubble",
        points=5,
        cases=split_cases,
        program=run_split_step,
        checks=(
            value(
                "the loss, and every weight after the step, equal one process",
                parts=("the loss", "the weights"),
            ),
            bytes_sent(messages_of, "M activations forward and M gradients back, and nothing else"),
            slots(zero_bubble_slots, "3M + (P − 1) slots"),
            holds_at_most(
                lambda case, rank: case.facts["p"],
                "at most P microbatches in flight",
                in_slots=zero_bubble_slots,
            ),
        ),
        weights={"value": 0.2, "bytes": 0.1, "steps": 0.4, "memory": 0.3},
        least_received=messages_of,
        misconceptions=(*MESSAGES, _stepped_early, one_at_a_time, _never_apart),
        questions=(
            Question(
                "slots",
                "P = 4 stages, M = 6 microbatches: how many slots does the step take?",
                example(make_case, 4, 6, split=True),
                lambda trial: trial.trace.makespan,
                "slots",
            ),
        ),
        hints=(
            "The stage before waits for dx only. Nobody waits for a weight gradient, until the "
            "optimizer steps.",
            "Begin as in 1F1B. On rank r, let weight_gradient run r microbatches behind "
            "input_gradient; the r that are left come at the end.",
            "So the first r rounds on rank r have no weight gradient, and r are left when "
            "the loop ends. Which call comes after them, and why not before?",
        ),
        picture="pipeline",
    )
]
