"""What ended a learner's run early, in words for the learner.

It may be a deadlock, an exception, a time limit, or a call that is not allowed.
"""

from __future__ import annotations

from parallel101.grade.exercise import Exercise, Trial
from parallel101.grade.remote import (
    MOST_PRINTED,
    ForbiddenCall,
    LearnerError,
    PrintedTooMuch,
    RankDied,
    TimeOver,
)
from parallel101.record.where import shown


def explain_error(exercise: Exercise, trial: Trial) -> str:
    """The text for `trial.error`, which is not None."""
    error, where = trial.error, f"with {trial.case.label}"
    if isinstance(error, LearnerError):
        if error.not_written:
            return f"{exercise.function} is not written yet"
        line = f", at {shown(error.where)}" if error.where != "?" else ""
        return (
            f"rank {error.rank} raised {error.kind}, {where}{line}\n  {error.kind}: {error.args[0]}"
        )
    if isinstance(error, ForbiddenCall):
        return (
            f"rank {error.rank} called {error.args[0]}, at {shown(error.where)}. This exercise "
            f"allows {', '.join(sorted(exercise.allowed))} only (and isend, irecv, "
            "batch_isend_irecv)"
        )
    if isinstance(error, TimeOver):
        return (
            f"rank {error.rank} was still running after {trial.case.seconds:g} s, {where}, at "
            f"{shown(error.where)}"
        )
    if isinstance(error, PrintedTooMuch):
        return (
            f"rank {error.rank} printed more than {MOST_PRINTED >> 20} MiB, {where}. Remove the "
            "print, or print less"
        )
    if isinstance(error, RankDied):
        reason = f": {error.args[0]}" if error.args[0] else ""
        return (
            f"rank {error.rank} ended without a result, {where}{reason}. Did the code call exit, "
            "or ask for too much memory?"
        )
    return f"{where}: {error}"
