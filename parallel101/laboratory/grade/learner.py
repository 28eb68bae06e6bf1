"""Grades one exercise for its learner.

The learner gets the verdict, a picture of a run, and the predictions next to the run. The progress
is kept on disk.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.endings import ends_all
from parallel101.laboratory.grade.exercise import Case, Exercise, Trial
from parallel101.laboratory.grade.exercise_report import ExerciseVerdict, Prediction
from parallel101.laboratory.grade.grading import PUBLIC_SEED, grade_on, run_cases
from parallel101.laboratory.grade.handed_in import read
from parallel101.laboratory.grade.homework import HomeworkSet, Progress, set_name
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks
from parallel101.laboratory.record.errors import DeadlockError

SHOWN_SECONDS = 20.0  # of wall time, for the runs that are only shown
FAILURES = 2  # checks that fail, before a hint is suggested


def check_file(
    exercise: Exercise,
    homework: HomeworkSet,
    note: str = "",
    submission: Submission | None = None,
) -> ExerciseVerdict:
    """Grade one exercise as its file is now, or as it was when it was read, and draw it.

    The progress and the picture are written beside the file.

    Raises NoSubmission, a ValueError, if the file can't be read.
    """
    submission = submission or read(homework.code, homework)
    progress = Progress(homework.folder)
    verdict = report_on(exercise, submission, progress=progress)
    verdict.note = note
    if not verdict.not_written:
        verdict.suggestion = suggestion(verdict, progress)
        path = homework.folder / "pictures" / f"{exercise.function}.html"
        with suppress(OSError):  # the notebook shows the picture all the same
            path.unlink(missing_ok=True)
            if verdict.picture is not None:
                path.parent.mkdir(exist_ok=True)
                verdict.saved = verdict.picture.save(path)
    return verdict


def report_on(
    exercise: Exercise,
    submission: Submission,
    seed: str = PUBLIC_SEED,
    progress: Progress | None = None,
    drawn: bool = True,
) -> ExerciseVerdict:
    """Grade one exercise of a submission, and draw a run of it.

    With the learner's `progress`, the predictions in it are shown next to what was measured.
    """
    watched = None
    with SubmissionRanks(exercise, submission) as ranks:
        verdict = grade_on(ranks, seed)
        verdict.file = submission.path.name
        if drawn and not any(ends_all(trial.error) for trial in verdict.trials):
            case = exercise.watch() if exercise.watch is not None else None
            shown, watched = predicted(ranks, progress, case)
            verdict.predictions = shown if progress else ()
    if drawn and not verdict.not_written:
        with suppress(Exception):  # a picture that can't be drawn costs no points
            verdict.picture, verdict.caption = draw(verdict, watched)
    return verdict


def suggestion(verdict: ExerciseVerdict, progress: Progress) -> str:
    """Suggest the next hint if the exercise has failed several times since the last one."""
    exercise = verdict.exercise
    failed = 0 if verdict.passed else progress.get(exercise.function, "failed", 0) + 1
    progress.note(exercise.function, failed=failed)
    taken, total = progress.get(exercise.function, "hints", 0), len(exercise.hints)
    if failed < FAILURES or taken >= total:
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


def draw(verdict: ExerciseVerdict, watched: Trial | None) -> tuple[Any, str]:
    """Return the picture that shows most, or None if there is nothing to draw, and its caption.

    It shows who waits for whom, whose data is where, or what each rank did over time.

    Args:
        verdict: of the runs that counted.
        watched: the run of the exercise's `watch` case, if it has one.
    """
    # here, since they load all that draws
    from parallel101.laboratory.viz.collective import collective_scene
    from parallel101.laboratory.viz.pipeline_timeline import pipeline_scene
    from parallel101.laboratory.viz.timeline import lanes_scene

    exercise, shown = verdict.exercise, verdict.shown
    for trial in (shown, watched):
        if trial is not None and isinstance(trial.error, DeadlockError):
            return trial.error.picture(), f"The deadlock with {trial.case.label}:"
    trial = watched or shown
    if trial is None or trial.error is not None or not trial.trace.events:
        return None, ""
    # it may have more ranks or messages than a picture can show: then there is none
    if exercise.picture == "collective":
        scene = collective_scene(trial.trace, trial.results if watched else None, idle=True)
    else:
        over_time = {"lanes": lanes_scene, "pipeline": pipeline_scene}[exercise.picture]
        scene = over_time(trial.trace, title=exercise.title)
    return scene, f"Your run with {trial.case.label}:"
