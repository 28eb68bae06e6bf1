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
NOT_LOADED = (*SYNTAX, "ImportError", "ModuleNotFoundError")  # the file itself can't be run
REASONS = SYNTAX | {"SystemExit": "exit"}  # in place of the exception's type


class Ending(NamedTuple):
    """How a run may end early.

    Attributes:
        reason: a word or two for the table of a class.
        short, long: texts for the learner.
        ends_all: each other run would end so too.
    """

    reason: str
    short: str
    long: str
    ends_all: bool = False


LATE = "rank {rank} was still running after {seconds:g} s"
DIED = "rank {rank} ended without a result"
PRINTED = "rank {rank} printed too much"
OTHER = "{where}: {what}{missing}"
TIME = Ending("time", LATE, f"{LATE}, {{where}}, at {{place}}", True)
ENDINGS = {
    "raised": Ending(
        "{kind}",
        "rank {rank} raised {kind}",
        "rank {rank} raised {kind}, {where}{at}\n  {kind}: {what}",
    ),
    "not loaded": Ending(
        "{kind}",
        "the file can't be loaded: {kind}",
        "the file can't be loaded{at}\n  {kind}: {what}",
        True,
    ),
    "not written": Ending("not written", "not written yet", "{function} is not written yet", True),
    "not allowed": Ending(
        "wrong call",
        "rank {rank} called {what}, which is not allowed here",
        "rank {rank} called {what}, at {place}. This exercise allows {allowed} only (and isend, "
        "irecv, batch_isend_irecv)",
        True,
    ),
    "time": TIME,
    "time to load": TIME,  # at the top level of the file
    "died": Ending(
        "exit",
        DIED,
        f"{DIED}, {{where}}{{why}}. Did the code call exit, or ask for too much memory?",
    ),
    "not run": Ending("time", "it was not run", OTHER),
    "printed": Ending(
        "printed too much",
        PRINTED,
        f"rank {{rank}} printed more than {MOST_PRINTED >> 20} MiB, {{where}}. Remove the print, "
        "or print less",
        True,
    ),
    "deadlock": Ending("deadlock", "deadlock, so the run did not end", OTHER),
    "misuse": Ending("wrong call", "a wrong call ended the run", OTHER),
    "failed": Ending("wrong call", "the run ended early", OTHER),
}


class GradedRunFailed(Exception):
    """A run of the learner's code ended early.

    Attributes:
        how: a key of ENDINGS.
        rank, where: whose run it was, and the line; None and "?" if that isn't known.
        kind: the type of the learner's exception.
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
    for kind, how in ((DeadlockError, "deadlock"), (MisuseError, "misuse")):
        if isinstance(error, kind):
            return how
    return "" if error is None else "failed"


def ends_all(error: BaseException | None) -> bool:
    """Return whether more runs would tell nothing new, and only take long."""
    return error is not None and ENDINGS[how_it_ended(error)].ends_all


def in_short(trial: Trial) -> str:
    """Return `trial.error`, which is not None, in a few words. `explain_error` says the rest."""
    how = how_it_ended(trial.error)
    what = _filled(ENDINGS[how].short, trial)
    return what if how in ("not loaded", "not written") else f"{trial.case.label}: {what}"


def explain_error(exercise: Exercise, trial: Trial) -> str:
    """Return the text for `trial.error`, which is not None."""
    return _filled(ENDINGS[how_it_ended(trial.error)].long, trial, exercise)


def reason_of(trial: Trial) -> str:
    """Return in a word or two why the run ended."""
    kind = getattr(trial.error, "kind", "")
    return ENDINGS[how_it_ended(trial.error)].reason.format(kind=REASONS.get(kind, kind))


def _filled(text: str, trial: Trial, exercise: Exercise | None = None) -> str:
    error, what = trial.error, str(trial.error)
    kind, where = getattr(error, "kind", ""), getattr(error, "where", "?")
    if kind and len(what) > MOST_SAID:
        what = f"{what[:MOST_SAID]} …"
    rest = "\n  every rank must call the same collectives, in the same order"
    return text.format(
        rank=getattr(error, "rank", None),
        seconds=trial.case.seconds,
        where=f"with {trial.case.label}",
        place=shown(where),
        at=f", at {shown(where)}" if where != "?" else "",
        kind=kind,
        what=what,
        why=f": {what}" if what else "",
        missing=rest if rank_missing(error) else "",
        function=exercise.function if exercise else "",
        allowed=", ".join(sorted(exercise.allowed)) if exercise else "",
    )
