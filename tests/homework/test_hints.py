"""The hints of an exercise lead to the solution, and don't contain it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from parallel101.laboratory.grade.homework import find_sets

SETS = sorted((Path(__file__).parents[2] / "homework").glob("hw*_*"))


def statements(hint: str) -> list[str]:
    """The parts of a text that are Python and do something: assign, return, or call."""
    found = []
    for part in re.split(r"[;:,.]\s+(?:and )?", f"{hint} "):
        try:
            nodes = ast.parse(part.strip()).body
        except SyntaxError:
            continue
        does = ast.Assign | ast.AugAssign | ast.Return
        calls = [node.value for node in nodes if isinstance(node, ast.Expr)]
        if any(isinstance(node, does) for node in nodes) or any(
            isinstance(call, ast.Call) and call.args for call in calls
        ):
            found.append(part)
    return found


def test_a_statement_is_found_in_a_text():
    assert statements("On the root: y = x.clone(); return y. Then dist.recv(y, 0).") == [
        "y = x.clone()",
        "return y",
    ]
    assert statements("Cut it with torch.tensor_split(x, n): which chunk is yours?") == []


@pytest.mark.parametrize("folder", SETS, ids=[folder.name for folder in SETS])
def test_no_hint_is_a_line_of_the_solution(folder):
    (homework,) = find_sets(folder)
    for exercise in homework.exercises:
        assert len(exercise.hints) == 3, exercise.function
        for hint in exercise.hints:
            assert statements(hint) == [], (exercise.function, hint)
