"""What ended a learner's run early, in words for the learner.

It may be a deadlock, an exception, a time limit, or a call that is not allowed.
"""

from __future__ import annotations

from parallel101.laboratory.grade.exercise import Exercise, Trial
from parallel101.laboratory.grade.exercise_checks import rank_missing
from parallel101.laboratory.grade.remote import (
    MOST_PRINTED,
    ForbiddenCall,
    LearnerError,
    NotStarted,
    PrintedTooMuch,
    RankDied,
    TimeOver,
)
from parallel101.laboratory.record.errors import DeadlockError, MisuseError
from parallel101.laboratory.record.program_lines import shown

MOST_SAID = 600  # characters of a learner's own error
# the file itself can't be run
NOT_LOADED = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")


def in_short(trial: Trial) -> str:
    """`trial.error`, which is not None, in a few words. `explain_error` says the rest."""
    error = trial.error
    if isinstance(error, LearnerError) and error.not_written:
        return "not written yet"
    if isinstance(error, LearnerError) and error.kind in NOT_LOADED:
        return f"the file can't be loaded: {error.kind}"
    if isinstance(error, LearnerError):
        what = f"rank {error.rank} raised {error.kind}"
    elif isinstance(error, ForbiddenCall):
        what = f"rank {error.rank} called {error.args[0]}, which is not allowed here"
    elif isinstance(error, TimeOver):
        what = f"rank {error.rank} was still running after {trial.case.seconds:g} s"
    elif isinstance(error, PrintedTooMuch):
        what = f"rank {error.rank} printed too much"
    elif isinstance(error, RankDied):
        what = f"rank {error.rank} ended without a result"
    elif isinstance(error, NotStarted):
        what = "it was not run"
    elif isinstance(error, DeadlockError):
        what = "deadlock, so the run did not end"
    elif isinstance(error, MisuseError):
        what = "a wrong call ended the run"
    else:
        what = "the run ended early"
    return f"{trial.case.label}: {what}"


def explain_error(exercise: Exercise, trial: Trial) -> str:
    """The text for `trial.error`, which is not None."""
    error, where = trial.error, f"with {trial.case.label}"
    if isinstance(error, LearnerError):
        if error.not_written:
            return f"{exercise.function} is not written yet"
        line = f", at {shown(error.where)}" if error.where != "?" else ""
        who = (
            "the file can't be loaded"
            if error.kind in NOT_LOADED
            else f"rank {error.rank} raised {error.kind}, {where}"
        )
        message = (
            error.args[0] if len(error.args[0]) <= MOST_SAID else f"{error.args[0][:MOST_SAID]} …"
        )
        return f"{who}{line}\n  {error.kind}: {message}"
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
    missing = "\n  every rank must call the same collectives, in the same order"
    return f"{where}: {error}{missing if rank_missing(error) else ''}"
