"""Grades one exercise of one submission.

It runs the cases, judges every check, names the misconception and counts the points.

cases ──▶ trials ──▶ a Finding for each check: passed, or the sentence that says what is wrong
                 └─▶ the first misconception that the trials show
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from parallel101.laboratory.grade.exercise import (
    KINDS,
    Case,
    Check,
    Draw,
    Exercise,
    Trial,
)
from parallel101.laboratory.grade.exercise_checks import never_waited, tolerated, too_few_bytes
from parallel101.laboratory.grade.exercise_report import (
    LOADING,
    ExerciseVerdict,
    Finding,
    GradedRunFailed,
    ends_all,
)
from parallel101.laboratory.grade.plain_text import plain
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks, not_run

# of the cases that everybody sees; a teacher's own seed is in no public file
PUBLIC_SEED = "parallel101"
# of wall time for all cases of an exercise; cases that have not run by then fail
EXERCISE_SECONDS = 60.0


def grade(exercise: Exercise, submission: Submission, seed: str = PUBLIC_SEED) -> ExerciseVerdict:
    """Run all cases of an exercise, and judge them.

    Errors of the learner's code are part of the verdict; nothing is raised for them.
    """
    with SubmissionRanks(exercise, submission) as ranks:
        return grade_on(ranks, seed)


def grade_on(ranks: SubmissionRanks, seed: str = PUBLIC_SEED) -> ExerciseVerdict:
    """Run all cases of an exercise on existing processes, and judge them."""
    began, exercise = time.monotonic(), ranks.exercise
    cases = drawn(exercise.cases, seed, exercise.function)
    trials = run_cases(ranks, cases, began + EXERCISE_SECONDS)
    verdict = judge(exercise, trials)
    verdict.seconds = time.monotonic() - began
    return verdict


@lru_cache(maxsize=64)
def drawn(cases: Callable[[Draw], Sequence[Case]], seed: str, function: str) -> Sequence[Case]:
    """Return the cases of an exercise: for a whole class, they are made once."""
    return cases(Draw(seed, function))


def run_cases(ranks: SubmissionRanks, cases: Sequence[Case], until: float) -> list[Trial]:
    """Run the cases, one after the other. Stops where more runs would tell nothing new."""
    trials: list[Trial] = []
    if ranks.submission.endless is not None:
        return [not_run(case, ranks.submission.endless) for case in cases[:1]]
    for case in cases:
        if time.monotonic() > until:  # a case that is not run must fail, or sleeping would pass it
            late = "the time for all cases of this exercise was over before this one ran"
            return [*trials, not_run(case, GradedRunFailed("not run", late))]
        trials.append(ranks.run(case))
        ended = trials[-1].error
        if isinstance(ended, GradedRunFailed) and ended.kind == LOADING:
            ranks.submission.endless = ended
        if ends_all(ended):
            break
    return trials


def judge(exercise: Exercise, trials: Sequence[Trial]) -> ExerciseVerdict:
    """Return the verdict on trials that have run, whatever they ran on."""
    early = [trial for trial in trials if trial.error is not None]
    # a picture of one rank shows little
    shown = next((trial for trial in early if trial.world_size > 1), early[0] if early else None)
    findings, value_is_right = [], False
    for check in sorted(exercise.checks, key=lambda check: KINDS.index(check.kind)):
        # the first with several ranks, if there is one
        several_first = sorted(trials, key=lambda trial: trial.world_size == 1)
        told = ((what, t) for t in several_first if (what := _wrong(exercise, check, t)))
        message, trial = next(told, ("", None))
        counts = check.kind == "value" or value_is_right
        if check.kind == "value":
            value_is_right = value_is_right or not message
        elif not counts:
            message = message or "counts only with the right value"
        shown = shown or trial
        out_of = exercise.points * share(exercise, check)
        # a failed check earns a part of its points at most
        part = min(max(_tried(check.part, trials) or 0.0, 0.0), 0.99)
        points = out_of * (part if message and counts else not message)
        note = plain(message or tolerated(check, trials))
        findings.append(Finding(check.kind, check.says, not message, points, out_of, note))
    shown = shown or (trials[-1] if trials else None)
    verdict = ExerciseVerdict(exercise, findings, trials=list(trials), shown=shown)
    # one rank alone tells little: most mistakes look the same there
    alone = bool(early) and all(trial.world_size == 1 for trial in trials)
    if not (verdict.passed or verdict.not_written or alone):
        named = (m for m in exercise.misconceptions if _tried(m.seen, trials))
        verdict.misconception = next(named, None)
    return verdict


def _wrong(exercise: Exercise, check: Check, trial: Trial) -> str:
    """Return what is wrong in a trial that fails the check; "" if nothing is.

    An early end of a run only fails the check of the value, and so do a result that came without
    messages and a call that was never waited for.
    """
    if trial.error is not None:
        return f"{trial.case.label}: the run ended early" if check.kind == "value" else ""
    try:
        what = check.wrong(trial)
    except Exception as error:  # what a rank returns may be anything
        what = f"what the ranks returned can't be judged: {str(error)[:200] or error!r}"
    if check.kind == "value":
        what = what or too_few_bytes(exercise, trial) or never_waited(trial)
    return f"{trial.case.label}: {what}" if what else ""


def _tried(judge: Callable[[Sequence[Trial]], Any], trials: Sequence[Trial]) -> Any:
    """Return what a rule says of the trials; None if it can't: a rank may return anything."""
    with suppress(Exception):
        return judge(trials)
    return None


def share(exercise: Exercise, check: Check) -> float:
    """Return the part of the points that a check earns: that of its kind, or its share of that."""
    kinds = {other.kind for other in exercise.checks}
    of_kind = exercise.weights.get(check.kind, 1 / len(kinds))
    alike = sum(other.weight for other in exercise.checks if other.kind == check.kind)
    return of_kind * check.weight / alike
