"""Exercises 25d and 25e: what failures and slow GPUs cost.

Young, "A first order approximation to the optimum checkpoint interval" (CACM 17, 1974); Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22, 2006), whose
first order is Young's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from parallel101.laboratory.exercises.estimate_exercises import (
    EstimatePart,
    Facts,
    about,
    answers,
    estimate_case,
    numbers,
    off_by,
)
from parallel101.laboratory.exercises.wrong_values import every
from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
)
from parallel101.laboratory.grade.exercise_checks import ended

# ---- 25d ----


def checkpoint_case(gpus: int, hours: float, write: float, restart: float) -> Case:
    return estimate_case(
        (gpus, hours, write, restart),
        f"{gpus:,} GPUs, each fails once in {hours:,.0f} hours",
        gpus=gpus,
        hours=hours,
        write=write,
        restart=restart,
        between=hours * 3600 / gpus,
    )


def checkpoint_cases(draw: Draw) -> list[Case]:
    return [
        checkpoint_case(
            gpus + draw.integer(0, gpus // 4),
            float(draw.integer(20_000, 80_000)),
            float(draw.integer(5, 90)),
            float(draw.integer(60, 600)),
        )
        for gpus in (16, 128, 1024, 4096, 16_384)
    ]


INTERVAL = EstimatePart("interval", "the interval that loses least")
LOST = EstimatePart("lost", "the share of time that is lost with your interval", uses=("interval",))


def lost_as(more: Callable[[Facts, float], float]) -> Callable[[Sequence[Trial]], bool]:
    """Whether the lost share is wrong by so much in all runs, given the learner's interval."""

    def shows(trial: Trial) -> bool:
        facts, said = trial.case.facts, numbers(trial)
        wrong = answers().lost(facts, said) + more(facts, said["interval"])
        return said["interval"] > 0 and about(said["lost"], wrong, 1e-4)

    return every(ended)(shows)


CHECKPOINT = Exercise(
    number="25d",
    function="checkpoint_interval",
    title="How often to write a checkpoint",
    points=4,
    cases=checkpoint_cases,
    checks=(INTERVAL.check(), LOST.check()),
    least_received=lambda case: [0],
    misconceptions=(
        Misconception(
            "failures of one GPU",
            "The time between failures is that of one GPU. With n of them, one fails n times "
            "as often, and any failure stops all.",
            off_by(INTERVAL, lambda f: math.sqrt(f["gpus"]), lambda f: math.sqrt(f["gpus"] / 2)),
        ),
        Misconception(
            "hours taken for seconds",
            "One time is in hours, and the others are in seconds.",
            off_by(INTERVAL, lambda f: 1 / 60, lambda f: 1 / 3600),
        ),
        Misconception(
            "whole interval lost",
            "A failure comes anywhere in an interval, so on average half of it is computed again.",
            lost_as(lambda f, interval: interval / 2 / f["between"]),
        ),
        Misconception(
            "as many failures as writes",
            "The interval balances what writing costs against what failures cost. A longer "
            "write makes it longer, but only by the square root.",
            off_by(
                INTERVAL,
                lambda f: f["between"] / answers().interval(f, {}),
                lambda f: f["write"] / answers().interval(f, {}),
                lambda f: f["between"] / 2 / answers().interval(f, {}),
            ),
        ),
        Misconception(
            "restart forgotten",
            "The interval doesn't depend on the restart, but the lost time does: each failure "
            "costs a restart.",
            lost_as(lambda f, interval: -f["restart"] / f["between"]),
        ),
        Misconception(
            "half of the loss forgotten",
            "Time is lost to writing, and to computing again after a failure. At the best "
            "interval the two are equal, and one of them is missing here.",
            lost_as(lambda f, interval: -f["write"] / interval),
        ),
    ),
    hints=(
        "What does an hour of training cost if you write very often? And if you write once a day? "
        "Write down both terms as functions of the interval.",
        "The run fails every (hours_between_failures · 3600 / gpus) seconds: call it m. Writing "
        "costs write / interval of the time. A failure costs the restart, and half an interval on "
        "average.",
        "The sum has a term with 1 / interval and one with interval / (2m). At the minimum the two "
        "are equal. The term with the restart doesn't change with the interval, but it counts in "
        "what is lost.",
    ),
    questions=(
        Question(
            "lost",
            "16,384 GPUs, 50,000 hours between failures of one, 60 s to write, 600 s to restart: "
            "what percentage of the time is lost? (A whole number.)",
            lambda: checkpoint_case(16_384, 50_000.0, 60.0, 600.0),
            lambda trial: round(100 * trial.results[0]["lost"]),
            "%",
        ),
    ),
)

# ---- 25e ----


def straggler_case(gpus: int, q: float, slowdown: float) -> Case:
    return estimate_case(
        (gpus, q, slowdown), f"{gpus:,} GPUs, q = {q:g}", gpus=gpus, q=q, slowdown=slowdown
    )


def straggler_cases(draw: Draw) -> list[Case]:
    """From a few slow steps to nearly all of them."""
    return [
        straggler_case(
            gpus + draw.integer(0, gpus // 4),
            draw.integer(5, 15) / 10 * chance / gpus,
            1 + draw.integer(1, 20) / 10,
        )
        for gpus, chance in ((8, 0.2), (256, 0.5), (1024, 1.0), (4096, 2.0), (16_384, 0.05))
    ]


SLOW = EstimatePart("slow", "the probability that a step has a slow GPU")
STEP = EstimatePart("step", "the mean time of a step, given your probability", uses=("slow",))


def step_as(*formulas: Callable[[Facts, float], float]) -> Callable[[Sequence[Trial]], bool]:
    """Whether a formula of the facts and the learner's probability explains "step" in all runs."""

    def seen(trials: Sequence[Trial]) -> bool:
        found = [(trial.case.facts, numbers(trial)) for trial in ended(trials)]
        constant = len({said["step"] for _, said in found}) == 1
        return not constant and any(
            all(about(said["step"], formula(f, said.get("slow", 0.0)), 1e-4) for f, said in found)
            for formula in formulas
        )

    return seen


STRAGGLERS = Exercise(
    number="25e",
    function="stragglers",
    title="Slow GPUs",
    points=2,
    cases=straggler_cases,
    checks=(SLOW.check(), STEP.check()),
    least_received=lambda case: [0],
    misconceptions=(
        Misconception(
            "probabilities added",
            "n · q is the mean number of slow GPUs in a step, and can be above 1. Two of them "
            "in one step make it no slower than one.",
            off_by(
                SLOW,
                lambda f: f["gpus"] * f["q"] / answers().slow(f, {}),
                lambda f: min(1.0, f["gpus"] * f["q"]) / answers().slow(f, {}),
            ),
        ),
        Misconception(
            "all GPUs slow at once",
            "One slow GPU is enough: the others wait for it.",
            off_by(SLOW, lambda f: f["q"] ** f["gpus"] / answers().slow(f, {})),
        ),
        Misconception(
            "one GPU's probability",
            "q is the probability for one GPU. The step waits for the slowest of all of them.",
            off_by(SLOW, lambda f: f["q"] / answers().slow(f, {})),
        ),
        Misconception(
            "no GPU slow",
            "That is the probability that no GPU is slow in a step.",
            off_by(SLOW, lambda f: (1 - answers().slow(f, {})) / answers().slow(f, {})),
        ),
        Misconception(
            "time added on top",
            "A slow step takes `slowdown` times as long as another, so it takes "
            "`slowdown` − 1 more.",
            step_as(lambda f, p: 1 + p * f["slowdown"]),
        ),
        Misconception(
            "mean of the GPUs",
            ("That is the mean time of a GPU. The step takes as long as its slowest GPU."),
            step_as(lambda f, p: 1 + f["q"] * (f["slowdown"] - 1)),
        ),
        Misconception(
            "only the slow steps",
            "The mean is over all steps, and those without a slow GPU count as 1.",
            step_as(lambda f, p: p * f["slowdown"], lambda f, p: f["slowdown"]),
        ),
    ),
    hints=(
        "When is a step not slow?",
        "A step is fast if all GPUs are fast in it, each with probability 1 − q.",
        "With p for the probability of a slow step, a share p of the steps takes slowdown, and "
        "the others take 1.",
    ),
    questions=(
        Question(
            "slow",
            "1,024 GPUs, and each is slow in one step of a thousand: in what percentage of the "
            "steps is one of them slow? (A whole number.)",
            lambda: straggler_case(1024, 0.001, 1.5),
            lambda trial: round(100 * trial.results[0]["slow"]),
            "%",
        ),
    ),
)
EXERCISES = [CHECKPOINT, STRAGGLERS]
