"""Lessons become pages: they run in this Python, the pages load nothing, and a failure names
its cell.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat import v4, write

from parallel101 import cli
from parallel101.laboratory.publish import (
    LessonFailed,
    find,
    find_lessons,
    publish,
    select_lessons,
    write_site,
)
from parallel101.laboratory.publish.execute import read_notebook, run_notebook
from parallel101.laboratory.publish.offline_page import POLICY
from parallel101.laboratory.publish.page import Lesson, external_addresses, lesson_body, lesson_page
from parallel101.laboratory.publish.tools import TOOL_PAGES
from tests.browser.browser import Browser

PIXEL = (
    bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000010806000000")
    + b"\x1f\x15\xc4\x89"
)


def notebook(folder: Path, name: str, *cells: str, tags: tuple[str, ...] = ()) -> Path:
    """Write a notebook. A cell whose text begins with "md:" is Markdown, the others are code."""
    made = [
        v4.new_markdown_cell(c[3:])
        if c.startswith("md:")
        else v4.new_code_cell(c, metadata={"tags": list(tags)})
        for c in cells
    ]
    write(v4.new_notebook(cells=made), folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def soup(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def body_of(cell: v4.NotebookNode, folder: Path) -> BeautifulSoup:
    return BeautifulSoup(lesson_body(v4.new_notebook(cells=[cell]), folder), "html.parser")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Two lessons that run and one that does not, published once."""
    folder = tmp_path_factory.mktemp("lessons")
    (folder / "pixel.png").write_bytes(PIXEL)
    notebook(
        folder,
        "00_first",
        (
            "md:# Ranks & *messages*\n\nOne process of many, $\\lceil\\log_2 p\\rceil$.\n\n![a "
            "pixel](pixel.png) and [a link](https://example.org)"
        ),
        "import sys, os; print(sys.executable, os.getcwd()); x = 6",
        "import ipywidgets; ipywidgets.IntSlider()",
        "from IPython.display import HTML; HTML(f'<b id=answer>{x * 7}</b>')",
    )
    notebook(
        folder,
        "01_second",
        "md:# Second\n\n$$T = 2\\frac{p-1}{p}n\\beta$$",
        "1 / 0",
        tags=("raises-exception",),
    )
    notebook(folder, "02_broken", "md:# Broken", "fine = 1", "def f():\n    return fine / 0\nf()")
    said: list[str] = []
    out = folder / "site"
    out.mkdir()
    (out / "02_broken.html").write_text("a page of an earlier run")
    done = publish(select_lessons(folder), out, report=said.append)
    return out, done, said, folder


def test_a_lesson_runs_in_this_python_and_in_its_own_folder(site):
    out, _, _, folder = site
    text = soup(out / "00_first.html").get_text()
    assert f"{sys.executable} {folder}" in text
    assert soup(out / "00_first.html").find(id="answer").get_text() == "42"


def test_pages_load_nothing_and_forbid_the_browser_to(site):
    _, done, _, _ = site
    assert [p.name for p in done.written] == ["00_first.html", "01_second.html", "index.html"]
    for page in done.written:
        html = page.read_text()
        assert list(external_addresses(html)) == []
        assert POLICY in html
        assert "<script src" not in html


def test_formulas_images_links_and_expected_errors_are_in_the_page(site):
    out, _, _, _ = site
    first, second = soup(out / "00_first.html"), soup(out / "01_second.html")
    assert first.find("math") is not None and second.find("math", display="block") is not None
    assert first.find("img", alt="a pixel")["src"].startswith("data:image/png;base64,")
    assert first.find("a", href="https://example.org") is not None
    assert "make lab" in first.find(class_="needs-kernel").get_text()
    assert "ZeroDivisionError" in second.get_text()


WIDGET = {
    "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
    "text/plain": "Explorer()",
    "text/html": "<b>picture</b>",
}


def test_what_becomes_of_links_of_explorers_and_of_folded_answers(tmp_path):
    text = "[one](05_sharding.ipynb), [two](07_pipeline.ipynb#Tied), [code](../step.py)"
    body = body_of(v4.new_markdown_cell(f"{text}, [web](https://a.org/x.ipynb)"), tmp_path)
    links = ["05_sharding.html", "07_pipeline.html#Tied", "../step.py", "https://a.org/x.ipynb"]
    assert [link["href"] for link in body.find_all("a")] == links
    output = v4.new_output("execute_result", WIDGET, execution_count=1)
    body = body_of(v4.new_code_cell("explorer", outputs=[output]), tmp_path)
    assert body.find("b").get_text() == "picture"  # the last one
    assert "make lab" in body.find(class_="needs-kernel").get_text()
    answer = "<details><summary>Answer</summary>\n\nIt is $2$.\n\n- *Really.*\n\n</details>\n\nA."
    body = body_of(v4.new_markdown_cell(answer), tmp_path)
    assert body.details.find("em").get_text() == "Really." and body.details.find("math") is not None
    assert "A." not in body.details.get_text()


def test_index_and_pages_link_to_each_other_without_the_lesson_that_failed(site):
    out, _, said, _ = site
    index = soup(out / "index.html")
    assert [a["href"] for a in index.select(".lessons a")] == ["00_first.html", "01_second.html"]
    assert index.select_one(".lessons h2").get_text() == "00 Ranks & messages"
    assert index.select_one(".lessons p").get_text().startswith("One process of many")
    assert soup(out / "00_first.html").find("a", rel="next")["href"] == "01_second.html"
    assert soup(out / "01_second.html").find("a", rel="next") is None
    assert [line.split()[0:3] for line in said] == [
        ["✓", "00_first", "ran"],
        ["✓", "01_second", "ran"],
        ["✗", "02_broken", "failed"],
        *[["✓", *tool.title.split()[:2]] for tool in TOOL_PAGES],
    ]


def test_a_lesson_that_runs_alone_is_linked_to_those_that_ran_before(tmp_path, monkeypatch):
    monkeypatch.setattr(write_site, "run_notebook", lambda path, timeout: read_notebook(path))
    monkeypatch.setattr(write_site, "TOOL_PAGES", ())
    paths = [notebook(tmp_path, name, f"md:# {name}", "1") for name in ("00_a", "01_b")]
    for path in paths:
        publish([path], tmp_path / "site", report=lambda _: None)
    index = soup(tmp_path / "site" / "index.html")
    assert [a["href"] for a in index.select(".lessons a")] == ["00_a.html", "01_b.html"]
    assert 'rel="prev" href="00_a.html"' in (tmp_path / "site" / "01_b.html").read_text()


def test_a_failure_names_lesson_cell_and_error_and_deletes_the_old_page(site):
    out, done, _, _ = site
    (failure,) = done.failed
    assert failure.lesson == "02_broken"
    for part in (
        "lesson 02_broken",
        "code cell 2 of 2",
        "return fine / 0",
        "ZeroDivisionError: division by zero",
    ):
        assert part in str(failure)
    assert not (out / "02_broken.html").exists()


def test_a_cell_that_takes_too_long_and_one_that_ends_its_kernel_are_named(tmp_path):
    (tmp_path / "torn.ipynb").write_text('{"cells": [')
    with pytest.raises(LessonFailed, match="cannot be read as a notebook"):
        run_notebook(tmp_path / "torn.ipynb")
    with pytest.raises(LessonFailed, match=r"code cell 2 of 2(.|\n)*did not finish within 1 s"):
        run_notebook(
            notebook(tmp_path, "slow", "1", "import threading; threading.Event().wait()"), timeout=1
        )
    with pytest.raises(LessonFailed, match=r"code cell 1 of 1(.|\n)*kernel died"):
        run_notebook(notebook(tmp_path, "dead", "import os; os._exit(3)"))


def test_a_run_that_is_stopped_keeps_the_finished_pages_and_leaves_no_kernel(tmp_path):
    notebook(tmp_path, "00_first", "1")
    notebook(
        tmp_path,
        "01_stopped",
        f"import os, signal, threading\nopen('{tmp_path}/pid', 'w').write(str(os.getpid()))",
        "os.kill(os.getppid(), signal.SIGINT); threading.Event().wait()",
    )
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


def test_on_a_full_disk_the_page_is_named_and_its_old_content_is_kept(
    tmp_path, monkeypatch, capsys
):
    page = tmp_path / "site" / "index.html"
    page.parent.mkdir()
    page.write_text("a page of an earlier run")
    (tmp_path / "00_torn.ipynb").write_text("no notebook")

    def half(self, text, encoding):
        self.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    assert cli.main(["lessons", "--lessons", str(tmp_path), "--out", str(page.parent)]) == 1
    assert capsys.readouterr().err == f"parallel101: cannot write {page}: No space left on device\n"
    assert [(file.name, file.read_text()) for file in page.parent.iterdir()] == [
        ("index.html", "a page of an earlier run")
    ]


OFFLINE = {
    "would load https://example.org/x.png, but pages": "![x](https://example.org/x.png)",
    "would load missing.png": "![x](missing.png)",
    r"uses \\undefinedcommand": "$\\undefinedcommand x$",
}


@pytest.mark.parametrize("message", OFFLINE)
def test_what_cannot_be_shown_offline_is_refused(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        body_of(v4.new_markdown_cell(OFFLINE[message]), tmp_path)


LOADED = {
    '<script src="https://cdn.example/x.js"></script>': ["https://cdn.example/x.js"],
    '<link rel="stylesheet" href="//cdn.example/x.css">': ["//cdn.example/x.css"],
    "<style>@import 'a.css'; b { background: url(c.png) }</style>": ["a.css", "c.png"],
    '<p style="background: url(&quot;d.png&quot;)">': ["d.png"],
    '<svg><image href="e.png"/><use xlink:href="#here"/></svg>': ["e.png"],
    '<img src="data:image/gif;base64,R0"><a href="https://example.org">not loaded</a>': [],
}


@pytest.mark.parametrize("html", LOADED)
def test_external_addresses_are_those_that_a_browser_would_load(html):
    assert list(external_addresses(html)) == LOADED[html]


def test_lessons_are_chosen_by_name_or_number(tmp_path):
    bare = Lesson.of("03_bare", v4.new_notebook(cells=[v4.new_code_cell("1")]))
    assert bare == Lesson("03_bare", "03_bare", ""), "without prose, its name is its title"
    for name in ("00_ranks", "01_collectives", "010_more"):
        notebook(tmp_path, name, "1")
    for names, chosen in (
        ([], ["00_ranks", "010_more", "01_collectives"]),
        (["01_collectives.ipynb", "00"], ["00_ranks", "01_collectives"]),
    ):
        assert [path.stem for path in select_lessons(tmp_path, names)] == chosen
    for folder, names, message in (
        ("", ["07"], "'07' is not a lesson; the lessons are: 00_ranks, 010_more, 01_collectives"),
        ("", ["01"], "'01' matches more than one lesson"),
        ("empty", [], "no notebook"),
    ):
        with pytest.raises(ValueError, match=message):
            select_lessons(tmp_path / folder, names)


def test_the_lessons_folder_is_found_from_a_folder_inside_it_and_a_missing_one_is_named(
    tmp_path, monkeypatch
):
    (tmp_path / "lessons" / "deeper").mkdir(parents=True)
    (tmp_path / "parallel101").mkdir()
    monkeypatch.chdir(tmp_path / "lessons" / "deeper")
    assert find_lessons() == tmp_path / "lessons"
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        find_lessons("nowhere")


def test_with_a_wheel_the_notebooks_are_copied_before_they_are_edited(tmp_path, monkeypatch):
    wheel, here = tmp_path / "wheel", tmp_path / "here"
    for folder in (wheel / "lessons", wheel / "homework", here):
        folder.mkdir(parents=True)
    (wheel / "lessons" / "glossary.md").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr(find, "CLONE", here)
    with pytest.raises(FileNotFoundError, match="parallel101 notebooks"):
        find.found_or_copied(lambda: find_lessons(to_edit=True))
    monkeypatch.setattr(find, "IN_WHEEL", wheel)
    for _ in range(2):  # the second time they are there
        copied = find.found_or_copied(lambda: find_lessons(to_edit=True))
        assert copied == here / "lessons"


@pytest.mark.browser
def test_a_page_never_scrolls_sideways(chromium, tmp_path):
    row = "| scatter + all-gather | $2\\frac{p-1}{p}n + x$ | `reduce_broadcast_two_level` |\n"
    table = "| a | b | c |\n|---|---|---|\n" + row
    formula = "$$T_\\text{flat} = (p-1)(\\alpha + n\\beta) \\qquad " + "x + " * 60 + "y$$"
    output = v4.new_output("stream", text="word" * 100)
    code = v4.new_code_cell("x = " + " + ".join(["1"] * 60), outputs=[output])
    cells = [v4.new_markdown_cell("# A\n\n" + table + "\n" + formula), code]
    made = v4.new_notebook(cells=cells)
    lesson = Lesson.of("a", made)
    (tmp_path / "a.html").write_text(
        lesson_page(lesson, lesson_body(made, tmp_path), 1.0, [lesson])
    )
    line = "document.querySelector('.input_area pre').getClientRects()[0]"
    with Browser(chromium) as browser:
        for width in (390, 800, 1280):
            browser.resize(width)
            browser.open((tmp_path / "a.html").as_uri())
            assert browser.js("document.documentElement.scrollWidth") <= width
            assert browser.js(f"{line}.height") < 40, "a line of code stays a line"
