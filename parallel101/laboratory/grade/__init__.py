"""Grades homework: runs a learner's functions on ranks, and judges what the record shows.

    exercise.py    what an exercise is: cases, checks, misconceptions, hints (data)
    exercise_checks.py, compared_values.py
                   the checks and misconceptions that many exercises share, and how values differ
    sums.py, adjoint_exercises.py, training_exercises.py (harness.py),
    tensor_parallel_exercises.py, pipeline_exercises.py
                   those that the exercises of one kind share
    rank.py, isolation.py
                   a rank that runs the learner's code, and what that code can't reach
    remote.py      the grader's side: the rank's messages on the sim
    frames.py      what rank.py and remote.py send each other
    grading.py     runs the cases, judges the checks and counts the points
    learner.py     adds a picture, the predictions and the progress (homework.py)
    exercise_report.py, picture.py
                   what the learner sees
    notebook.py    check, hint, predict

The grade is decided in a process that never runs the learner's code.

from parallel101.laboratory.grade import check, hint, predict
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel101.laboratory.grade.notebook import check, hint, predict

__all__ = ["check", "hint", "predict"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a rank that runs a learner's code needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module 'parallel101.laboratory.grade' has no attribute {name!r}")
    from parallel101.laboratory.grade import notebook

    return getattr(notebook, name)
