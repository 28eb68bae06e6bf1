"""Why an exercise lacks points, in a word or two, for the table of a class.

not handed in      no Python file, notebook   time        a rank was still running at the limit
wrong file name    none has the functions     exit        a rank's process ended without a result
not readable       a file that can't be read
not written        still the stub, or missing deadlock    ranks wait for each other
syntax error       the file doesn't compile   wrong call  an operation not allowed, or misused
NameError, …       an exception               wrong value; bytes, steps, …: these fail
"""

from __future__ import annotations

from parallel101.laboratory.grade.grading import ExerciseVerdict
from parallel101.laboratory.grade.remote import (
    ForbiddenCall,
    LearnerError,
    NotStarted,
    PrintedTooMuch,
    RankDied,
    TimeOver,
)
from parallel101.laboratory.record.errors import DeadlockError

NOT_GRADED = "not graded"
SYNTAX = ("SyntaxError", "IndentationError", "TabError")
ENDED = {
    TimeOver: "time",
    NotStarted: "time",
    RankDied: "exit",
    PrintedTooMuch: "printed too much",
    DeadlockError: "deadlock",
    ForbiddenCall: "wrong call",
}


def reason(verdict: ExerciseVerdict) -> str:
    """Why this exercise lacks points; "" if it has all of them."""
    if verdict.passed:
        return ""
    if verdict.not_written:
        return "not written"
    error = verdict.shown.error if verdict.shown is not None else None
    if isinstance(error, LearnerError):
        if f"has no function {verdict.exercise.function}" in str(error):
            return "not written"
        if error.kind in SYNTAX:
            return "syntax error"
        return "exit" if error.kind == "SystemExit" else error.kind
    if error is not None:
        return next((name for kind, name in ENDED.items() if isinstance(error, kind)), "wrong call")
    failed = [finding.kind for finding in verdict.findings if not finding.passed]
    # the others count only with the right value
    return "wrong value" if "value" in failed else ", ".join(dict.fromkeys(failed))
