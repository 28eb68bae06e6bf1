"""`check`, `hint` and `predict`: a homework notebook calls them with the learner's functions.

    predict(hw1.ring_shift, sent=24)    records your numbers, to be shown next to those of the run
    check(hw1.ring_shift)               grades it: verdict, misconception, picture, points
    hint(hw1.ring_shift)                one more hint at each call, up to three; costs nothing

They grade the file on disk, in processes of their own. The function that the notebook's kernel
holds is not called.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.exercise import Exercise, find
from parallel101.laboratory.grade.exercise_report import Card, ReportRow, prediction_row
from parallel101.laboratory.grade.handed_in import read
from parallel101.laboratory.grade.homework import HomeworkSet, Progress, find_sets
from parallel101.laboratory.grade.learner import check_file, predicted
from parallel101.laboratory.grade.remote import SubmissionRanks
from parallel101.laboratory.record.ipython import in_notebook


def check(function: Callable[..., Any]) -> None:
    """Grade a function of the homework as it is on disk.

    Shows the verdict, the points, and a picture of a run.

    Args:
        function: such as hw1.ring_shift, after `import hw1`.

    Raises:
        ValueError: no exercise asks for this function.
    """
    exercise, homework = exercise_of(function)
    _show(check_file(exercise, homework, _note(function, homework.code)))


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
