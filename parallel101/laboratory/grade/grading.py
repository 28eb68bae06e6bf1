"""Grades one exercise of one submission.

It runs the cases, judges every check, names the misconception and counts the points.

cases ──▶ trials ──▶ a Finding for each check: passed, or the sentence that says what is wrong
                 └─▶ the first misconception that the trials show
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from parallel101.laboratory.grade.endings import (
    LOADING,
    GradedRunFailed,
    ends_all,
    explain_error,
    how_it_ended,
    in_short,
    reason_of,
)
from parallel101.laboratory.grade.exercise import (
    KINDS,
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Trial,
)
from parallel101.laboratory.grade.exercise_checks import (
    everywhere,
    first_wrong,
    never_waited,
    tolerated,
    too_few_bytes,
)
from parallel101.laboratory.grade.plain_text import plain
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks, not_run

# of the cases that everybody sees; a teacher's own seed is in no public file
PUBLIC_SEED = "parallel101"
# of wall time for all cases of an exercise; cases that have not run by then fail
EXERCISE_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """The verdict on one check."""

    kind: str
    says: str
    passed: bool
    points: float
    out_of: float
    message: str = ""  # what is wrong, and in which case; or what is tolerated, and why

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
    def cut_short(self) -> bool:
        """True if the last run ended in a way in which every other one would end too."""
        return bool(self.trials) and ends_all(self.trials[-1].error)

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def reason(self) -> str:
        """The reason why points are missing, in a word or two, for a class table; "" if none are.

        If a run ended early, it says how: "not written", "syntax error", "NameError", "time",
        "exit", "deadlock", "wrong call", …. Otherwise it says what fails: "wrong value", or "bytes,
        steps".
        """
        if self.shown is not None and self.shown.error is not None and not self.passed:
            no_function = f"has no function {self.exercise.function}" in str(self.shown.error)
            return "not written" if no_function else reason_of(self.shown)
        failed = [finding.kind for finding in self.findings if not finding.passed]
        # the others count only with the right value
        return "wrong value" if "value" in failed else ", ".join(dict.fromkeys(failed))


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
    ended = next((trial for trial in early if trial.world_size > 1), early[0] if early else None)
    not_written = ended is not None and how_it_ended(ended.error) == "not written"
    findings, shown = [], ended
    value_is_right = False
    for check in sorted(exercise.checks, key=lambda check: KINDS.index(check.kind)):
        out_of = exercise.points * share(exercise, check)
        message, trial = everywhere(check, trials, partial(in_short, exercise))
        counts = check.kind == "value" or value_is_right
        if check.kind == "value":
            for told in (partial(too_few_bytes, exercise), never_waited):
                if not message:
                    message, trial = first_wrong(trials, told)
            value_is_right = value_is_right or not message
        elif not counts:
            message = message or "counts only with the right value"
        shown = shown or trial
        points = out_of * (part_of(check, trials) if message and counts else not message)
        note = message or tolerated(check, trials)
        findings.append(Finding(check.kind, check.says, not message, points, out_of, note))
    # one rank alone tells little: most mistakes look the same there
    alone = bool(early) and all(trial.world_size == 1 for trial in trials)
    wrong = not all(finding.passed for finding in findings) and not not_written and not alone
    named = (m for m in exercise.misconceptions if wrong and _seen(m, trials))
    return ExerciseVerdict(
        exercise,
        findings,
        next(named, None),
        explain_error(exercise, ended) if ended is not None else "",
        not_written,
        list(trials),
        shown or (trials[-1] if trials else None),
    )


def part_of(check: Check, trials: Sequence[Trial]) -> float:
    """Return the part of its points that a failed check earns: from 0 to 0.99."""
    try:
        return min(max(check.part(trials), 0.0), 0.99)
    except Exception:  # what a rank returns may be anything
        return 0.0


def _seen(misconception: Misconception, trials: Sequence[Trial]) -> bool:
    try:
        return misconception.seen(trials)
    except Exception:  # what a rank returns may be anything
        return False


def share(exercise: Exercise, check: Check) -> float:
    """Return the part of the points that a check earns: that of its kind, or its share of that."""
    kinds = {other.kind for other in exercise.checks}
    of_kind = exercise.weights.get(check.kind, 1 / len(kinds))
    alike = sum(other.weight for other in exercise.checks if other.kind == check.kind)
    return of_kind * check.weight / alike
