"""`check`, `hint` and `predict`: what a learner asks for, in a notebook, a terminal or with pytest.

    predict(hw1.ring_shift, sent=24)    records your numbers, to be shown next to those of the run
    check(hw1.ring_shift)               grades it: verdict, misconception, picture, points
    hint(hw1.ring_shift)                one more hint at each call, up to three; costs nothing

They grade the file on disk, in processes of their own. The function that the notebook's kernel
holds is not called. The progress is kept beside the file.
"""

from __future__ import annotations

import inspect
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.exercise import Case, Exercise, Trial, find
from parallel101.laboratory.grade.exercise_report import (
    Card,
    ExerciseVerdict,
    Prediction,
    ReportRow,
    ends_all,
    prediction_row,
)
from parallel101.laboratory.grade.grading import PUBLIC_SEED, grade_on, run_cases
from parallel101.laboratory.grade.handed_in import read
from parallel101.laboratory.grade.homework import HomeworkSet, Progress, find_sets, set_name
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.ipython import in_notebook

SHOWN_SECONDS = 20.0  # of wall time, for the runs that are only shown
FAILURES = 2  # checks that fail, before a hint is suggested


def check(function: Callable[..., Any]) -> None:
    """Grade a function of the homework as it is on disk.

    Shows the verdict, the points, and a picture of a run.

    Args:
        function: such as hw1.ring_shift, after `import hw1`.

    Raises:
        ValueError: no exercise asks for this function.
    """
    exercise, homework = exercise_of(function)
    verdict = check_file(exercise, homework)
    verdict.note = _note(function, homework.code)
    _show(verdict)


def hint(function: Callable[..., Any]) -> None:
    """Show one more hint than before, up to three.

    Hints cost nothing; how many were shown is recorded. Raises ValueError as check does.
    """
    exercise, homework = exercise_of(function)
    progress = Progress(homework.folder)
    total = len(exercise.hints)
    rung = min(progress.get(exercise.function, "hints", 0) + 1, total)
    progress.note(exercise.function, hints=rung, failed=0)
    given = [f"Hint {i} of {total}: {exercise.hints[i - 1]}" for i in range(1, rung + 1)]
    given = given or [f"{exercise.function} has no hints."]
    _show(Card(f"{exercise.function}: hints", [ReportRow("soft", text=text) for text in given]))


def predict(function: Callable[..., Any], **answers: Any) -> None:
    """Record what you expect of a run.

    What the run of your own code shows is shown beside it, once the code runs.

    Args:
        function: such as hw1.ring_shift.
        answers: by the names of the questions, e.g. sent=24, steps=1. "?" is no answer: then the
            question is shown, and no number.

    Raises:
        TypeError: the exercise has no question of that name.
        ValueError: as check.
    """
    exercise, homework = exercise_of(function)
    names = [question.name for question in exercise.questions]
    if unknown := [name for name in answers if name not in names]:
        raise TypeError(
            f"{exercise.function} has no question {unknown[0]!r}; it asks for: "
            f"{', '.join(names) or 'nothing'}"
        )
    progress = Progress(homework.folder)
    given = progress.get(exercise.function, "predictions", {})
    for name, value in answers.items():
        if value is not None and value is not ... and value != "?":  # in a form that JSON can hold
            given[name] = value if isinstance(value, int | float | str) else str(value)
    progress.note(exercise.function, predictions=given)
    with SubmissionRanks(exercise, read(homework.code, homework)) as ranks:
        shown, _ = predicted(ranks, progress)
    rows = [prediction_row(exercise, prediction) for prediction in shown]
    rows = rows or [ReportRow("soft", text=f"{exercise.function} asks for no prediction.")]
    _show(Card(f"{exercise.function}: predictions", rows))


def exercise_of(function: Callable[..., Any]) -> tuple[Exercise, HomeworkSet]:
    """Return the exercise that asks for a function, and its set.

    Raises ValueError if there is none.
    """
    name = getattr(function, "__name__", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if name is None or isinstance(function, types.ModuleType):
        raise ValueError(
            f"expected a function of the homework, such as hw1.ring_shift; got {function!r}"
        )
    file = getattr(module, "__file__", None)
    if file is None or module is None or module.__name__ == "__main__":
        raise ValueError(
            f"{name} is defined here, not in a file of the homework. Write it in the .py file, "
            f"which is what is graded; then import that file, and check its {name}"
        )
    path = Path(file)
    # a decorated function may have another name
    names = [attribute for attribute, value in vars(module).items() if value is function]
    try:
        (homework,) = find_sets(path)
    except FileNotFoundError:
        raise ValueError(
            f"there is no test_{path.name} beside {path}, so no exercise asks for {name}"
        ) from None
    return find(homework.exercises, name if name in names or not names else names[0]), homework


def _note(function: Callable[..., Any], path: Path) -> str:
    """Return a note if the kernel holds another version of the function than is on disk."""
    held = getattr(inspect.unwrap(function), "__code__", None)
    try:
        code = compile(path.read_text(encoding="utf-8-sig"), str(path), "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
        return ""  # the verdict says so
    on_disk = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    if held is None or _body(held) in [_body(c) for c in on_disk if c.co_name == held.co_name]:
        return ""
    return (
        f"This is the verdict on {path.name} as it is on disk. The kernel still holds the version "
        "that it imported before. That matters only if you call the functions here yourself: then "
        "restart the kernel, or run %load_ext autoreload and %autoreload 2 once."
    )


def _body(code: types.CodeType) -> list:
    """Return what a function does, without the numbers of its lines."""
    consts = (_body(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, *consts]


def _show(what: object) -> None:
    """Show something in a notebook; anywhere else, print it."""
    if in_notebook():
        from IPython.display import display

        display(what)
    else:
        print(what)


# ---- one exercise of a submission ----


def check_file(
    exercise: Exercise, homework: HomeworkSet, submission: Submission | None = None
) -> ExerciseVerdict:
    """Grade one exercise as its file is now, or as it was when it was read, and draw it.

    The progress and the picture are written beside the file.

    Raises NoSubmission, a ValueError, if the file can't be read.
    """
    submission = submission or read(homework.code, homework)
    progress = Progress(homework.folder)
    verdict = report_on(exercise, submission, progress=progress)
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
