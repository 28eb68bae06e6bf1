"""Results as JSON, and the tables and pages that are made of them.

result ──▶ results.csv                 points of a class, why points are missing, misconceptions
       ──▶ the class's table           in the terminal
       ──▶ Gradescope's results.json   a test for each exercise, with what the learner is told
       ──▶ a page of feedback          points, verdicts and pictures of the learner's own runs
rows   ──▶ a learner's table:

hw1_moving                                                    5 of 20 points
  ✓ 1   Ring shift             10 of 10
  ✗ 2   Flat broadcast          0 of 10   root hard-coded to 0
        homework/hw1_moving/pictures/broadcast_flat.html
  – 3   Mirror                 practice   not written yet
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.exercise_report import (
    STYLE,
    ExerciseVerdict,
    ReportRow,
    number,
)
from parallel101.laboratory.grade.homework import HomeworkSet
from parallel101.laboratory.grade.plain_text import cell, plain, write_whole
from parallel101.laboratory.record.units import sentence

# of one submission, as JSON: student, set, hash, points, out_of, complete, exercises, and a note on
# the choice of its file
Result = dict[str, Any]
Row = dict[str, Any]  # an exercise's result, with its set, the learner's file and the picture


def exercise_result(verdict: ExerciseVerdict, text: str = "") -> dict[str, Any]:
    """Return a verdict as JSON, with its report as text.

    A verdict without findings is that of an exercise that is not graded yet: no points.
    """
    exercise, mistake = verdict.exercise, verdict.misconception
    return {
        "number": exercise.number,
        "function": exercise.function,
        "title": exercise.title,
        "points": verdict.points,
        "out_of": exercise.points,
        "graded": bool(verdict.findings),
        "not_written": verdict.not_written,
        "reason": plain(verdict.reason),  # why points are missing, in a word or two
        "misconception": {"name": mistake.name, "says": mistake.says} if mistake else None,
        "problem": plain(verdict.problem),
        "text": text,  # what the learner reads about it
        "findings": [
            f._asdict() | {"points": round(f.points, 2), "out_of": round(f.out_of, 2)}
            for f in verdict.findings
        ],
        "seconds": round(verdict.seconds, 2),
    }


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


# ---- a class ----


def passed(entry: dict[str, Any]) -> bool:
    """Return whether everything holds in the result of an exercise."""
    return entry["graded"] and all(finding["passed"] for finding in entry["findings"])


def earned(entry: dict[str, Any]) -> float | str:
    """Return the points of one exercise in a result; for optional practice, "done" or "–"."""
    return entry["points"] if entry["out_of"] else "done" if passed(entry) else "–"


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Write one line for each learner.

    It has for each exercise the points, why points are missing, and the misconception.
    """
    rows = []
    for result in results:
        row = {name: result[name] for name in ("student", "points", "out_of")}
        for entry in result["exercises"]:
            number, mistake = entry["number"], entry["misconception"] or {}
            row[f"{number} {'points' if entry['out_of'] else 'practice'}"] = earned(entry)
            row[f"{number} reason"] = entry.get("reason", "")  # not in results of an older version
            row[f"{number} misconception"] = mistake.get("name", "")
        rows.append({name: cell(value) for name, value in row.items()})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0] if rows else ("student", "points", "out_of"))
        writer.writeheader()
        writer.writerows(rows)


def class_table(results: Sequence[Result]) -> str:
    """Return the class as text: each learner's points by exercise, and the misconceptions.

    A learner with the same misconception in several exercises counts once.
    """
    if not results:
        return "no submissions"
    numbers = [entry["number"] for entry in results[0]["exercises"]]
    width = max(len(result["student"]) for result in results)
    lines = [" ".join([f"{'':<{width}}", *(f"{n:>6}" for n in numbers), "  total"])]
    for result in sorted(results, key=lambda result: (-result["points"], result["student"])):
        values = [earned(entry) for entry in result["exercises"]]
        points = [f"{v:>6}" if isinstance(v, str) else f"{v:>6g}" for v in values]
        lines.append(f"{result['student']:<{width}} {' '.join(points)} {result['points']:>7g}")
    mean = sum(result["points"] for result in results) / len(results)
    out_of = f"{mean:.1f} of {results[0]['out_of']:g} points on average"
    lines.append(f"{len(results)} submissions, {out_of}")
    seen: dict[str, set[tuple[str, str]]] = {}  # learners and exercises, by misconception
    for result in results:
        for entry in result["exercises"]:
            if mistake := entry["misconception"]:
                seen.setdefault(mistake["name"], set()).add((result["student"], entry["number"]))
    lines += ["", "Misconceptions, most frequent first:"] if seen else []
    count = len({result["student"] for result in results})
    have = {name: len({student for student, _ in pairs}) for name, pairs in seen.items()}
    for name in sorted(seen, key=lambda name: (-have[name], name)):
        found = sorted({number for _, number in seen[name]}, key=numbers.index)
        where = f"(exercise{'s' * (len(found) > 1)} {', '.join(found)})"
        lines.append(f"{have[name]:>6} of {count} learners: {name} {where}")
    notes = [f"{r['student']}: {r['note']}" for r in results if r.get("note")]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


# ---- Gradescope ----


def gradescope_results(result: Result) -> dict[str, Any]:
    """Return the content of /autograder/results/results.json.

    An exercise that is not graded yet has no points.
    """
    tests = [
        {
            "name": f"{e['title']}: {e['function']}{' (practice)' * (not e['out_of'])}",
            "number": e["number"],
            "score": e["points"],
            "max_score": e["out_of"],
            "status": "passed" if passed(e) else "failed",
            "output": exercise_text(e),
            "output_format": "text",
            "visibility": "visible",
        }
        for e in result["exercises"]
    ]
    said = f"{result['points']:g} of {result['out_of']:g} points\n{result['note']}".rstrip()
    return {"output": said, "stdout_visibility": "hidden", "tests": tests}


def exercise_text(entry: dict[str, Any]) -> str:
    """Return the text about one exercise that the learner gets."""
    ended = "not graded: the time for all exercises was over before"
    return entry["text"] or f"{entry['number']} · {entry['title']}: {entry['problem'] or ended}"


# ---- a learner's page of feedback ----


def write_page(
    path: Path, homework: HomeworkSet, result: Result, verdicts: Mapping[str, ExerciseVerdict]
) -> None:
    """Write the page of a graded submission, one HTML file that works offline: all, or nothing.

    There are no predictions in it: a learner keeps those. A full disk costs the page and no points.
    It is written when the class is graded again.

    Args:
        result: of submissions.grade_submission.
        verdicts: by function; none if nothing could be graded.
    """
    from parallel101.laboratory.publish.offline_page import offline_html  # loads what makes pages

    student, total = str(result["student"]), f"{number(result['points'])} of {result['out_of']:g}"
    said = result["note"] if verdicts else result["exercises"][0]["problem"]
    problem = f"<p>{escape(said)}</p>" if said else ""
    rows = ""
    for entry in result["exercises"]:
        points, mistake = "practice", entry["misconception"] or {"name": ""}
        if entry["out_of"]:
            points = f"{number(entry['points'])} of {entry['out_of']:g}"
        why = ": ".join(filter(None, (entry["reason"], mistake["name"])))
        row = ReportRow("answer", entry["title"], why and sentence(why), points, entry["number"])
        rows += f'<a href="#{entry["function"]}" style="all: unset">{row.html}</a>'
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


def title(homework: HomeworkSet) -> str:
    """Return the title of a set: the first heading of its notebook, or else its folder's name."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        for cell in json.loads(homework.notebook.read_text(encoding="utf-8"))["cells"]:
            for line in "".join(cell["source"]).splitlines():
                if line.startswith("# ") and cell["cell_type"] == "markdown":
                    return line.removeprefix("# ").strip()
    return homework.folder.name


# ---- a learner's own table ----


def row(verdict: ExerciseVerdict, homework: HomeworkSet, folder: Path) -> Row:
    """Return the row of a verdict, with the learner's file as it is called from `folder`."""
    return exercise_result(verdict) | {
        "set": homework.folder.name,
        "file": os.path.relpath(homework.code, folder),
        "picture": str(verdict.saved or ""),
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
