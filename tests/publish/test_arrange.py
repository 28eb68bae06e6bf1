"""A lesson's page: answers are folded, long output is shortened, terms and homework are links,
and it can be presented.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat import v4, write

from parallel101 import cli
from parallel101.laboratory.publish import homework_body, publish, select_lessons, write_site
from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.glossary import read_terms
from parallel101.laboratory.publish.page import Lesson, lesson_body
from tests.lessons.lesson import LESSONS


def code(source: str, output: str = ""):
    return v4.new_code_cell(
        source, outputs=[v4.new_output("stream", name="stdout", text=output)] if output else []
    )


def page(*cells, folder: Path = Path(), **options) -> BeautifulSoup:
    made = [v4.new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    return BeautifulSoup(lesson_body(v4.new_notebook(cells=made), folder, **options), "html.parser")


def test_what_follows_a_prediction_is_folded_up_to_the_next_heading_or_question():
    body = page(
        "# Title",
        code("shown = 1", "shown before\n"),
        "> **Predict.** What is it?",
        code("my_guess = '?'"),
        code("the_run()", "the answer\n"),
        "So it is the answer.\n\n> **Takeaway.** What to keep.",
        code("more()", "a second look\n"),
        "> **Predict.** And now?",
        code("again()", "another answer\n"),
        "> **Homework 1, exercise 1.** Write it.",
        code("free()", "not an answer\n"),
        "> **Predict.** The last one?",
        code("third()", "its answer\n"),
        "| What you see | Why |\n|---|---|\n| a | b |",
        "## Next\n\nA text.",
        code("last()", "at last\n"),
    )
    first, second, third = body.select("details.answer")
    for folded in (first, second, third):
        assert not folded.has_attr("open") and folded.summary.get_text() == "Show what happened"
    inside = ("the answer", "So it is", "What to keep", "more()", "a second look")
    assert all(text in first.get_text() for text in inside)
    assert first.select_one("blockquote.takeaway").get_text().strip() == "Takeaway. What to keep."
    assert "its answer" in third.get_text() and "What you see" not in third.get_text()
    assert "another answer" in second.get_text() and "Write it" not in second.get_text()
    for folded in body.select("details.answer"):
        folded.extract()
    rest = body.get_text()
    outside = ("shown before", "What is it?", "the_run()", "again()", "not an answer", "at last")
    assert all(text in rest for text in outside)
    assert "answer\n" not in rest.replace("not an answer\n", "")
    headings = [section.find(["h1", "h2"]).get_text() for section in body.find_all("section")]
    assert headings == ["Title", "Next"]


def test_a_table_of_contents_leads_to_the_headings():
    body = page(
        "# Title\n\nWords.", "## One `x`", code("a"), "### Two: why?", "text", "## Same", "## Same"
    )
    links = body.select("nav.contents a")
    assert [link.get_text() for link in links] == ["One x", "Two: why?", "Same", "Same"]
    for link in links:
        (heading,) = (h for h in body.find_all(["h2", "h3"]) if f"#{h['id']}" == link["href"])
        assert heading.get_text() == link.get_text() and heading.a["href"] == link["href"]
    assert links[1]["href"] == "#Two:-why?", "as in JupyterLab"
    assert body.nav.find_previous("h1") and not body.nav.find_previous("h2")
    assert page("# Title", "## One").select("nav.contents") == []


def test_a_code_cell_shows_the_number_by_which_errors_cite_it():
    body = page("# Title", code("a"), "> **Predict.** What?", code("b", "an answer"), code("c"))
    numbers = body.select(".code_cell a.number")
    assert [number.get_text() for number in numbers] == ["[1]", "[2]", "[3]"]
    for number in numbers:
        assert body.find(id=number["href"].removeprefix("#")).find("a", class_="number") == number


def test_long_output_is_folded_in_the_middle_and_nothing_is_lost():
    lines = [f"line {i}\n" for i in range(5000)]
    (output,) = page(code("chatter()", "".join(lines))).select(".output_area")
    assert output.details.summary.get_text() == "4,960 more lines"
    assert not output.details.has_attr("open")
    assert "".join(pre.get_text() for pre in output.find_all("pre")) == "".join(lines)
    assert page(code("chatter()", "".join(lines[:60]))).select("details.lines") == []


def test_first_uses_of_terms_lead_to_the_glossary(tmp_path):
    (tmp_path / "glossary.md").write_text(
        "# Glossary\n\n## all-reduce\nThe sum. Everybody gets it.\n\n## reduce\nOne gets "
        "it.\n\n## ZeRO\nShards.\n"
    )
    first = (
        "# All-reduce\n\nWith zero bytes, no `all-reduce` here. Read *all-reduce on a ring*. "
        "All-reduces are sums."
    )
    body = page(first, "Again all-reduce, then reduce.", folder=tmp_path)
    assert [(a.get_text(), a["href"], a["title"]) for a in body.select("a.term")] == [
        ("All-reduce", "glossary.html#all-reduce", "The sum."),
        ("reduce", "glossary.html#reduce", "One gets it."),
    ]
    (tmp_path / "glossary.md").write_text("## ring\n\n## tree\nA tree.\n")
    with pytest.raises(ValueError, match="'ring' has no definition"):
        read_terms(tmp_path)


def test_the_lessons_use_every_term_of_the_glossary():
    text = " ".join(path.read_text(encoding="utf-8") for path in LESSONS.glob("*.ipynb")).lower()
    terms = read_terms(LESSONS)
    assert [t.name for t in terms if not any(form.lower() in text for form in t.forms)] == []


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A folder with three lessons, of which two are published as a course, and a homework
    beside it.
    """
    base = tmp_path_factory.mktemp("course")
    (base / "lessons").mkdir()
    (base / "homework" / "hw1_moving").mkdir(parents=True)
    exercise = "> **Homework 1, exercise 1.** Write it."
    lessons = {"00_a": ["# A", exercise], "01_b": ["# B"], "09_teachers_own": ["# C", "## Two"]}
    for name, texts in lessons.items():
        made = v4.new_notebook(cells=[v4.new_markdown_cell(text) for text in texts])
        write(made, base / "lessons" / f"{name}.ipynb")
    task = v4.new_notebook(cells=[v4.new_markdown_cell("# Homework 1: moving"), code("check(f)")])
    write(task, base / "homework" / "hw1_moving" / "hw1.ipynb")
    (base / "lessons" / "glossary.md").write_text("## ring\nA ring.\n")
    options = ["--lessons", str(base / "lessons"), "--only", "09,00", "--out", str(base / "site")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_site, "run_notebook", lambda path, timeout: read_notebook(path))
        patch.setattr(write_site, "TOOL_PAGES", ())
        assert cli.main(["lessons", *options]) == 0
        yield base


HOMEWORK = sorted((LESSONS.parent / "homework").glob("hw*_*/hw*.ipynb"))


@pytest.mark.parametrize("path", HOMEWORK, ids=lambda path: path.stem)
def test_a_homeworks_page_shows_the_specification_of_each_exercise(path):
    body = BeautifulSoup(homework_body(path), "html.parser")
    asked = [cell for cell in body.select(".code_cell") if "help(" in cell.get_text()]
    stubs = {
        node.name: ast.get_docstring(node)
        for node in ast.parse(path.with_suffix(".py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert asked
    for cell in asked:
        name = re.search(r"help\(\w+\.(\w+)\)", cell.get_text())[1]
        shown = cell.select_one(".output_text pre").get_text()
        assert shown.startswith(f"{name}(")
        lines = [line.strip() for line in shown.splitlines()[1:]]
        assert [line.strip() for line in stubs[name].splitlines()] == lines


def read(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def test_a_course_of_ones_own_has_only_its_lessons_and_their_homework(course):
    index = read(course / "site" / "index.html")
    links = [a["href"] for a in index.main.find_all("a")]
    assert links == ["00_a.html", "hw1_moving.html", "09_teachers_own.html", "hw1_moving.html"]
    assert [a["href"] for a in index.select("nav a")] == ["#lessons", "#homework"]
    first = read(course / "site" / "00_a.html")
    assert first.find("a", rel="next")["href"] == "09_teachers_own.html"
    assert first.select_one("blockquote a")["href"] == "hw1_moving.html"
    assert "make homework" in read(course / "site" / "hw1_moving.html").get_text()
    publish(select_lessons(course / "lessons", ["01"]), course / "site", report=lambda _: None)
    index = read(course / "site" / "index.html")
    assert index.select_one(".lessons h2").find_parent("a")["href"] == "00_a.html"
    assert len(index.select(".lessons li")) == 3, "without --only, the index has all pages"


def test_the_index_shows_a_picture_of_each_lesson():
    from parallel101.laboratory.publish.index import index_page
    from parallel101.laboratory.publish.page import cover_of

    cells = []
    for k in ("YQ==", "Yg==", "Yw=="):
        image = f'<picture><img src="data:image/svg+xml;base64,{k}"></picture>'
        shown = {"text/html": f'<figure class="p101">{image}</figure>'}
        cells.append(v4.new_code_cell("x", outputs=[v4.new_output("display_data", shown)]))
    assert cover_of(str(page(*cells))).still == "data:image/svg+xml;base64,YQ=="
    cells[1].metadata["tags"] = ["cover"]
    cover = cover_of(str(page(*cells)))
    assert cover.still == "data:image/svg+xml;base64,Yg=="
    folded = page("> **Predict.** What?", *cells)
    assert cover == cover_of(str(folded)), "also if it is in a folded answer"
    assert cover_of(str(page("# No picture"))) is None
    assert cover.still in index_page([Lesson("00_a", "A", "About a.")], {"00_a": cover})
    assert 'href="exercise%20%232.html"' in index_page([Lesson("exercise #2", "Two", "")])
