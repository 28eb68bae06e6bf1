"""A result as Gradescope reads it, and as GitHub Classroom does.

result ──▶ results.json: a test for each exercise, with its points and what the learner is told
"""

from __future__ import annotations

from typing import Any

from parallel101.laboratory.grade.submissions import Result


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
    ended = "not graded: the time for all exercises was over before"
    return entry["text"] or f"{entry['number']} · {entry['title']}: {entry['problem'] or ended}"
