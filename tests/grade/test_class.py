"""What a teacher gets for a class: points, why points are missing, which mistakes are frequent, and
a page for each learner. Optional practice is checked, and counts nowhere.
"""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import pytest
import torch
from bs4 import BeautifulSoup

from parallel101 import cli
from parallel101.laboratory.grade import command, learner
from parallel101.laboratory.grade.compared_values import difference
from parallel101.laboratory.grade.exercise import Case, Check, Exercise, Trial
from parallel101.laboratory.grade.grades import class_table, gradescope_results, write_csv
from parallel101.laboratory.grade.grading import judge
from parallel101.laboratory.grade.homework import HomeworkSet, find_sets, in_order
from parallel101.laboratory.grade.submissions import grade_submission
from parallel101.laboratory.publish.page import external_addresses
from parallel101.laboratory.record.trace import Trace
from tests.grade.test_submissions import FIRST, HEAD, RIGHT, STUB, TESTS, handed_in

SWAP, AGAIN = "def swap(x):\n    ", "def swap_again(x):\n    "
CLASS = {  # what was handed in, and the reasons for its points
    "ann": (HEAD + RIGHT + FIRST, ["", "deadlock"]),
    "bob": (HEAD + FIRST.replace("swap_again", "swap") + FIRST, ["deadlock"] * 2),
    "cem": (HEAD + SWAP + "return (\n", ["syntax error"] * 2),
    "dan": (STUB, ["not written"] * 2),
    "eva": (HEAD + SWAP + "import os; os._exit(0)\n" + AGAIN + "raise SystemExit\n", ["exit"] * 2),
    "fay": (
        HEAD + SWAP + "import time; time.sleep(9)\n" + AGAIN + "x[99]\n",
        ["time", "IndexError"],
    ),
    "gil": (HEAD + SWAP + "return x\n" + AGAIN + "dist.barrier()\n", ["wrong value", "wrong call"]),
}


def made(folder: Path, tests: str) -> HomeworkSet:
    handed_in(folder / "hw9_swap", {"test_hw9.py": tests, "hw9.py": STUB})
    return find_sets(folder / "hw9_swap")[0]


@pytest.fixture(scope="module")
def homework(tmp_path_factory) -> HomeworkSet:
    return made(
        tmp_path_factory.mktemp("homework"), TESTS.replace("xs[::-1])", "xs[::-1], seconds=1)")
    )


@pytest.fixture(scope="module")
def graded(homework, tmp_path_factory) -> Path:
    """A class that is graded once: its table, its pages and what was printed."""
    folder = tmp_path_factory.mktemp("class")
    files = {f"all/{name}/hw9.py": source for name, (source, _) in CLASS.items()}
    names = "\n".join(["ann", "ida", *CLASS, "hal", ""])
    handed_in(folder, files | {"all/hal/notes.txt": "sorry", "names.txt": names})
    command.handed_in(
        homework.folder,
        folder / "all",
        json=folder / "results",
        csv=folder / "class.csv",
        feedback=folder / "feedback",
        class_list=folder / "names.txt",
    )
    return folder


def test_the_table_says_why_points_are_missing(graded):
    lines = (graded / "class.csv").read_text().splitlines()
    rows = {row["student"]: row for row in csv.DictReader(lines)}
    expected = {name: reasons for name, (_, reasons) in CLASS.items()}
    expected |= {name: ["not handed in"] * 2 for name in ("hal", "ida")}
    assert {name: [row["1 reason"], row["2 reason"]] for name, row in rows.items()} == expected
    assert lines[1] == "ann,4.0,8,4.0,,,0.0,deadlock,everyone sends first"
    assert rows["ida"]["points"] == "0.0"
    assert rows["bob"]["2 misconception"] == "everyone sends first"


def test_a_class_is_graded_once_and_each_learner_has_a_page_with_their_own_runs(
    graded, homework, capsys
):
    pages = {file.stem: file.read_text() for file in (graded / "feedback").iterdir()}
    assert set(pages) == {*CLASS, "hal", "ida"}
    for name, page in pages.items():
        assert name in page and not list(external_addresses(page)), name
    ann = BeautifulSoup(pages["ann"], "html.parser")
    assert len(ann.find_all("figure")) == 2 and "4 of 8 points" in ann.get_text()
    assert "Deadlock: everyone sends first" in ann.section.get_text()
    assert "Everyone sends first." in ann.find(class_="p101g-mistake").get_text()
    assert "bob" not in pages["ann"] and "predict(" not in pages["ann"]
    assert "there is notes.txt" in pages["hal"]
    assert not BeautifulSoup(pages["dan"], "html.parser").find_all("figure")
    (graded / "feedback" / "dan.html").unlink()  # it is written again, and others are kept
    kept = (graded / "feedback" / "ann.html").stat().st_mtime_ns
    options = {"json": graded / "results", "feedback": graded / "feedback"}
    command.handed_in(homework.folder, graded / "all", **options)
    assert (graded / "feedback" / "dan.html").exists()
    assert (graded / "feedback" / "ann.html").stat().st_mtime_ns == kept
    # a learner counts once
    said = capsys.readouterr().out
    assert "2 of 8 learners: everyone sends first (exercises 1, 2)" in said
    assert "8 submissions, 0.5 of 8 points on average" in said
    assert class_table([]) == "no submissions"


def test_a_picture_that_cannot_be_drawn_costs_no_points(homework, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "draw", lambda *_: 1 / 0)
    path = handed_in(tmp_path / "jo", {"hw9.py": CLASS["ann"][0]})
    assert grade_submission(path, homework, "s", page=tmp_path / "jo.html")["points"] == 4
    page = (tmp_path / "jo.html").read_text()
    assert "Everyone sends first." in page and "<figure" not in page


# ---- optional practice ----

BOTH = HEAD + RIGHT + RIGHT.replace("def swap", "def swap_again")
UNWRITTEN = "def swap_again(x):\n    raise NotImplementedError\n"
PRACTICE = """
from dataclasses import replace
EXERCISES[:] = replace(EXERCISES[0], number="1a"), replace(EXERCISES[1], number="1j", points=0)
"""
FULL = "Every exercise has full points."
LEFT = f"{FULL} Practice left: 1j."
SOLUTIONS = {  # what is handed in, whether the practice holds, how its test ends, what is said last
    "not written": (HEAD + RIGHT + UNWRITTEN, False, "skipped", LEFT),
    "wrong": (HEAD + RIGHT + FIRST, False, "failed", LEFT),
    "right": (BOTH, True, "passed", FULL),
}


@pytest.mark.parametrize(("source", "holds", "outcome", "last"), SOLUTIONS.values(), ids=SOLUTIONS)
def test_practice_is_checked_and_counts_nowhere(
    tmp_path, source, holds, outcome, last, monkeypatch, capsys
):
    homework = made(tmp_path, TESTS + PRACTICE)
    result = grade_submission(handed_in(tmp_path / "alice", {"hw9.py": source}), homework, "a seed")
    assert (result["points"], result["out_of"]) == (4, 4)
    _, practice = gradescope_results(result)["tests"]
    assert (practice["score"], practice["max_score"]) == (0, 0)
    assert practice["status"] == ("passed" if holds else "failed")
    assert practice["name"].endswith("(practice)") and " of 0" not in practice["output"]
    write_csv(tmp_path / "class.csv", [result])
    (line,) = csv.DictReader((tmp_path / "class.csv").read_text("utf-8").splitlines())
    assert line["1a points"] == line["points"] == "4.0" and "1j points" not in line
    assert line["1j practice"] == ("done" if holds else "–")
    assert f"4   {'done' if holds else '   –'}" in class_table([result])
    # the learner, with pytest, and in a terminal
    homework.code.write_text(source)
    shutil.copy(Path(__file__).parents[2] / "homework" / "conftest.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    pytest.main([*options, "--import-mode=importlib", "hw9_swap"])
    said = capsys.readouterr().out
    assert outcome in said and f"  {'✓' if holds else '–'} 1j  Swap      practice" in said
    assert "hw9_swap: 4 of 4 points" in said and last in said and " of 0" not in said
    assert ("Practice left" in said) == ("left" in last)
    if outcome == "failed":
        cli.main(["grade", "hw9_swap"])
        assert "optional practice" in (said := capsys.readouterr().out) and LEFT in said


def test_parts_are_in_order():
    numbers = ["9k", "10", "9a", "8", "9j", "9i"]
    assert sorted(numbers, key=in_order) == ["8", "9a", "9i", "9j", "9k", "10"]


# ---- a check may give a part of its points ----


PARTS = {  # the part, whether the value is right, and the points of 4 + 6
    "half": (lambda trials: 0.5, True, 4 + 3),
    "wrong value": (lambda trials: 0.5, False, 0),  # it counts only with the right value
    "too much": (lambda trials: 7.0, True, 4 + 0.99 * 6),  # a failed check never has all points
    "too little": (lambda trials: -1.0, True, 4),
    "error": (lambda trials: 1 / 0, True, 4),  # what a rank returns may be anything
}


@pytest.mark.parametrize(("part", "value", "points"), PARTS.values(), ids=PARTS)
def test_a_check_that_is_not_passed_earns_its_part_if_the_value_is_right(part, value, points):
    case = Case([()], [True])
    exercise = Exercise(
        *("1", "f", "A share", 10, lambda draw: [case]),
        weights={"value": 0.4, "mfu": 0.6},
        checks=(
            Check("value", "true", lambda trial: None if trial.results[0] else "false"),
            Check("mfu", "all of it", lambda trial: "not all of it", part=part),
        ),
        least_received=lambda case: [0],
    )
    verdict = judge(exercise, [Trial(case, [value], Trace((), 1, "sim"))])
    assert verdict.points == pytest.approx(points) and not verdict.passed
    assert "not all of it" in str(verdict)


def test_what_differs_is_said_so_that_it_can_be_told_apart():
    several = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert "(a difference of 1e-08)" in difference(several + torch.tensor([1e-8, 0]), several)
    assert "(a difference of " in difference(several[:1] + 1e-8, several[:1])
    assert difference(several[:1], several[1:]) == "1; expected 2"
    assert Case([()], [{}], "16 GPUs", computes=True).label == "16 GPUs"
    assert Case([()], [{}], "16 GPUs").label == "1 rank, 16 GPUs"
