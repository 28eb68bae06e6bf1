"""Grades one exercise for its learner.

The learner gets the verdict, a picture of a run, and the predictions next to the run. The progress
is kept on disk.
"""

from __future__ import annotations

import ast
import hashlib
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.exercise import Case, Exercise, Trial
from parallel101.laboratory.grade.exercise_report import ExerciseReport, Prediction, Predictions
from parallel101.laboratory.grade.grading import ExerciseVerdict, grade_on, run_cases
from parallel101.laboratory.grade.homework import HomeworkSet, Progress, set_name
from parallel101.laboratory.grade.picture import SHOWN_SECONDS, draw
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks
from parallel101.laboratory.grade.submissions import read

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
    with SubmissionRanks(exercise, submission) as ranks:
        verdict = grade_on(ranks)
        report = ExerciseReport(verdict, homework.code.name, note)
        watched_trial = None
        if not verdict.cut_short:
            watched = exercise.watch() if exercise.watch is not None else None
            report.predictions, watched_trial = predicted(ranks, progress, watched)
    if not verdict.not_written:
        report.picture = draw(verdict, watched_trial)
        report.saved = _save(report, progress)
    others = {other.function for other in homework.exercises} - {exercise.function}
    report.suggestion = suggestion(verdict, progress, version(submission.source, others))
    progress.note(
        exercise.function,
        points=verdict.points,
        out_of=verdict.out_of,
        misconception=verdict.misconception.name if verdict.misconception else "",
        checks=progress.get(exercise.function, "checks", 0) + 1,
        checked=datetime.now().astimezone().isoformat(timespec="seconds"),
    )
    return report


def suggestion(verdict: ExerciseVerdict, progress: Progress, source: str) -> str:
    """Suggest the next hint if two versions of the code have failed since the last hint.

    A version counts once, however often and by whichever command it is checked. `source` says
    which version it is.
    """
    exercise = verdict.exercise
    if verdict.not_written:
        return ""
    before = [] if verdict.passed else progress.get(exercise.function, "failed", [])
    failed = [*before, *([] if verdict.passed or source in before else [source])][-FAILURES:]
    progress.note(exercise.function, failed=failed)
    taken, total = progress.get(exercise.function, "hints", 0), len(exercise.hints)
    if len(failed) < FAILURES or taken >= total:
        return ""
    call = f"hint({set_name(Path(exercise.path))}.{exercise.function})"
    return f"Stuck? In the notebook, {call} shows hint {taken + 1} of {total}. It costs nothing."


def version(source: str, others: set[str]) -> str:
    """Return a hash of a file's code, without the functions and classes `others`.

    Those belong to other exercises.
    """
    try:
        nodes = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        told = source
    else:
        kinds = ast.FunctionDef | ast.ClassDef
        told = "".join(
            ast.dump(node)
            for node in nodes
            if not (isinstance(node, kinds) and node.name in others)
        )
    return hashlib.sha256(told.encode(errors="replace")).hexdigest()[:16]


def predicted(
    ranks: SubmissionRanks, progress: Progress, watched: Case | None = None
) -> tuple[Predictions | None, Trial | None]:
    """Return the learner's predictions next to what the run shows.

    Nothing is measured that was not predicted. Also runs the case `watched`.
    """
    exercise = ranks.exercise
    said = progress.get(exercise.function, "predictions", {})
    asked = {
        question.name: question.case() for question in exercise.questions if question.name in said
    }
    cases = [*asked.values(), *([watched] if watched is not None else [])]  # these are only shown
    ran = {
        id(trial.case): trial for trial in run_cases(ranks, cases, time.monotonic() + SHOWN_SECONDS)
    }
    found = []
    for question in exercise.questions:
        trial = ran.get(id(asked.get(question.name)))
        measured = question.measured(trial) if trial is not None and trial.error is None else None
        found.append(
            Prediction(
                question.name, question.ask, question.unit, said.get(question.name), measured
            )
        )
    return Predictions(exercise, found) if found else None, ran.get(id(watched))


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
        name: value
        for name, value in answers.items()
        if value is not None and value is not ... and value != "?"
    }
    # what JSON can hold
    plain = {
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in given.items()
    }
    if plain:
        progress.note(
            exercise.function,
            predictions={**progress.get(exercise.function, "predictions", {}), **plain},
        )


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
