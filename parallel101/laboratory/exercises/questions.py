"""The questions that many exercises ask before a run: how many bytes, and how many steps?"""

from __future__ import annotations

from collections.abc import Callable

from parallel101.laboratory.grade.exercise import Case, Question, Trial
from parallel101.laboratory.grade.exercise_checks import communicated


def ask_sent(
    ask: str,
    case: Callable[[], Case],
    measured: Callable[[Trial], int] = lambda trial: max(communicated(trial)),
) -> Question:
    """Return a question about the bytes that a rank sends: by default, the busiest one."""
    return Question("sent", ask, case, measured, "bytes")


def ask_steps(ask: str, case: Callable[[], Case]) -> Question:
    """Return a question about the steps that a run takes."""
    return Question("steps", ask, case, lambda trial: int(trial.trace.makespan), "steps")
