"""Early ends of a run of the learner's code, in words for the learner and for the table.

A GradedRunFailed says how a run ended, as a key of ENDINGS, which has the words: a deadlock, an
exception of the learner's, a time limit, a call that is not allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.grade.exercise import Exercise, Trial
from parallel101.laboratory.grade.exercise_checks import rank_missing
from parallel101.laboratory.record.errors import DeadlockError, MisuseError
from parallel101.laboratory.record.program_lines import shown

MOST_PRINTED = 1 << 20  # bytes that a rank may print
MOST_SAID = 600  # characters of a learner's own error
SYNTAX = dict.fromkeys(("SyntaxError", "IndentationError", "TabError"), "syntax error")
LOADING = "while loading"  # in place of an exception's type, if the time was over before
NOT_LOADED = (*SYNTAX, "ImportError", "ModuleNotFoundError")  # the file itself can't be run
REASONS = SYNTAX | {"SystemExit": "exit"}  # in place of the exception's type


class Ending(NamedTuple):
    """How a run may end early.

    Attributes:
        reason: a word or two for the table of a class.
        text: for the learner.
        ends_all: each other run would end so too.
    """

    reason: str
    text: str = "{where}: {what}{missing}"
    ends_all: bool = False


ENDINGS = {
    "raised": Ending("{kind}", "rank {rank} raised {kind}, {where}{at}\n  {kind}: {what}"),
    "not loaded": Ending("{kind}", "the file can't be loaded{at}\n  {kind}: {what}", True),
    "not written": Ending("not written", "{function} is not written yet", True),
    "not allowed": Ending(
        "wrong call",
        "rank {rank} called {what}, which is not allowed here{at}. This exercise allows {allowed} "
        "only (and isend, irecv, batch_isend_irecv)",
        True,
    ),
    "time": Ending("time", "rank {rank} was still running after {seconds:g} s, {where}{at}", True),
    "died": Ending(
        "exit",
        "rank {rank} ended without a result, {where}{why}. Did the code call exit, or ask for too "
        "much memory?",
    ),
    "not run": Ending("time"),
    "printed": Ending(
        "printed too much",
        f"rank {{rank}} printed more than {MOST_PRINTED >> 20} MiB, {{where}}. Remove the print, "
        "or print less",
        True,
    ),
    "deadlock": Ending("deadlock"),
    "misuse": Ending("wrong call"),
    "failed": Ending("wrong call"),
}


class GradedRunFailed(Exception):
    """A run of the learner's code ended early.

    Attributes:
        how: a key of ENDINGS.
        rank, where: whose run it was, and the line; None and "?" if that isn't known.
        kind: the type of the learner's exception, or LOADING.
        calls: the calls that led to it, in words.
    """

    def __init__(
        self,
        how: str,
        message: str = "",
        rank: int | None = None,
        where: str = "?",
        kind: str = "",
        calls: Sequence[str] = (),
    ):
        super().__init__(message)
        self.how, self.rank, self.where, self.kind, self.calls = how, rank, where, kind, calls


def how_it_ended(error: BaseException | None) -> str:
    """Return the key in ENDINGS for an error of a trial; "" for None."""
    if isinstance(error, GradedRunFailed):
        return error.how
    if isinstance(error, DeadlockError):
        return "deadlock"
    return "misuse" if isinstance(error, MisuseError) else "failed" if error else ""


def ends_all(error: BaseException | None) -> bool:
    """Return whether more runs would tell nothing new, and only take long."""
    return error is not None and ENDINGS[how_it_ended(error)].ends_all


def explain_error(exercise: Exercise, trial: Trial) -> str:
    """Return the text for `trial.error`, which is not None."""
    error, what = trial.error, str(trial.error)
    kind, where = getattr(error, "kind", ""), getattr(error, "where", "?")
    if kind and len(what) > MOST_SAID:
        what = f"{what[:MOST_SAID]} …"
    rest = "\n  every rank must call the same collectives, in the same order"
    return ENDINGS[how_it_ended(error)].text.format(
        rank=getattr(error, "rank", None),
        seconds=trial.case.seconds,
        where=f"with {trial.case.label}",
        at=f", at {shown(where)}" if where != "?" else "",
        kind=kind,
        what=what,
        why=f": {what}" if what else "",
        missing=rest if rank_missing(error) else "",
        function=exercise.function,
        allowed=", ".join(sorted(exercise.allowed)),
    )


def reason_of(trial: Trial) -> str:
    """Return in a word or two why the run ended."""
    kind = getattr(trial.error, "kind", "")
    return ENDINGS[how_it_ended(trial.error)].reason.format(kind=REASONS.get(kind, kind))
