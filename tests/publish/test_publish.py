"""Lessons become pages: they run in this Python, the pages load nothing, and a failure names
its cell.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from nbformat import v4

from parallel101.laboratory.publish import find
from parallel101.laboratory.publish.execute import LessonFailed, run_notebook
from parallel101.laboratory.publish.find import find_lessons, select_lessons
from parallel101.laboratory.publish.offline_page import POLICY
from parallel101.laboratory.publish.page import Lesson, external_addresses
from parallel101.laboratory.publish.tools import TOOLS
from parallel101.laboratory.publish.write_site import publish
from tests.publish.conftest import notebook, read

PIXEL = "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
FIRST = """# Ranks & *messages*

One process of many, $\\lceil\\log_2 p\\rceil$.

![a pixel](pixel.png) and [a link](https://example.org)"""


def test_lessons_run_and_become_pages_that_load_nothing(tmp_path):
    (tmp_path / "pixel.png").write_bytes(bytes.fromhex(PIXEL))
    cells = ("import sys, os; print(sys.executable, os.getcwd()); x = 6",
             "import ipywidgets; ipywidgets.IntSlider()",
             "from IPython.display import HTML; HTML(f'<b id=answer>{x * 7}</b>')")  # fmt: skip
    notebook(tmp_path / "00_first.ipynb", FIRST, *cells)
    formula = "# Second\n\n$$T = 2\\frac{p-1}{p}n\\beta$$"
    notebook(tmp_path / "01_second.ipynb", formula, "1 / 0", tags=("raises-exception",))
    broken = "def f():\n    return fine / 0\nf()"
    notebook(tmp_path / "02_broken.ipynb", "# Broken", "fine = 1", broken)
    (out := tmp_path / "site").mkdir()
    (out / "02_broken.html").write_text("a page of an earlier run")
    said: list[str] = []
    done = publish(select_lessons(tmp_path), out, report=said.append)
    assert [line.split()[:3] for line in said] == [
        ["✓", "00_first", "ran"],
        ["✓", "01_second", "ran"],
        ["✗", "02_broken", "failed"],
        *[["✓", *tool.PAGE.title.split()[:2]] for tool in TOOLS],
    ]
    assert [p.name for p in done.written] == ["00_first.html", "01_second.html", "index.html"]
    for page in done.written:
        html = page.read_text(encoding="utf-8")
        assert [*external_addresses(html)] == [] and POLICY in html and "<script src" not in html
    first, second, index = map(read, done.written)
    # in this Python and in the lesson's own folder
    assert f"{sys.executable} {tmp_path}" in first.get_text()
    assert first.find(id="answer").get_text() == "42"
    assert first.find("math") is not None and second.find("math", display="block") is not None
    assert first.find("img", alt="a pixel")["src"].startswith("data:image/png;base64,")
    assert first.find("a", href="https://example.org") is not None
    assert "make lab" in first.find(class_="needs-kernel").get_text()
    assert "ZeroDivisionError" in second.get_text()
    # linked to each other, without the lesson that failed
    assert [a["href"] for a in index.select(".lessons a")] == ["00_first.html", "01_second.html"]
    assert index.select_one(".lessons h2").get_text() == "00 Ranks & messages"
    assert index.select_one(".lessons p").get_text().startswith("One process of many")
    assert first.find("a", rel="next")["href"] == "01_second.html"
    assert second.find("a", rel="prev")["href"] == "00_first.html"
    assert second.find("a", rel="next") is None
    # the failure names lesson, cell and error, and the old page is deleted
    (failure,) = done.failed
    assert failure.lesson == "02_broken" and not (out / "02_broken.html").exists()
    for part in ("02_broken", "code cell 2 of 2", "return fine / 0", "ZeroDivisionError: division"):
        assert part in str(failure)


def test_a_cell_that_takes_too_long_and_one_that_ends_its_kernel_are_named(tmp_path):
    (tmp_path / "torn.ipynb").write_text('{"cells": [')
    with pytest.raises(LessonFailed, match="cannot be read as a notebook"):
        run_notebook(tmp_path / "torn.ipynb")
    forever = notebook(tmp_path / "slow.ipynb", "1", "import threading; threading.Event().wait()")
    with pytest.raises(LessonFailed, match=r"code cell 2 of 2(.|\n)*did not finish within 1 s"):
        run_notebook(forever, timeout=1)
    dead = notebook(tmp_path / "dead.ipynb", "import os; os._exit(3)")
    with pytest.raises(LessonFailed, match=r"code cell 1 of 1(.|\n)*kernel died"):
        run_notebook(dead)


def test_a_run_that_is_stopped_keeps_the_finished_pages_and_leaves_no_kernel(tmp_path):
    notebook(tmp_path / "00_first.ipynb", "1")
    note = f"import os, signal, threading\nopen('{tmp_path}/pid', 'w').write(str(os.getpid()))"
    stop = "os.kill(os.getppid(), signal.SIGINT); threading.Event().wait()"
    notebook(tmp_path / "01_stopped.ipynb", note, stop)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "01_stopped.html").write_text("a page of an earlier run")
    options = ["--lessons", str(tmp_path), "--out", str(tmp_path / "site")]
    command = [sys.executable, "-m", "parallel101.cli", "lessons", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1:]
    assert (done.returncode, last) == (130, ["parallel101 lessons: stopped"]), done.stderr
    assert "Traceback" not in done.stderr
    assert 'rel="next" href="01_stopped.html"' in (tmp_path / "site" / "00_first.html").read_text()
    assert (tmp_path / "site" / "01_stopped.html").read_text() == "a page of an earlier run"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_lessons_are_chosen_by_name_or_number(tmp_path):
    bare = Lesson.of("03_bare", v4.new_notebook(cells=[v4.new_code_cell("1")]))
    assert bare == Lesson("03_bare", "03_bare", ""), "without prose, its name is its title"
    for name in ("00_ranks", "01_collectives", "010_more"):
        notebook(tmp_path / f"{name}.ipynb", "1")
    everything = ["00_ranks", "010_more", "01_collectives"]
    chosen = ["01_collectives.ipynb", "00"]
    assert [path.stem for path in select_lessons(tmp_path)] == everything
    assert [path.stem for path in select_lessons(tmp_path, chosen)] == everything[::2]
    for folder, names, message in (
        ("", ["07"], f"'07' is not a lesson; the lessons are: {', '.join(everything)}"),
        ("", ["01"], "'01' matches more than one lesson"),
        ("empty", [], "no notebook"),
    ):
        with pytest.raises(ValueError, match=message):
            select_lessons(tmp_path / folder, names)


def test_the_lessons_folder_is_found_or_copied_from_a_wheel(tmp_path, monkeypatch):
    (tmp_path / "clone" / "parallel101").mkdir(parents=True)
    wheel, here, deep = (tmp_path / name for name in ("wheel", "here", "clone/lessons/deeper"))
    for folder in (wheel / "lessons", wheel / "homework", here, deep):
        folder.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert find_lessons() == deep.parent
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        find_lessons("nowhere")
    (wheel / "lessons" / "glossary.md").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr(find, "CLONE", here)
    with pytest.raises(FileNotFoundError, match="parallel101 notebooks"):
        find.found_or_copied(lambda: find_lessons(to_edit=True))
    monkeypatch.setattr(find, "IN_WHEEL", wheel)
    for _ in range(2):  # the second time they are there
        assert find.found_or_copied(lambda: find_lessons(to_edit=True)) == here / "lessons"
