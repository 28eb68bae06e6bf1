"""The table of points: one line for each exercise, its sum, and what to look at next.

For the command line and for pytest.

hw1_moving                                                    5 of 20 points
  ✓ 1   Ring shift             10 of 10
  ✗ 2   Flat broadcast          0 of 10   root hard-coded to 0
        homework/hw1_moving/pictures/broadcast_flat.html
  – 3   Mirror                 practice   not written yet
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.exercise_report import ExerciseReport, number
from parallel101.laboratory.grade.homework import HomeworkSet
from parallel101.laboratory.grade.submissions import exercise_result

Row = dict[str, Any]  # a result, with its set, the learner's file and the picture


def row(report: ExerciseReport, homework: HomeworkSet, folder: Path) -> Row:
    """Return the row of a report, with the learner's file as it is called from `folder`."""
    return exercise_result(report.verdict) | {
        "set": homework.folder.name,
        "file": os.path.relpath(homework.code, folder),
        "picture": str(report.saved or ""),
    }


def _state(r: Row) -> str:
    """Return what is missing in a few words: the mistake, or what fails; "" if all holds."""
    return r["misconception"]["name"] if r["misconception"] else r["reason"]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, set by set."""
    wide = max((len(r["title"]) for r in rows), default=0)
    lines = []
    for name in dict.fromkeys(r["set"] for r in rows):
        own = [r for r in rows if r["set"] == name]
        points, out_of = (number(sum(r[key] for r in own)) for key in ("points", "out_of"))
        lines.append(f"{name}: {points} of {out_of} points")
        for r in own:
            state, counts = _state(r), r["out_of"]
            earned = f"{number(r['points'])} of {number(counts)}" if counts else "practice"
            mark = "✓" if not state else "✗" if counts else "–"
            line = f"  {mark} {r['number']:<4}{r['title']:<{wide}}  {earned:>12}   {state}"
            lines.append(line.rstrip())
            lines += [f"        {r['picture']}"] if r["picture"] and state else []
    return "\n".join(lines)


def next_to_do(rows: Sequence[Row]) -> str:
    """Return what to look at next: the first exercise that lacks points, or the practice left."""
    for r in rows:
        if r["points"] < r["out_of"]:
            return f"Next: {r['number']} · {r['title']}. It is {r['function']} in {r['file']}."
    left = [r["number"] for r in rows if _state(r)]
    return "Every exercise has full points." + f" Practice left: {', '.join(left)}." * bool(left)
