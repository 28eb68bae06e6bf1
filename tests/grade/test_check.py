"""What a learner sees: verdict, misconception, picture, predictions and hints, in a terminal,
in a notebook and with pytest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from parallel101 import check, cli, hint, predict
from parallel101.laboratory.grade.homework import Progress, find_sets
from parallel101.laboratory.grade.learner import check_file, suggestion

ROOT = Path(__file__).parents[2]
HEAD = "import torch\nimport torch.distributed as dist\n\n\ndef ring_shift(x):\n"
HEAD += "    rank, n, x = dist.get_rank(), dist.get_world_size(), x.contiguous()\n"
RIGHT = f"""{HEAD}    y = torch.empty_like(x)
    work = dist.isend(x, (rank + 1) % n) if n > 1 else None
    if n == 1:
        return x.clone()
    dist.recv(y, (rank - 1) % n)
    work.wait()
    return y
"""
SENDS_FIRST = RIGHT.replace("isend", "send").replace("    work.wait()\n", "")
AGAIN = """    again = dist.isend(x, (rank + 1) % n)
    dist.recv(y, (rank - 1) % n)
    again.wait()
    return y
"""
TWICE = RIGHT.replace("    return y\n", AGAIN)
SAFE_ORDER = f"""{HEAD}    y, right, left = torch.empty_like(x), (rank + 1) % n, (rank - 1) % n
    calls = [(dist.send, x, right), (dist.recv, y, left)]
    for f, t, peer in calls[:: 1 - 2 * (rank % 2)] if n > 1 else []:
        f(t, peer)
    return y if n > 1 else x.clone()
"""


@pytest.fixture
def homework(tmp_path, monkeypatch) -> Path:
    """A copy of hw1 with its stubs, whose hw1.py can be imported.

    It asks for the first exercise only, which is enough here.
    """
    folder = tmp_path / "hw1_moving"
    ignored = shutil.ignore_patterns(".progress.json", "pictures", "__pycache__")
    shutil.copytree(ROOT / "homework" / "hw1_moving", folder, ignore=ignored)
    with (folder / "test_hw1.py").open("a") as tests:
        tests.write("\nEXERCISES = EXERCISES[:1]\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "hw1", raising=False)
    yield folder
    sys.modules.pop("hw1", None)


def graded(homework: Path, source: str):
    (homework / "hw1.py").write_text(source)
    (found,) = find_sets(homework)
    return check_file(found.exercises[0], found)


def in_a_line(text: object) -> str:
    return " ".join(str(text).split())


def test_check_grades_the_file_on_disk_and_says_that_the_kernel_holds_another_version(
    homework, capsys
):
    import hw1

    stub = (homework / "hw1.py").read_text()
    (homework / "hw1.py").write_text(f"# a comment moves the lines only\n{stub}")
    check(hw1.ring_shift)
    said = capsys.readouterr().out
    assert "ring_shift is not written yet" in said and "0 of 10 points" in said
    assert "kernel" not in said and len(said.strip().splitlines()) == 3
    assert not (homework / "pictures").exists()
    (homework / "hw1.py").write_text(RIGHT)
    check(hw1.ring_shift)
    said = in_a_line(capsys.readouterr().out)
    assert "10 of 10 points" in said and "Everything holds: " in said
    assert "The kernel still holds the version that it imported before" in said


def test_a_deadlock_is_named_and_drawn_with_its_lines(homework):
    verdict = graded(homework, SENDS_FIRST)
    assert "the right value\n  ✗ steps" in str(verdict) and "Everyone sends first." in str(verdict)
    assert "rank 1 waits in send to rank 0, at hw1.py:" in str(verdict)
    assert "line 8: work = dist.send(" in verdict.picture.svg()
    page = BeautifulSoup(verdict._repr_html_(), "html.parser")
    assert page.find(class_="p101g-mistake").get_text().startswith("Everyone sends first.")
    assert [cell["aria-label"] for cell in page.select(".p101g-fails")] == ["fails"] * 3
    assert page.find("figure") and page.section["aria-label"] == "ring_shift: 0 of 10 points"
    assert verdict.saved == homework / "pictures" / "ring_shift.html"


SAID = {  # a program, what is said about it, and how often
    "syntax": (HEAD + "    return (\n", "SyntaxError", 1),
    "missing": ("", "has no function ring_shift", 1),
    "exception": (HEAD + "    return x[rank + 99]\n", "IndexError", 2),
    "printed": (
        HEAD.replace("def", "print('loaded')\ndef") + "    return 1 / 0\n",
        "[rank 0] loaded",
        1,
    ),
    "no such rank": (HEAD + "    dist.send(x, rank + 1)\n", "sends to 2", 1),
    "large": (HEAD + "    return [x] * 3\n", "a list of 3; expected a tensor of shape", 1),
    "bytes": (TWICE, "enough", 2),
    "a place": (
        RIGHT.replace("    return y", "    y.view(-1)[7:8] += 1\n    return y"),
        "element [3, 1]: ",
        1,
    ),
    "tolerated": (
        SAFE_ORDER,
        "3 steps, where 1 would be enough: allowed, since blocking sends in a safe order",
        1,
    ),
}


@pytest.mark.parametrize(("source", "expected", "times"), SAID.values(), ids=SAID)
def test_what_holds_and_what_is_wrong_is_said_with_the_learners_own_lines(
    homework, source, expected, times
):
    verdict = graded(homework, source)
    said = in_a_line(verdict)
    assert said.count(expected) == times, said
    assert expected in BeautifulSoup(verdict._repr_html_(), "html.parser").get_text()
    assert not any(text in said for text in ("rank.py", str(ROOT), "tensor("))
    points = {TWICE: 4, SAFE_ORDER: 10}.get(source, 0)
    assert f"{points} of 10 points" in said and verdict.points == points


def test_a_function_that_no_exercise_asks_for_is_refused(homework):
    import hw1

    def own(x):
        return x

    own.__module__ = "__main__"
    for act, function, text in (
        (check, own, r"Write it in the .py file"),
        (check, hw1, r"such as hw1.ring_shift"),
        (hint, in_a_line, r"test_test_check.py"),
    ):
        with pytest.raises(ValueError, match=text):
            act(function)
    with pytest.raises(TypeError, match="no question 'colour'"):
        predict(hw1.ring_shift, colour="green")


def test_hints_come_one_by_one_and_predictions_are_asked_for_before_they_are_answered(
    homework, capsys
):
    import hw1

    for rung in (1, 2, 3, 3):
        hint(hw1.ring_shift)
        assert capsys.readouterr().out.count("Hint ") == rung
    (homework / "hw1.py").write_text(RIGHT)
    predict(hw1.ring_shift, sent="?", steps="?")
    asked = capsys.readouterr().out
    assert "predict first: predict(hw1.ring_shift, sent=…)" in asked and "your run" not in asked
    predict(hw1.ring_shift, sent=4000, steps=3)
    said = capsys.readouterr().out
    assert "you said: 4,000 bytes · your run: 4,000 bytes ✓" in said
    assert "you said: 3 steps · your run: 1 step ≠" in said
    noted = json.loads((homework / ".progress.json").read_text())["ring_shift"]
    assert noted["hints"] == 3 and noted["predictions"] == {"sent": 4000, "steps": 3}


def verdict_in(text: str) -> str:
    """The verdict in what a command prints, without its time."""
    lines = text[text.index("1 · Ring shift: ") :].splitlines()
    end = next(place for place, line in enumerate(lines) if line.startswith(("hw1_moving: ", "=")))
    return re.sub(r"in \d+\.\d s", "in … s", "\n".join(lines[:end]).strip())


def test_check_grade_and_pytest_say_the_same(homework, monkeypatch, capsys):
    import hw1

    shutil.copy(ROOT / "homework" / "conftest.py", homework.parent)
    monkeypatch.chdir(homework.parent)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # of the run that this test belongs to
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(homework.parent)]
    assert "Stuck?" not in str(graded(homework, TWICE))
    (homework / "hw1.py").write_text(SENDS_FIRST)
    check(hw1.ring_shift)
    note = r"\n\n  This is the\s+verdict on.*?%autoreload 2\s+once\."
    said = verdict_in(re.sub(note, "", capsys.readouterr().out, flags=re.DOTALL) + "\n=")
    assert "Stuck? In the notebook, hint(hw1.ring_shift) shows hint 1 of 3." in in_a_line(said)
    commands = (
        (lambda: cli.main(["grade", str(homework)]), 0),
        (lambda: pytest.main([*options, "--import-mode=importlib", "hw1_moving"]), 1),
    )
    for run, code in commands:
        assert run() == code
        shown = capsys.readouterr().out
        assert verdict_in(shown) == said and "Traceback" not in shown
        assert "hw1_moving: 0 of " in shown and "pictures/ring_shift.html" in shown
        assert "Next: 1 · Ring shift. It is ring_shift in hw1_moving/hw1.py." in shown


def test_a_hint_is_suggested_after_two_checks_that_fail(homework):
    import hw1

    failed, passed = graded(homework, TWICE), graded(homework, RIGHT)
    assert not failed.suggestion and not passed.suggestion

    def suggests(verdict) -> str:
        return suggestion(verdict, Progress(homework))

    assert not suggests(failed) and "shows hint 1 of 3" in suggests(failed)
    hint(hw1.ring_shift)
    assert not suggests(failed) and "shows hint 2 of 3" in suggests(failed)
    assert not suggests(passed) and not suggests(failed)
    for _ in range(2):
        hint(hw1.ring_shift)
    assert not suggests(failed) and not suggests(failed)  # there is none left
    failed.suggestion = "Stuck?"
    assert "Stuck?" in failed._repr_html_()
