"""Optional practice is checked like any other exercise, and counts nowhere: not in the learner's
table, not in a class's, not in Gradescope.
"""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import pytest

from parallel101 import cli
from parallel101.laboratory.grade import command
from parallel101.laboratory.grade.grades import (
    class_table,
    gradescope_results,
    next_to_do,
    row,
    table,
    write_csv,
)
from parallel101.laboratory.grade.homework import HomeworkSet, find_sets, in_order
from parallel101.laboratory.grade.learner import check_file
from parallel101.laboratory.grade.submissions import empty_result, grade_submission
from tests.grade.test_submissions import FIRST, HEAD, RIGHT, STUB, TESTS, handed_in

BOTH = HEAD + RIGHT + RIGHT.replace("def swap", "def swap_again")
UNWRITTEN = "def swap_again(x):\n    raise NotImplementedError\n"


@pytest.fixture
def homework(tmp_path) -> HomeworkSet:
    """A set with one exercise for 4 points, 1a, and one of optional practice, 1j."""
    folder = tmp_path / "homework" / "hw9_swap"
    folder.mkdir(parents=True)
    practice = (
        'from dataclasses import replace\nEXERCISES[1] = replace(EXERCISES[1], number="1j", '
        'points=0)\nEXERCISES[0] = replace(EXERCISES[0], number="1a")\n'
    )
    (folder / "test_hw9.py").write_text(TESTS + practice)
    (folder / "hw9.py").write_text(STUB)
    return find_sets(folder)[0]


SOLUTIONS = {  # what is handed in, and whether the practice holds
    "not written": (HEAD + RIGHT + UNWRITTEN, False),
    "wrong": (HEAD + RIGHT + FIRST, False),
    "right": (BOTH, True),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_it_is_checked_and_counts_nowhere(homework, tmp_path, name):
    source, holds = SOLUTIONS[name]
    result = grade_submission(handed_in(tmp_path / "alice", {"hw9.py": source}), homework, "a seed")
    assert (result["points"], result["out_of"]) == (4, 4)
    _, practice = gradescope_results(result)["tests"]
    assert (practice["score"], practice["max_score"]) == (0, 0)
    assert practice["status"] == ("passed" if holds else "failed")
    assert practice["name"].endswith("(practice)") and " of 0" not in practice["output"]
    write_csv(tmp_path / "class.csv", [result])
    (line,) = csv.DictReader((tmp_path / "class.csv").read_text("utf-8").splitlines())
    assert line["1a points"] == "4.0" and line["points"] == "4.0"
    assert line["1j practice"] == ("done" if holds else "–") and "1j points" not in line
    assert f"4   {'done' if holds else '   –'}" in class_table([result])
    assert "4.0 of 4 points on average" in class_table([result])


def test_what_the_learner_sees(homework, tmp_path, capsys):
    for source, last in (
        (STUB, "Next: 1a"),
        (HEAD + RIGHT + FIRST, "Every exercise has full points. Practice left: 1j."),
        (BOTH, "Every exercise has full points."),
    ):
        homework.code.write_text(source)
        reports = [check_file(exercise, homework) for exercise in homework.exercises]
        rows = [row(report, homework, homework.folder) for report in reports]
        mark = "✓" if reports[1].passed else "–"
        assert f"  {mark} 1j  Swap      practice" in table(rows), table(rows)
        assert " of 4 points" in table(rows).splitlines()[0]
        assert next_to_do(rows).startswith(last) and (last[0] == "N" or next_to_do(rows) == last)
        for shown in (str(reports[1]), reports[1]._repr_html_()):
            assert "optional practice" in shown and " of 0" not in shown
    assert cli.main(["grade", str(homework.folder)]) == 0
    assert "✓ 1j  Swap      practice" in capsys.readouterr().out
    command.handed_in(homework.folder, handed_in(tmp_path / "bob", {"hw9.py": BOTH}))
    said = capsys.readouterr().out
    assert "1j · Swap: swap_again" in said and "optional practice" in said
    assert said.rstrip().endswith("4 of 4 points")


def test_with_pytest_unwritten_practice_is_skipped(homework, monkeypatch, capsys):
    root = homework.folder.parent
    shutil.copy(Path(__file__).parents[2] / "homework" / "conftest.py", root)
    monkeypatch.chdir(root)
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(root)]
    for source, code in ((HEAD + RIGHT + UNWRITTEN, 0), (HEAD + RIGHT + FIRST, 1)):
        homework.code.write_text(source)
        assert pytest.main([*options, "--import-mode=importlib", "hw9_swap"]) == code
        said = capsys.readouterr().out
        assert "– 1j  Swap      practice" in said and "1 passed" in said
        assert ("1 skipped" in said) == (code == 0)


def test_a_set_may_have_more_than_eight_parts():
    numbers = ["9k", "10", "9a", "8", "9j", "9i"]
    assert sorted(numbers, key=in_order) == ["8", "9a", "9i", "9j", "9k", "10"]


def test_without_a_grade_the_practice_is_not_done(homework, tmp_path):
    result = empty_result(Path("carol"), homework)
    assert [test["status"] for test in gradescope_results(result)["tests"]] == ["failed", "failed"]
