"""Early ends of a run of the learner's code, in words for the learner and for the table.

An ending is an exception: a deadlock, an exception of the learner's, a time limit, a call that is
not allowed. `short` and `long` are its texts for the learner, and `reason` is a word or two for the
table of a class.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel101.laboratory.grade.exercise import Exercise, Trial
from parallel101.laboratory.grade.exercise_checks import rank_missing
from parallel101.laboratory.record.errors import DeadlockError, MisuseError
from parallel101.laboratory.record.program_lines import shown

MOST_PRINTED = 1 << 20  # bytes that a rank may print
MOST_SAID = 600  # characters of a learner's own error
SYNTAX = ("SyntaxError", "IndentationError", "TabError")
NOT_LOADED = (*SYNTAX, "ImportError", "ModuleNotFoundError")  # the file itself can't be run


class GradedRunFailed(Exception):
    """A run of the learner's code ended early. `rank` is the rank it was, or None."""

    reason, ends_all = "wrong call", False  # ends_all: each other run would end so too
    short, long = "the run ended early", "{where}: {what}{missing}"

    def __init__(self, message: str, rank: int | None = None, where: str = "?"):
        super().__init__(message)
        self.rank, self.where = rank, where


class LearnerError(GradedRunFailed):
    """The learner's code raised an exception: `kind` is its type, `calls` led there, in words."""

    def __init__(
        self,
        message: str,
        rank: int,
        where: str,
        kind: str,
        calls: Sequence[str] = (),
        not_written: bool = False,
    ):
        super().__init__(message, rank, where)
        self.kind, self.calls, self.not_written = kind, calls, not_written
        loaded = kind not in NOT_LOADED
        self.ends_all = not_written or not loaded
        self.reason = "syntax error" if kind in SYNTAX else "exit" if kind == "SystemExit" else kind
        self.short = "rank {rank} raised {kind}" if loaded else "the file can't be loaded: {kind}"
        who = "rank {rank} raised {kind}, {where}" if loaded else "the file can't be loaded"
        at = ", at {place}" if where != "?" else ""
        self.long = f"{who}{at}\n  {{kind}}: {{what}}"
        if not_written:
            self.reason, self.short = "not written", "not written yet"
            self.long = "{function} is not written yet"


class ForbiddenCall(GradedRunFailed):
    """The learner's code called an operation that the exercise does not allow."""

    ends_all = True
    short = "rank {rank} called {what}, which is not allowed here"
    long = (
        "rank {rank} called {what}, at {place}. This exercise allows {allowed} only (and isend, "
        "irecv, batch_isend_irecv)"
    )


class TimeOver(GradedRunFailed):
    """A rank was still running at the time limit; `loading`: at the top level of its file."""

    reason, ends_all, loading = "time", True, False
    short = "rank {rank} was still running after {seconds:g} s"
    long = f"{short}, {{where}}, at {{place}}"


class RankDied(GradedRunFailed):
    """A rank's process ended without a result."""

    reason, short = "exit", "rank {rank} ended without a result"
    long = f"{short}, {{where}}{{why}}. Did the code call exit, or ask for too much memory?"


class NotStarted(GradedRunFailed):
    """A case was not run: its processes did not start, or the time for the exercise was over."""

    reason, short = "time", "it was not run"


class PrintedTooMuch(GradedRunFailed):
    """A rank printed more than MOST_PRINTED bytes."""

    reason, ends_all, short = "printed too much", True, "rank {rank} printed too much"
    long = (
        f"rank {{rank}} printed more than {MOST_PRINTED >> 20} MiB, {{where}}. Remove the print, "
        "or print less"
    )


class _Deadlock(GradedRunFailed):
    reason, short = "deadlock", "deadlock, so the run did not end"


class _Misuse(GradedRunFailed):
    short = "a wrong call ended the run"


def _ending(error: BaseException | None) -> GradedRunFailed:
    """Return the error with texts for a learner, which errors of the record don't have."""
    if isinstance(error, GradedRunFailed):
        return error
    if isinstance(error, DeadlockError):
        return _Deadlock(str(error))
    return (_Misuse if isinstance(error, MisuseError) else GradedRunFailed)(str(error))


def in_short(trial: Trial) -> str:
    """Return `trial.error`, which is not None, in a few words. `explain_error` says the rest."""
    ending = _ending(trial.error)
    what = _filled(ending.short, trial)
    of_file = isinstance(ending, LearnerError) and ending.ends_all
    return what if of_file else f"{trial.case.label}: {what}"


def explain_error(exercise: Exercise, trial: Trial) -> str:
    """Return the text for `trial.error`, which is not None."""
    return _filled(_ending(trial.error).long, trial, exercise)


def reason_of(trial: Trial) -> str:
    """Return in a word or two why the run ended."""
    return _ending(trial.error).reason


def _filled(text: str, trial: Trial, exercise: Exercise | None = None) -> str:
    ending = _ending(trial.error)
    what = str(ending)
    if isinstance(ending, LearnerError) and len(what) > MOST_SAID:
        what = f"{what[:MOST_SAID]} …"
    rest = "\n  every rank must call the same collectives, in the same order"
    return text.format(
        rank=ending.rank,
        seconds=trial.case.seconds,
        where=f"with {trial.case.label}",
        place=shown(ending.where),
        kind=getattr(ending, "kind", ""),
        what=what,
        why=f": {what}" if what else "",
        missing=rest if rank_missing(trial.error) else "",
        function=exercise.function if exercise else "",
        allowed=", ".join(sorted(exercise.allowed)) if exercise else "",
    )
