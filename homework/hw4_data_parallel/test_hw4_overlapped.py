"""Exercise 12: gradients are all-reduced while backward computes the next ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101 import Network
from parallel101.laboratory.exercises.training_exercises import (
    BACKWARD,
    FORWARD,
    ITEM,
    MEAN_TWICE,
    NEVER_REDUCED,
    SGD,
    SUM_FOR_MEAN,
    added_to_the_last,
    all_reduce_bytes,
    count_weights,
    equals_one_process,
    gradients_of,
    make_model,
    mark_gradients,
    recorded,
    ring_slack,
    scaled,
    train,
    train_whole,
)
from parallel101.laboratory.exercises.wrong_values import every, more_than
from parallel101.laboratory.grade.exercise import (
    COLLECTIVES,
    P2P,
    Case,
    Check,
    Draw,
    Exercise,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    at_most,
    bytes_sent,
    ended,
    not_every_rank,
    right,
)

LAYERS = 4
MOST_EXPOSED = 0.6  # of the messages' time, in a right solution


def train_in_microbatches(
    function, sizes: list[int], weights: Tensor, inputs: Tensor, targets: Tensor
) -> dict[str, Any]:
    """Train on each rank. inputs: (steps, microbatches, samples, features)."""
    model = make_model(sizes, weights)
    optimizer = SGD(model.parameters())
    mark_gradients(model)
    function(model, F.mse_loss, optimizer, [list(zip(*share)) for share in zip(inputs, targets)])
    return recorded(model, optimizer)


def overlap_case(draw: Draw, n: int, microbatches: int, steps: int = 2) -> Case:
    sizes = [8] * (LAYERS + 1)
    count = count_weights(sizes)
    weights = 0.5 * draw.tensor(count, dtype=torch.float64)
    inputs = draw.tensors(n, steps, microbatches, 2, 8, dtype=torch.float64)
    targets = draw.tensors(n, steps, microbatches, 2, 8, dtype=torch.float64)
    expected = train(
        train_whole,
        sizes,
        False,
        weights,
        torch.cat(inputs, 2).flatten(1, 2),
        torch.cat(targets, 2).flatten(1, 2),
    )
    model = make_model(sizes, weights)
    local = [
        gradients_of(model, F.mse_loss(model(x[0].flatten(0, 1)), y[0].flatten(0, 1)))
        for x, y in zip(inputs, targets)
    ]
    return Case(
        [(sizes, weights, inputs[rank], targets[rank]) for rank in range(n)],
        [expected] * n,
        note=f"{microbatches} microbatch{'es' * (microbatches > 1)}",
        facts={
            "bytes": count * ITEM,
            "steps": steps,
            "microbatches": microbatches,
            "local": local,
            "compute": microbatches * LAYERS * (FORWARD + BACKWARD),
            "communication": 2 * (n - 1) / n * LAYERS,
        },
        # each layer's weights take a second
        network=Network(latency=0.0, bandwidth=count * ITEM / LAYERS),
    )


def overlap_cases(draw: Draw) -> list[Case]:
    return [overlap_case(draw, *case) for case in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 1))]


def gradient_bytes(case: Case) -> list[int]:
    return [
        case.facts["steps"] * all_reduce_bytes(case.facts["bytes"], case.world_size)
    ] * case.world_size


class StepRecord(NamedTuple):
    """One step of one rank, from its record."""

    rank: int
    step: int
    seconds: float
    first_sent: float | None  # when the first gradients were sent
    last_ready: float  # when backward had made the last gradient
    ready_after: float  # the same, in seconds since the step began
    last_forward: float  # when the last microbatch's forward began
    sent: int  # bytes of messages and collectives, counted as calls count them


def steps_of(trial: Trial) -> list[StepRecord]:
    found = []
    for rank in range(trial.world_size):
        own = [event for event in trial.trace.events if event.rank == rank]
        begin = 0.0
        for number, mark in enumerate((e for e in own if e.name == "optimizer step"), start=1):
            inside = [
                e
                for e in own
                if begin <= e.posted
                and (e.posted < mark.start or (e.kind != "span" and e.posted <= mark.start))
            ]
            sent = [e for e in inside if e.kind != "span" and e.kind != "recv" and e.nbytes > 32]
            ready = [e.end for e in inside if e.name == "backward"]
            forwards = [
                e.start for e in inside if e.name == "forward" and (e.args or {}).get("layer") == 0
            ]
            first = min((e.posted for e in sent), default=None)
            found.append(
                StepRecord(
                    rank,
                    number,
                    mark.start - begin,
                    first,
                    max(ready, default=0.0),
                    max(ready, default=begin) - begin,
                    max(forwards, default=0.0),
                    sum(e.nbytes for e in sent),
                )
            )
            begin = mark.start
    return found


def too_early(step: StepRecord) -> bool:
    """Check whether gradients are sent before the last microbatch has begun."""
    return step.first_sent is not None and step.first_sent <= step.last_forward


def starts_early() -> Check:
    def wrong(trial: Trial) -> str | None:
        facts = trial.case.facts
        for step in steps_of(trial) if trial.world_size > 1 else []:
            waits = step.ready_after - facts["compute"]
            if waits > MOST_EXPOSED * facts["communication"]:
                return f"in step {step.step}, rank {step.rank}'s backward waits {waits:g} s"
            if facts["microbatches"] > 1 and too_early(step):
                return f"in step {step.step}, rank {step.rank} sends before its last microbatch"
            if step.first_sent is None or step.first_sent >= step.last_ready:
                when = (
                    "never"
                    if step.first_sent is None
                    else f"{step.first_sent - step.last_ready:g} s after the last one is ready"
                )
                return f"in step {step.step}, rank {step.rank} sends the first gradient {when}"
        return None

    says = "the first message starts before the last gradient is ready; backward doesn't wait"
    return Check("overlap", says, wrong)


def started_early(trial: Trial) -> bool:
    return all(s.first_sent is not None and s.first_sent < s.last_ready for s in steps_of(trial))


def exposed(trial: Trial) -> float:
    """Return the largest part of a step's communication that is not hidden behind compute."""
    facts = trial.case.facts
    if not facts["communication"]:
        return 0.0
    return (
        max((step.seconds - facts["compute"] for step in steps_of(trial)), default=0.0)
        / facts["communication"]
    )


def hidden() -> Check:
    return at_most(
        "overlap",
        "most of the messages' time is hidden behind backward",
        exposed,
        lambda case: MOST_EXPOSED,
        "{found:.0%} of the messages' time is added to the step; with one message for each layer "
        "it is 25%",
    )


@mistake(
    "async, then wait at once",
    "Each all-reduce starts as soon as its gradient is ready, and then its end is awaited at "
    "once. Backward waits meanwhile, so no message is hidden.",
)
@every(more_than(1))
def waits_at_once(trial: Trial) -> bool:
    return right(trial) and started_early(trial) and exposed(trial) > 0.9


@mistake(
    "starts after backward",
    "The first all-reduce starts when the last gradient is ready. Then nothing is left to "
    "compute behind which messages could be hidden.",
)
@every(more_than(1))
def after_backward(trial: Trial) -> bool:
    return right(trial) and all((s.first_sent or 0) >= s.last_ready for s in steps_of(trial))


@mistake(
    "synchronises every microbatch",
    "Gradients are all-reduced after each microbatch. They are complete only after the last "
    "one: everything before is sent for nothing.",
)
def every_microbatch(trials: Sequence[Trial]) -> bool:
    """Check whether gradients are sent before the last microbatch has begun."""
    several = [
        trial
        for trial in trials
        if trial.world_size > 1 and trial.case.facts["microbatches"] > 1 and trial.error is None
    ]
    found = [step for trial in several for step in steps_of(trial)]
    return bool(found) and all(map(too_early, found))


@mistake(
    "hooks pile up",
    "Hooks are registered in every step and stay: in the second step each gradient has two, "
    "and is all-reduced twice.",
)
def piling_up(trials: Sequence[Trial]) -> bool:
    """Check whether the second step sends twice as much as the first, and so on."""
    several = ended(trials, 2)
    found = [
        (step.step, step.sent, trial.case.facts["bytes"])
        for trial in several
        for step in steps_of(trial)
    ]
    return (
        bool(found)
        and all(sent >= 0.9 * step * nbytes for step, sent, nbytes in found)
        and any(step > 1 for step, _, _ in found)
    )


@mistake(
    "microbatches summed",
    "backward() adds the microbatches' gradients. Each belongs to a mean over one microbatch, "
    "so their sum is too large by the number of microbatches.",
)
def not_averaged(trials: Sequence[Trial]) -> bool:
    """Check whether the gradients are too large by a factor of the number of microbatches."""
    several = [trial for trial in trials if trial.case.facts["microbatches"] > 1]
    return scaled(several, lambda trial: trial.case.facts["microbatches"])


@mistake(
    "sum for mean",
    "The gradients are summed over the microbatches and over the ranks. Each belongs to a mean "
    "over one microbatch, so the sum is too large by the number of microbatches on all ranks.",
)
def summed_twice(trials: Sequence[Trial]) -> bool:
    return scaled(trials, lambda trial: trial.world_size * trial.case.facts["microbatches"])


EXERCISES = [
    Exercise(
        number="12",
        function="train_overlapped",
        title="Overlapped",
        points=10,
        weights={"value": 0.3, "bytes": 0.2, "overlap": 0.5},
        cases=overlap_cases,
        program=train_in_microbatches,
        allowed=P2P | COLLECTIVES,
        checks=(
            equals_one_process(),
            bytes_sent(
                gradient_bytes,
                "2(n−1)/n of the gradients' bytes per step",
                lambda case: ring_slack(case) + 512,
            ),
            starts_early(),
            hidden(),
        ),
        least_received=lambda case: [
            case.facts["steps"] * case.facts["bytes"] - 64 if case.world_size > 1 else 0
            for _ in range(case.world_size)
        ],
        misconceptions=(
            piling_up,
            *MESSAGES,
            not_every_rank,
            every_microbatch,
            NEVER_REDUCED,
            summed_twice,
            SUM_FOR_MEAN,
            not_averaged,
            MEAN_TWICE,
            added_to_the_last,
            waits_at_once,
            after_backward,
        ),
        hints=(
            "backward() makes the last layer's gradients first. Who tells you that one is ready, "
            "and in which microbatch is it complete?",
            "Register one hook for each parameter, once. In the last microbatch the hook starts "
            "dist.all_reduce(p.grad, async_op=True) and keeps the work that this returns. All "
            "works are waited for just before optimizer.step().",
            "The hook runs in every microbatch, but it may start an all-reduce only in "
            "the last one. How does it know? A microbatch's loss is divided by two "
            "numbers before backward(). Forget the old works before the next step.",
        ),
        questions=(
            Question(
                "seconds",
                "Each of four layers takes 1 s forward and 2 s backward, and its all-reduce on "
                "two ranks 1 s. How long does a step take?",
                lambda: overlap_case(Draw("question"), 2, 1, steps=1),
                lambda trial: trial.trace.makespan,
                "seconds",
            ),
        ),
        picture="lanes",
    )
]
