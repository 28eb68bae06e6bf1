"""Grades one exercise for its learner.

The learner gets the verdict, a picture of a run, and the predictions next to the run. The progress
is kept on disk.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.exercise import Case, Exercise, Trial
from parallel101.laboratory.grade.exercise_report import ExerciseReport, Prediction
from parallel101.laboratory.grade.grading import PUBLIC_SEED, ExerciseVerdict, grade_on, run_cases
from parallel101.laboratory.grade.handed_in import read
from parallel101.laboratory.grade.homework import HomeworkSet, Progress, set_name
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks

SHOWN_SECONDS = 20.0  # of wall time, for the runs that are only shown
FAILURES = 2  # of different versions of the code, before a hint is suggested


def check_file(
    exercise: Exercise,
    homework: HomeworkSet,
    note: str = "",
    submission: Submission | None = None,
) -> ExerciseReport:
    """Grade one exercise as its file is now, or as it was when it was read, and draw it.

    The progress and the picture are written beside the file.

    Raises NoSubmission, a ValueError, if the file can't be read.
    """
    submission = submission or read(homework.code, homework)
    progress = Progress(homework.folder)
    report = report_on(exercise, submission, progress=progress)
    report.note, verdict = note, report.verdict
    if not verdict.not_written:
        report.saved = _save(report, progress)
    report.suggestion = suggestion(verdict, progress, submission.source)
    progress.note(
        exercise.function,
        points=verdict.points,
        out_of=verdict.out_of,
        misconception=verdict.misconception.name if verdict.misconception else "",
        checks=progress.get(exercise.function, "checks", 0) + 1,
        checked=datetime.now().astimezone().isoformat(timespec="seconds"),
    )
    return report


def report_on(
    exercise: Exercise,
    submission: Submission,
    seed: str = PUBLIC_SEED,
    progress: Progress | None = None,
    drawn: bool = True,
) -> ExerciseReport:
    """Grade one exercise of a submission, and draw a run of it.

    With the learner's `progress`, the predictions in it are shown next to what was measured.
    """
    watched = None
    with SubmissionRanks(exercise, submission) as ranks:
        report = ExerciseReport(grade_on(ranks, seed), submission.path.name)
        if drawn and not report.verdict.cut_short:
            case = exercise.watch() if exercise.watch is not None else None
            shown, watched = predicted(ranks, progress, case)
            report.predictions = shown if progress else ()
    if drawn and not report.verdict.not_written:
        from parallel101.laboratory.grade.picture import draw  # loads all that draws

        with suppress(Exception):  # a picture that can't be drawn costs no points
            report.picture = draw(report.verdict, watched)
    return report


def suggestion(verdict: ExerciseVerdict, progress: Progress, source: str) -> str:
    """Suggest the next hint if two versions of the file have failed since the last hint.

    A version counts once, however often and by whichever command it is checked.
    """
    exercise = verdict.exercise
    if verdict.not_written:
        return ""
    version = hashlib.sha256(source.encode(errors="replace")).hexdigest()[:16]
    before = [] if verdict.passed else progress.get(exercise.function, "failed", [])
    failed = [*before, *([] if verdict.passed or version in before else [version])][-FAILURES:]
    progress.note(exercise.function, failed=failed)
    taken, total = progress.get(exercise.function, "hints", 0), len(exercise.hints)
    if len(failed) < FAILURES or taken >= total:
        return ""
    call = f"hint({set_name(Path(exercise.path))}.{exercise.function})"
    return f"Stuck? In the notebook, {call} shows hint {taken + 1} of {total}. It costs nothing."


def predicted(
    ranks: SubmissionRanks, progress: Progress | None, watched: Case | None = None
) -> tuple[list[Prediction], Trial | None]:
    """Return the learner's predictions next to what the run shows.

    Nothing is measured that was not predicted. Also runs the case `watched`.
    """
    exercise = ranks.exercise
    said = progress.get(exercise.function, "predictions", {}) if progress else {}
    asked = {q.name: q.case() for q in exercise.questions if q.name in said}
    cases = [*asked.values(), *([watched] if watched is not None else [])]  # these are only shown
    trials = run_cases(ranks, cases, time.monotonic() + SHOWN_SECONDS)
    ran = {id(trial.case): trial for trial in trials}
    found = []
    for question in exercise.questions:
        trial = ran.get(id(asked.get(question.name)))
        measured = question.measured(trial) if trial is not None and trial.error is None else None
        found.append(Prediction(question, said.get(question.name), measured))
    return found, ran.get(id(watched))


def record_prediction(exercise: Exercise, progress: Progress, answers: dict[str, Any]) -> None:
    """Write down what the learner expects. Raises TypeError if the exercise does not ask for it."""
    names = [question.name for question in exercise.questions]
    for name in answers:
        if name not in names:
            raise TypeError(
                f"{exercise.function} has no question {name!r}; it asks for: "
                f"{', '.join(names) or 'nothing'}"
            )
    given = {
        # what JSON can hold
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in answers.items()
        if value is not None and value is not ... and value != "?"
    }
    if given:
        before = progress.get(exercise.function, "predictions", {})
        progress.note(exercise.function, predictions=before | given)


def _save(report: ExerciseReport, progress: Progress) -> Path | None:
    """Write the picture, and return its file, or None if it can't be written.

    The notebook shows the picture all the same.
    """
    path = progress.picture_path(report.verdict.exercise.function)
    try:
        if report.picture is None:
            path.unlink(missing_ok=True)
            return None
        path.parent.mkdir(exist_ok=True)
        return report.picture.scene.save(path)
    except OSError:
        return None
