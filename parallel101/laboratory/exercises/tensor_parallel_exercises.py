"""Shared code of exercises on tensor parallel layers: forward and backward, and usual mistakes.

Forward and backward are spans, with their bytes and memory. What is expected comes from one process
with the whole weights, in float64. What the usual mistakes would give is computed too, by the case,
so that they can be named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.laboratory.exercises.adjoint_exercises import forward_backward
from parallel101.laboratory.exercises.wrong_values import (
    Seen,
    every_wrong,
    gives,
    gradients_times,
)
from parallel101.laboratory.grade.compared_values import same
from parallel101.laboratory.grade.exercise import Case, Check, Misconception, Trial
from parallel101.laboratory.grade.exercise_checks import (
    all_show,
    at_most,
    communicated,
    failed,
    on_ranks,
)

NUMBER = 8  # bytes of a float64


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def sent_in(trial: Trial, name: str) -> int:
    """Return the bytes that the busiest rank sent in the spans of this name."""
    spans = trial.trace.spans(name)
    return max(
        communicated(
            trial,
            lambda event: any(
                s.rank == event.rank and s.start <= event.start <= s.end for s in spans
            ),
        )
    )


def sends_at_most(name: str, says: str) -> Check:
    """Return a check that in spans of this name, no rank sends more than case.facts[name] bytes."""
    return at_most(
        "bytes",
        says,
        lambda trial: sent_in(trial, name),
        lambda case: case.facts[name],
        f"in {name}, a rank sent {{found}} bytes; {{most:g}} are enough",
        lambda case: 64,
    )


def keeps_at_most(says: str) -> Check:
    """Return a check that autograd keeps at most case.facts["kept"] bytes.

    A rank's result has these bytes as its last part.
    """
    return at_most(
        "memory",
        says,
        lambda trial: [result[-1] for result in trial.results],
        lambda case: case.facts["kept"],
        "rank {rank} keeps {found} bytes of activations for backward; {most} are enough",
    )


def ring(nbytes: float, n: int, times: int = 1) -> int:
    """Return the bytes that a rank sends in an all-gather or reduce-scatter of `nbytes`.

    An all-reduce sends twice as many.
    """
    return round(times * nbytes * (n - 1) / n)


def least_received(case: Case) -> list[int]:
    return [case.facts["least"] if case.world_size > 1 else 0] * case.world_size


def costs(name: str, times: float) -> Seen:
    """Return a test of whether values are right, but runs send `times` as much as is enough.

    A tenth more or less is accepted. Only bytes in spans of this name count, and runs on more than
    two ranks.
    """
    return lambda trials: (
        not failed(trials)
        and all_show(
            (trial for trial in trials if trial.world_size > 2),
            lambda t: 0.9 <= sent_in(t, name) / (times * t.case.facts[name]) <= 1.1,
        )
    )


N_TIMES = Misconception(
    "gradient n times too large",
    "The gradient is n times the right one. Every rank has the same loss, which counts once, and a "
    "sum over the ranks counts it n times.",
    gradients_times(1, lambda n: n),
)
MISSING_DX = Misconception(
    "missing all-reduce of dX",
    "Each rank's gradient of x holds only what comes through its own block. x went into every "
    "rank's block, so these parts must be added.",
    gives("parts of dx", 1),
)
OUTPUT_NOT_SUMMED = Misconception(
    "output never summed",
    "Each rank returns its own partial sum. The second matrix is cut by its inputs, so the outputs "
    "of all ranks must be added.",
    gives("parts of y", 0),
)
BIAS_N_TIMES = Misconception(
    "bias added n times",
    "Every rank adds the bias before the sum over the ranks, so the result holds it n times.",
    gives("y with n biases", 0),
)


def graph_cut(
    weight: Callable[[Any], Any],
    sent: Callable[[Trial], int] = lambda trial: sent_in(trial, "forward"),
) -> Misconception:
    """Return the misconception that a message cuts the graph.

    `weight` takes the gradient right before the message from a rank's result. `sent` gives the
    bytes of a run's messages: without any, no message cuts the graph.
    """

    def cut(trial: Trial, rank: int) -> bool:
        found = trial.results[rank]
        return same(found[0], trial.case.expected[rank][0]) and weight(found) is None

    def seen(trial: Trial) -> bool:
        return sent(trial) > 0 and all_show(on_ranks([trial]), cut)

    return Misconception(
        "graph cut by a message",
        "A message writes into a tensor that autograd does not follow. The result has no "
        "gradient, or it passes the layers before by.",
        lambda trials: every_wrong(seen)([t for t in trials if t.world_size > 1]),
    )


WHOLE_ON_EVERY_RANK = Misconception(
    "whole layer on every rank",
    "Every rank holds the whole matrices and does all of the work. Nothing is cut, so n ranks "
    "need n times the memory.",
    every_wrong(
        lambda trial: all(
            isinstance(result[3], dict)
            and {name: p.numel() for name, p in result[3].items()} == trial.case.facts["whole"]
            for result in trial.results
        )
    ),
)


def run_module(build: Callable, *arguments: Any) -> list[Any]:
    """Build the learner's module.

    The last two arguments are x and c; the loss, sum of c · y, is the same on every rank.
    """
    *given, x, c = arguments
    model = build(*given)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = leaf(x)
    y, kept = forward_backward(lambda: model(x), c.clone(), model.parameters())
    return [y, x.grad, {name: p.grad for name, p in model.named_parameters()}, weights, kept]


MLP_PARTS = ("y", "the gradient of x", "the gradients of the weights", "the weights")


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def gradients_of(loss: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [leaf(tensor) for tensor in tensors]
    return list(torch.autograd.grad(loss(*leaves), leaves))


def cut_mlp(tensors: Sequence[Tensor], n: int) -> list[list[Tensor]]:
    """Return each rank's w1, b1 and w2."""
    w1, b1, w2 = tensors
    return [
        list(blocks)
        for blocks in zip(w1.tensor_split(n), b1.tensor_split(n), w2.tensor_split(n, 1))
    ]
