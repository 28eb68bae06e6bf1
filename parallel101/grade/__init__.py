"""Grades homework: runs a learner's functions on ranks, and judges what the record shows.

    exercise.py    what an exercise is: cases, checks, misconceptions, hints (data)
    checks.py      the checks and misconceptions that many exercises share; and those that the exercises of one kind share:
                   sums.py, training.py (harness.py), tensor_parallel.py, pipeline.py
    rank.py        a rank that runs the learner's code                  ┐ frames.py: what they send each other
    remote.py      the grader's side: the rank's messages on the sim    ┘
    grading.py     cases run, checks judged, points
    learner.py     a verdict with a picture, the predictions and the progress (homework.py); report.py, picture.py: what is shown
    notebook.py    check, hint, predict

The grade is decided in a process that never runs the learner's code.

from parallel101.grade import check, hint, predict
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel101.grade.notebook import check, hint, predict

__all__ = ["check", "hint", "predict"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a rank that runs a learner's code needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module 'parallel101.grade' has no attribute {name!r}")
    from parallel101.grade import notebook

    return getattr(notebook, name)
