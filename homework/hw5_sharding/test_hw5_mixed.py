"""Grade exercise 13c of homework 5: ZeRO-1 with master weights."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.laboratory.exercises.training_exercises import (
    LEARNING_RATE,
    MOMENTUM,
    Optimizers,
    measured,
)
from parallel101.laboratory.exercises.wrong_values import every
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    COLLECTIVES,
    P2P,
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    ask_sent,
    bytes_sent,
    communicated,
    ended,
    failed,
    right,
)

WIDTH, STEPS, MICROBATCHES = 6, 4, 16
OUTPUTS = 2  # fewer than three or four ranks
SIZES = (WIDTH, 8, OUTPUTS)
COUNT = sum(a * b + b for a, b in zip(SIZES, SIZES[1:]))
PARAMETER = max(a * b for a, b in zip(SIZES, SIZES[1:]))
# A rounded master weight is wrong by up to 2⁻⁸ of itself; a bf16 weight that is rounded the other
# way, since a sum was taken in another order, changes a master weight by far less.
TOLERANCE = 4e-4
TRAINED = 2e-2  # more than rounding, wherever it is done, and less than any other gradient


def make_model(weights: Tensor) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.Tanh(), nn.Linear(SIZES[1], SIZES[2]))
    with torch.no_grad():
        nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    return model


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error in float32, for outputs of any dtype."""
    return F.mse_loss(outputs.float(), targets)


def is_rounded(t: Tensor) -> bool:
    """Check whether bfloat16 can represent all numbers of t exactly."""
    return bool(torch.equal(t, t.bfloat16().to(t.dtype)))


def train_one_process(
    weights: Tensor, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Return the flat master and rounded weights after training, and the first gradient's norm.

    inputs: (steps, microbatches of all ranks, samples, features).
    """
    master, model = weights.clone(), make_model(weights).bfloat16()
    parameters, momentum = list(model.parameters()), torch.zeros_like(weights)
    norms: list[float] = []
    for x, y in zip(inputs, targets):
        total = torch.zeros_like(weights)
        for of_microbatch in zip(x, y):
            loss = loss_fn(model(of_microbatch[0].bfloat16()), of_microbatch[1])
            gradients = torch.autograd.grad(loss, parameters)
            total += torch.cat([g.flatten() for g in gradients]).float() / len(x)
        norms.append(float(total.norm()))
        momentum = MOMENTUM * momentum + total
        master -= LEARNING_RATE * momentum
        with torch.no_grad():
            nn.utils.vector_to_parameters(master.bfloat16(), parameters)
    return master, master.bfloat16().float(), norms[0]


# ---- what each rank runs ----


def train(function, weights: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Train this rank's replica. inputs: (steps, microbatches of this rank, samples, features)."""
    model = make_model(weights)
    optimizers = Optimizers()
    batches = [list(zip(x.bfloat16(), y)) for x, y in zip(inputs, targets)]
    function(model, loss_fn, optimizers.make, batches)
    steps = [step for optimizer in optimizers.made for step in optimizer.steps]
    masters = [
        p.detach().flatten()
        for optimizer in optimizers.made
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    return {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "masters": torch.cat(masters or [torch.zeros(0)]),
        "rounded": [all(is_rounded(value) for value, _ in step) for step in steps],
        "gradients": [all(is_rounded(g) for _, g in step if g is not None) for step in steps],
        "norm": math.sqrt(sum(optimizers.result()["squares"][:1])),
    }


# ---- cases ----


def mixed_case(draw: Draw, n: int) -> Case:
    weights = 0.7 * draw.tensor(COUNT)
    inputs, targets = (
        draw.tensors(n, STEPS, MICROBATCHES, 2, features) for features in (WIDTH, OUTPUTS)
    )
    masters, rounded, norm = train_one_process(weights, torch.cat(inputs, 1), torch.cat(targets, 1))
    others = dict.fromkeys(("masters", "rounded", "gradients", "norm"), ANYTHING)
    return Case(
        [(weights, inputs[rank], targets[rank]) for rank in range(n)],
        [{**others, "weights": rounded.bfloat16()}] * n,
        facts={"masters": masters, "weights": rounded, "norm": norm},
        seconds=20.0,
    )


# ---- checks ----


def masters_of(trial: Trial) -> Tensor | None:
    """Return the sorted master weights of all ranks, or None if they aren't the whole model's."""
    held = [m for m in measured(trial, "masters") if isinstance(m, Tensor)]
    found = torch.cat([torch.zeros(0), *(m.double() for m in held)])
    found = found[found != 0]
    return found.sort().values if len(found) == COUNT else None


def masters_right(trial: Trial) -> bool:
    found = masters_of(trial)
    return found is not None and far(found, trial.case.facts["masters"].sort().values) <= TOLERANCE


def far(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def weights_equal() -> Check:
    def wrong(trial: Trial) -> str | None:
        for rank, found in enumerate(measured(trial, "weights")):
            if not isinstance(found, Tensor) or found.dtype != torch.bfloat16:
                return (
                    f"rank {rank}'s model has weights of "
                    f"{getattr(found, 'dtype', 'no dtype')}; expected torch.bfloat16"
                )
            # small mistakes show in the master weights, and here with some numbers only
            if not far(found, trial.case.facts["weights"]) <= TRAINED:
                return (
                    f"rank {rank}'s weights after {STEPS} steps are up to "
                    f"{far(found, trial.case.facts['weights']):.1%} off"
                )
        return None

    return Check("value", "the bfloat16 weights are those of one process, up to rounding", wrong)


def masters_equal() -> Check:
    def wrong(trial: Trial) -> str | None:
        found = masters_of(trial)
        if found is None:
            return (
                "the ranks' optimizers together don't hold the weights of the whole model, each "
                "number once"
            )
        expected = trial.case.facts["masters"].sort().values
        if not far(found, expected) <= TOLERANCE:
            return (
                f"the master weights after {STEPS} steps are up to {far(found, expected):.1e} of "
                f"the largest one off; expected at most {TOLERANCE:.0e}"
            )
        return None

    return Check("value", "the master weights are those of one process", wrong)


def shared_bytes(case: Case) -> list[int]:
    """Return the bytes of a float32 gradient reduce-scatter and a bfloat16 weight all-gather."""
    n = case.world_size
    return [STEPS * round((n - 1) / n * COUNT * (4 + 2))] * n


def slack(case: Case) -> int:
    return 64 + STEPS * 4 * (4 + 2) * (case.world_size - 1)  # padding of four parameters


def few_bytes() -> Check:
    sent = bytes_sent(shared_bytes, "(n−1)/n of 4 + 2 bytes for each weight, per step", slack)

    def wrong(trial: Trial) -> str | None:
        if not masters_right(trial):
            return "counts only with the right master weights"
        return sent.wrong(trial)

    return replace(sent, wrong=wrong)


def optimizer_is_sharded() -> Check:
    def wrong(trial: Trial) -> str | None:
        n = trial.world_size
        most = COUNT / n + (PARAMETER if n > 1 else 0)
        for rank, held in enumerate(measured(trial, "masters")):
            if not isinstance(held, Tensor) or held.dtype != torch.float32 or len(held) > most:
                what = f"{len(held)} of {held.dtype}" if isinstance(held, Tensor) else "none"
                return (
                    f"rank {rank}'s optimizer has the master weights: {what}; expected 1/{n} of "
                    f"{COUNT}, in torch.float32"
                )
        return None

    return Check("memory", "each rank's optimizer has 1/n of the master weights, in 32 bits", wrong)


def least(case: Case) -> list[int]:
    """Return the bytes each rank needs: the others' gradients of its pieces, and their pieces.

    Each number takes 2 bytes.
    """
    n = case.world_size
    return [STEPS * (n - 1) * COUNT * 4 // n - 64 if n > 1 else 0] * n


# ---- misconceptions ----


def bytes_a_weight(trial: Trial) -> float:
    """Return the bytes that a rank sent in a step for each of the others' weights."""
    n = trial.world_size
    return min(communicated(trial)) / (STEPS * (n - 1) / n * COUNT)


@mistake(
    "master weights begin rounded",
    "The master weights were copied from the model after it was rounded. Their updates are "
    "right, but they started up to 0.4 % off.",
)
def begins_rounded(trials: Sequence[Trial]) -> bool:
    """Check whether master weights are rounded before the first step, but not afterwards."""
    found = [steps for trial in ended(trials) for steps in measured(trial, "rounded") if steps]
    return bool(found) and all(steps[0] and not any(steps[1:]) for steps in found)


def always_rounded(trials: Sequence[Trial]) -> bool:
    found = [steps for trial in ended(trials) for steps in measured(trial, "rounded") if steps]
    return bool(found) and all(len(steps) == STEPS and all(steps[1:]) for steps in found)


@mistake(
    "gradients cast before the sum",
    "The gradients are added up in bfloat16, or rounded to it before they are sent. With only "
    "8 significant bits, a sum of many gradients loses small ones.",
)
def rounded_gradients(trials: Sequence[Trial]) -> bool:
    """Check whether gradients are rounded to bfloat16.

    On one rank, where nothing is sent, the optimizer sees them. On several, half of their bytes
    are missing.
    """
    alone = [trial for trial in ended(trials) if trial.world_size == 1]
    seen = [steps for trial in alone for steps in measured(trial, "gradients") if steps]
    if seen:
        return all(map(all, seen)) and not always_rounded(trials)
    return bool(ended(trials, 2)) and all(
        3.6 < bytes_a_weight(trial) < 4.6 for trial in ended(trials, 2)
    )


@mistake(
    "master weights gathered",
    "The all-gather sends the master weights in 32 bits, and every rank rounds them "
    "afterwards. Round them first: the model only needs 16 bits of each.",
)
@every(lambda trials: ended(trials, 2))
def gathers_masters(trial: Trial) -> bool:
    return right(trial) and masters_right(trial) and 7.6 < bytes_a_weight(trial) < 9


@mistake(
    "whole master weights on each rank",
    "Every rank's optimizer has the master weights of the whole model. Together, the ranks "
    "hold 4n bytes for each weight instead of 4, and as much momentum.",
)
@every(lambda trials: ended(trials, 2))
def whole_masters(trial: Trial) -> bool:
    return right(trial) and min(map(len, measured(trial, "masters"))) >= COUNT


@mistake(
    "sum for mean",
    "The gradients of ranks, of microbatches or of both are added up, but not averaged. Each "
    "belongs to the mean loss of one share. The gradient of the whole mean loss is their sum, "
    "divided by their number.",
)
@every(failed)
def is_sum(trial: Trial) -> bool:
    """Check whether the first gradient is too large by the ranks, the microbatches or both."""
    n = trial.world_size
    norm = math.hypot(*(n for n in measured(trial, "norm") if isinstance(n, float)))
    return trial.error is None and any(
        math.isclose(norm, k * trial.case.facts["norm"], rel_tol=1e-2)
        for k in (n, MICROBATCHES, n * MICROBATCHES)
        if k > 1
    )


EXERCISES = [
    Exercise(
        number="13c",
        function="train_mixed",
        title="ZeRO-1 with master weights",
        points=5,
        cases=lambda draw: [mixed_case(draw, n) for n in (1, 2, 3, 4)],
        program=train,
        allowed=P2P | COLLECTIVES,
        checks=(
            weights_equal(),
            replace(masters_equal(), weight=6.0),
            few_bytes(),
            optimizer_is_sharded(),
        ),
        weights={"value": 0.4, "bytes": 0.5, "memory": 0.1},
        least_received=least,
        misconceptions=(
            *MESSAGES,
            whole_masters,
            Misconception(
                "master weights updated from rounded ones",
                "Before each step, the optimizer's weights are the model's rounded weights, "
                "only in a larger dtype. Small updates were lost in the rounding.",
                always_rounded,
            ),
            begins_rounded,
            is_sum,
            rounded_gradients,
            gathers_masters,
        ),
        hints=(
            "Which tensors must be float32: weights, gradients, sums of gradients, the optimizer's "
            "parameters? And when is your last chance to copy the weights before they are rounded?",
            "Cut the float32 weights into pieces first, then call model.bfloat16(). In each step, "
            "add every microbatch's p.grad to a float32 tensor, and set p.grad to None. From there "
            "to optimizer.step(), do the same as in train_zero1.",
            "After optimizer.step(), round the piece (piece.detach().bfloat16()), then all-gather "
            "it. Keep the sums in float32 all the way to piece.grad.",
        ),
        questions=(
            ask_sent(
                f"The model has {COUNT} weights. Gradients are reduce-scattered in float32, and "
                f"weights all-gathered in bfloat16. How many bytes does each of two ranks send in "
                f"{STEPS} steps?",
                lambda: mixed_case(Draw("question"), 2),
            ),
        ),
        picture="lanes",
    )
]
