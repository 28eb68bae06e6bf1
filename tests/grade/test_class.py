"""What a teacher gets for a class: why points are missing, which mistakes are frequent, and a page
for each learner.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from parallel101.laboratory.grade import command, picture
from parallel101.laboratory.grade.grades import class_table
from parallel101.laboratory.grade.homework import HomeworkSet, find_sets
from parallel101.laboratory.publish.page import external_addresses
from tests.grade.test_submissions import FIRST, HEAD, RIGHT, STUB, TESTS

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


@pytest.fixture(scope="module")
def homework(tmp_path_factory) -> HomeworkSet:
    folder = tmp_path_factory.mktemp("homework") / "hw9_swap"
    folder.mkdir()
    (folder / "test_hw9.py").write_text(TESTS.replace("xs[::-1])", "xs[::-1], seconds=1)"))
    (folder / "hw9.py").write_text(STUB)
    return find_sets(folder)[0]


@pytest.fixture(scope="module")
def graded(homework, tmp_path_factory) -> Path:
    """A class that is graded once: its table, its pages and what was printed."""
    folder = tmp_path_factory.mktemp("class")
    for name, (source, _) in CLASS.items():
        (folder / "all" / name).mkdir(parents=True)
        (folder / "all" / name / "hw9.py").write_text(source)
    (folder / "all" / "hal").mkdir()
    (folder / "all" / "hal" / "notes.txt").write_text("sorry")
    (folder / "names.txt").write_text("\n".join(["ann", "ida", *CLASS, "hal", ""]))
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
    assert rows["ann"]["1 points"] == "4.0" and rows["ida"]["points"] == "0.0"
    assert rows["bob"]["2 misconception"] == "everyone sends first"


def test_a_learner_counts_once_in_the_frequent_misconceptions(graded, homework, capsys):
    command.handed_in(homework.folder, graded / "all", json=graded / "results")
    said = capsys.readouterr().out
    assert "2 of 8 learners: everyone sends first (exercises 1, 2)" in said
    assert class_table([]) == "no submissions"


def test_each_learner_has_a_page_with_their_own_runs(graded):
    pages = {file.stem: file.read_text() for file in (graded / "feedback").iterdir()}
    assert set(pages) == {*CLASS, "hal", "ida"}
    for name, page in pages.items():
        assert name in page and not list(external_addresses(page)), name
    ann = BeautifulSoup(pages["ann"], "html.parser")
    assert len(ann.find_all("figure")) == 2 and "4 of 8 points" in ann.get_text()
    assert "Deadlock: everyone sends first" in ann.table.get_text()
    assert "Everyone sends first." in ann.find(class_="p101g-mistake").get_text()
    assert "bob" not in pages["ann"] and "predict(" not in pages["ann"]
    assert "there is notes.txt" in pages["hal"]
    assert not BeautifulSoup(pages["dan"], "html.parser").find_all("figure")


def test_a_page_that_is_gone_is_written_again_and_others_are_kept(graded, homework):
    pages = graded / "feedback"
    (pages / "dan.html").unlink()
    kept = (pages / "ann.html").stat().st_mtime_ns
    options = {"json": graded / "results", "feedback": pages}
    command.handed_in(homework.folder, graded / "all", **options)
    assert (pages / "dan.html").exists() and (pages / "ann.html").stat().st_mtime_ns == kept


def test_a_picture_that_cannot_be_drawn_costs_no_points(homework, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no picture")

    monkeypatch.setattr(picture, "draw", fails)
    (tmp_path / "jo.py").write_text(CLASS["ann"][0])
    command.handed_in(
        homework.folder, tmp_path / "jo.py", json=tmp_path / "jo.json", feedback=tmp_path
    )
    assert json.loads((tmp_path / "jo.json").read_text())["points"] == 4
    page = (tmp_path / "jo.html").read_text()
    assert "Everyone sends first." in page and "<figure" not in page


def test_wrong_files_are_refused(graded, homework, tmp_path):
    (tmp_path / "names.txt").write_text("../ann")
    with pytest.raises(ValueError, match="expected a name"):
        command.handed_in(homework.folder, graded / "all", class_list=tmp_path / "names.txt")
    with pytest.raises(ValueError, match=r"--feedback .*names.txt can't be written"):
        command.handed_in(homework.folder, graded / "all", feedback=tmp_path / "names.txt")
    with pytest.raises(ValueError, match="--class-list needs --submission"):
        command.handed_in(homework.folder, None, class_list=tmp_path / "names.txt")
