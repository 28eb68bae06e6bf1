"""The page of feedback that a learner gets back: points, verdicts and pictures of their own runs.

    Homework 1: moving data                         alice: 35 of 50 points
    1   Ring shift      10 of 10
    2a  Broadcast        0 of 10   deadlock: everyone sends first
    …
    each verdict as `check` shows it, with the picture of the run

It is one HTML file that works offline. There are no predictions in it: a learner keeps those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.exercise_report import (
    STYLE,
    ExerciseVerdict,
    ReportRow,
    capital,
    number,
)
from parallel101.laboratory.grade.homework import HomeworkSet
from parallel101.laboratory.grade.plain_text import write_whole
from parallel101.laboratory.publish.offline_page import offline_html


def write_page(
    path: Path,
    homework: HomeworkSet,
    result: dict[str, Any],
    verdicts: Mapping[str, ExerciseVerdict],
) -> None:
    """Write the page of a graded submission: all of it, or nothing.

    A full disk costs the page and no points. It is written when the class is graded again.

    Args:
        result: of submissions.grade_submission.
        verdicts: by function; none if nothing could be graded.
    """
    student, total = str(result["student"]), f"{number(result['points'])} of {result['out_of']:g}"
    said = result["note"] if verdicts else result["exercises"][0]["problem"]
    problem = f"<p>{escape(said)}</p>" if said else ""
    rows = "".join(
        f'<a href="#{entry["function"]}" style="all: unset">{_row(entry).html}</a>'
        for entry in result["exercises"]
    )
    body = "".join(
        f'<section id="{name}" style="margin-top: 40px">{verdict._repr_html_()}</section>'
        for name, verdict in verdicts.items()
    )
    heading = title(homework)
    page = offline_html(
        f"{heading}: {student}",
        f"<main><h1>{escape(heading)}</h1><p>{escape(student)}: <b>{total} points</b></p>"
        f"{problem}{STYLE}<section>{rows}</section>{body}</main>",
    )
    with suppress(OSError):
        write_whole(path, page)


def _row(entry: dict[str, Any]) -> ReportRow:
    points = f"{number(entry['points'])} of {entry['out_of']:g}" if entry["out_of"] else "practice"
    mistake = entry["misconception"]
    why = ": ".join(filter(None, (entry["reason"], mistake["name"] if mistake else "")))
    return ReportRow("answer", entry["title"], capital(why), points, entry["number"])


def title(homework: HomeworkSet) -> str:
    """Return the title of a set: the first heading of its notebook, or else its folder's name."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        for cell in json.loads(homework.notebook.read_text(encoding="utf-8"))["cells"]:
            for line in "".join(cell["source"]).splitlines():
                if line.startswith("# ") and cell["cell_type"] == "markdown":
                    return line.removeprefix("# ").strip()
    return homework.folder.name
