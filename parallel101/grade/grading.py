"""Grades one exercise of one submission.

It runs the cases, judges every check, names the misconception and counts the points.

cases ──▶ trials ──▶ a Finding for each check: passed, or the sentence that says what is wrong
                 └─▶ the first misconception that the trials show
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from parallel101.grade.exercise import KINDS, Case, Draw, Exercise, Misconception, Trial
from parallel101.grade.exercise_checks import everywhere, never_waited, too_few_bytes
from parallel101.grade.failure_text import explain_error
from parallel101.grade.plain_text import plain
from parallel101.grade.remote import (
    CalledFromThread,
    ForbiddenCall,
    LearnerError,
    NotStarted,
    PrintedTooMuch,
    Submission,
    SubmissionRanks,
    TimeOver,
    not_run,
)

# of the cases that everybody sees; a teacher's own seed is in no public file
PUBLIC_SEED = "parallel101"
# of the points, if an exercise has all kinds
SHARES = {"value": 0.5, "bytes": 0.15, "steps": 0.15, "memory": 0.1, "overlap": 0.1}
# of wall time for all cases of an exercise; cases that have not run by then fail
EXERCISE_SECONDS = 60.0
# after these the other cases would tell nothing new, and take long
ENDS = (CalledFromThread, ForbiddenCall, PrintedTooMuch, TimeOver)

NOT_LOADED = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")


@dataclass(frozen=True)
class Finding:
    """The verdict on one check."""

    kind: str
    says: str
    passed: bool
    points: float
    out_of: float
    message: str = ""  # what is wrong, and in which case

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", plain(self.message))


@dataclass
class ExerciseVerdict:
    """The verdict on one exercise.

    Attributes:
        findings: one for each check, "value" first.
        misconception: the mistake that the trials show, if it is a known one.
        problem: what ended a run early, as a text for the learner: a deadlock, an exception, a
            time limit. "" if nothing did.
        not_written: whether the function is still the stub.
        trials: every run, in the order of the cases.
        shown: the trial that the picture shows: the first that failed, or the last one.
        seconds: how long the grading took.
    """

    exercise: Exercise
    findings: list[Finding]
    misconception: Misconception | None = None
    problem: str = ""
    not_written: bool = False
    trials: list[Trial] = field(default_factory=list, repr=False)
    shown: Trial | None = field(default=None, repr=False)
    seconds: float = 0.0

    @property
    def points(self) -> float:
        return round(sum(finding.points for finding in self.findings), 2)

    @property
    def out_of(self) -> float:
        return self.exercise.points

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)


def grade(exercise: Exercise, submission: Submission, seed: str = PUBLIC_SEED) -> ExerciseVerdict:
    """Run all cases of an exercise, and judge them.

    Errors of the learner's code are part of the verdict; nothing is raised for them.
    """
    with SubmissionRanks(exercise, submission) as ranks:
        return grade_on(ranks, seed)


def grade_on(ranks: SubmissionRanks, seed: str = PUBLIC_SEED) -> ExerciseVerdict:
    """The same on processes that exist already."""
    began, exercise = time.monotonic(), ranks.exercise
    trials = run_cases(
        ranks, exercise.cases(Draw(seed, exercise.function)), began + EXERCISE_SECONDS
    )
    verdict = judge(exercise, trials)
    verdict.seconds = time.monotonic() - began
    return verdict


def run_cases(ranks: SubmissionRanks, cases: Sequence[Case], until: float) -> list[Trial]:
    """Run the cases, one after the other. Stops where more runs would tell nothing new."""
    trials: list[Trial] = []
    for case in cases:
        if time.monotonic() > until:  # a case that is not run must fail, or sleeping would pass it
            trials.append(
                not_run(
                    case,
                    NotStarted(
                        "the time for all cases of this exercise was over before this one ran"
                    ),
                )
            )
            break
        trials.append(ranks.run(case))
        error = trials[-1].error
        if isinstance(error, ENDS) or (
            isinstance(error, LearnerError) and (error.not_written or error.kind in NOT_LOADED)
        ):
            break
    return trials


def judge(
    exercise: Exercise, trials: Sequence[Trial], kinds: Collection[str] | None = None
) -> ExerciseVerdict:
    """The verdict on trials that have run, whatever they ran on.

    With `kinds`, only checks of these kinds are judged.
    """
    early = [trial for trial in trials if trial.error is not None]
    # a picture of one rank shows little
    ended = next((trial for trial in early if trial.world_size > 1), early[0] if early else None)
    not_written = (
        ended is not None and isinstance(ended.error, LearnerError) and ended.error.not_written
    )
    findings, shown = [], ended
    value_is_right = False
    for check in sorted(exercise.checks, key=lambda check: KINDS.index(check.kind)):
        if kinds is not None and check.kind not in kinds:
            continue
        out_of = exercise.points * share(exercise, check.kind)
        message, trial = everywhere(check, trials)
        if check.kind == "value" and not message:
            message, trial = too_few_bytes(exercise, trials)
            if not message:
                message, trial = never_waited(trials)
        if check.kind != "value" and not message and not value_is_right:
            message = "counts only with the right value"
        value_is_right = value_is_right or (check.kind == "value" and not message)
        shown = shown or trial
        findings.append(
            Finding(
                check.kind, check.says, not message, 0.0 if message else out_of, out_of, message
            )
        )
    wrong = not all(finding.passed for finding in findings)
    misconception = (
        next((m for m in exercise.misconceptions if _seen(m, trials)), None)
        if wrong and not not_written
        else None
    )
    problem = explain_error(exercise, ended) if ended is not None else ""
    return ExerciseVerdict(
        exercise,
        findings,
        misconception,
        problem,
        not_written,
        list(trials),
        shown or (trials[-1] if trials else None),
    )


def _seen(misconception: Misconception, trials: Sequence[Trial]) -> bool:
    try:
        return misconception.seen(trials)
    except Exception:  # what a rank returns may be anything
        return False


def share(exercise: Exercise, kind: str) -> float:
    """The part of the points that one check of this kind earns.

    `value_share` is for the value. The other kinds share the rest.
    """
    kinds = {check.kind for check in exercise.checks}
    same = sum(check.kind == kind for check in exercise.checks)
    others = sum(SHARES[k] for k in kinds if k != "value")
    if kind == "value":
        return (exercise.value_share if others else 1.0) / same
    return (1 - exercise.value_share) * SHARES[kind] / others / same
