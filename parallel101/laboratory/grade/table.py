"""The table of points: one line for each exercise, its sum, and what to look at next.

For the command line and for pytest.

hw1_moving                                                    5 of 20 points
  ✓ 1   Ring shift             10 of 10
  ✗ 2   Flat broadcast          0 of 10   root hard-coded to 0
        homework/hw1_moving/pictures/broadcast_flat.html
  – 3   Mirror                 practice   not written yet
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.grade.exercise_report import ExerciseReport, number
from parallel101.laboratory.record.errors import DeadlockError


class ExerciseRow(NamedTuple):
    """One exercise of one set, as the table shows it. All of it can be written as JSON."""

    set: str
    number: str
    title: str
    function: str
    file: str
    points: float
    out_of: float
    # in a few words: "not written yet", the misconception's name, or which properties fail; "" if
    # everything holds
    state: str
    picture: str


def row(report: ExerciseReport, folder: str, file: str) -> ExerciseRow:
    """Return the row of a report.

    `folder` is the set's name, and `file` the learner's file, as the table is to show it.
    """
    verdict = report.verdict
    exercise = verdict.exercise
    picture = str(report.saved) if report.saved is not None else ""
    return ExerciseRow(
        folder,
        exercise.number,
        exercise.title,
        exercise.function,
        file,
        verdict.points,
        verdict.out_of,
        _state(report),
        picture,
    )


def _state(report: ExerciseReport) -> str:
    verdict = report.verdict
    error = verdict.shown.error if verdict.shown is not None else None
    if verdict.passed:
        return ""
    if verdict.not_written:
        return "not written yet"
    if verdict.misconception is not None:
        return verdict.misconception.name
    if isinstance(error, DeadlockError):
        return "deadlock"
    if verdict.problem:
        return verdict.problem.splitlines()[0]
    return ", ".join(
        dict.fromkeys(finding.kind for finding in verdict.findings if not finding.passed)
    )


def table(rows: Sequence[ExerciseRow]) -> str:
    """Return the rows as text, set by set."""
    wide = max((len(r.title) for r in rows), default=0)
    lines = []
    for name in dict.fromkeys(r.set for r in rows):
        own = [r for r in rows if r.set == name]
        lines += [
            (
                f"{name}: {number(sum(r.points for r in own))} of "
                f"{number(sum(r.out_of for r in own))} points"
            )
        ]
        for r in own:
            earned = f"{number(r.points)} of {number(r.out_of)}" if r.out_of else "practice"
            mark = "✓" if not r.state else "✗" if r.out_of else "–"
            lines.append(
                (f"  {mark} {r.number:<4}{r.title:<{wide}}  {earned:>12}   {r.state}").rstrip()
            )
            lines += [f"        {r.picture}"] if r.picture and r.state else []
    return "\n".join(lines)


def next_to_do(rows: Sequence[ExerciseRow]) -> str:
    """Return what to look at next: the first exercise that lacks points, or the practice left."""
    for r in rows:
        if r.points < r.out_of:
            return f"Next: {r.number} · {r.title}. It is {r.function} in {r.file}."
    left = [r.number for r in rows if r.state]
    return "Every exercise has full points." + f" Practice left: {', '.join(left)}." * bool(left)
