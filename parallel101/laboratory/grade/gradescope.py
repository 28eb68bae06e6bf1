"""A result as Gradescope reads it, and as GitHub Classroom does.

result ──▶ results.json: a test for each exercise, with its points and what the learner is told
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel101.laboratory.grade.submissions import Result, write_json


def gradescope_results(result: Result) -> dict[str, Any]:
    """Return the content of /autograder/results/results.json.

    An exercise that is not graded yet has no points.
    """
    return {
        "output": f"{result['points']:g} of {result['out_of']:g} points\n{result['note']}".rstrip(),
        "stdout_visibility": "hidden",
        "tests": [_test(entry) for entry in result["exercises"]],
    }


def _test(entry: dict[str, Any]) -> dict[str, Any]:
    passed = entry["graded"] and all(finding["passed"] for finding in entry["findings"])
    return {
        "name": f"{entry['title']}: {entry['function']}{' (practice)' * (not entry['out_of'])}",
        "number": entry["number"],
        "score": entry["points"],
        "max_score": entry["out_of"],
        "status": "passed" if passed else "failed",
        "output": exercise_text(entry),
        "output_format": "text",
        "visibility": "visible",
    }


def exercise_text(entry: dict[str, Any]) -> str:
    """Return the text about one exercise that the learner gets."""
    lines = []
    if entry["problem"]:
        lines.append(entry["problem"])
    elif not entry["graded"]:
        lines.append("not graded: the time for all exercises was over before")
    if not entry["not_written"]:
        for finding in entry["findings"]:
            mark = "✓" if finding["passed"] else "✗"
            points = f" ({finding['points']:g} of {finding['out_of']:g})" * bool(entry["out_of"])
            lines.append(f"{mark} {finding['kind']}: {finding['says']}{points}")
            if finding["message"]:
                lines.append(f"  {finding['message']}")
    if entry["misconception"]:
        name, says = entry["misconception"]["name"], entry["misconception"]["says"]
        lines.append(f"{name[0].upper()}{name[1:]}. {says}")
    return "\n".join(lines)


def write_gradescope(path: Path, result: Result) -> None:
    """Write results.json, always whole.

    If a time limit ends the grader, the last complete file remains.
    """
    write_json(path, gradescope_results(result))
