"""The pages around the lessons: each message of Errors explained is one that a program raises, and
links lead to a page, to the repository, or nowhere.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

import nbformat
import pytest
from bs4 import BeautifulSoup

import parallel101 as p101
from parallel101.laboratory.planner.search import NoLayoutError
from parallel101.laboratory.publish import course_pages as module
from parallel101.laboratory.publish import write_site
from parallel101.laboratory.publish.course_pages import citation, course_pages, raised
from parallel101.laboratory.publish.find import Repository, select_lessons
from parallel101.laboratory.publish.page import Lesson, lesson_page
from parallel101.trainers.verify.report import NotEqualError
from tests.lessons.lesson import LESSONS

ROOT = LESSONS.parent
HERE = Repository("owner/name")
SITE = {f"{path.stem}.html" for path in LESSONS.glob("*.ipynb")}


@pytest.fixture(scope="module")
def errors() -> BeautifulSoup:
    page = next(p for p in course_pages(ROOT, SITE) if p.address == "errors_explained.html")
    assert page.title == "Errors explained"
    return BeautifulSoup(page.body, "html.parser")


@pytest.mark.slow
def test_each_message_is_raised_by_the_program_above_it(errors):
    headings = errors.select("h3")
    messages = [h.find_next("div", class_="output_error").get_text() for h in headings]
    assert [
        (heading.get_text(), message)
        for heading, message in zip(headings, messages, strict=True)
        if heading.get_text() not in message
    ] == []
    assert len(errors.select(".output_error")) == len(headings) > 20
    kinds = {p101.DeadlockError, p101.MisuseError, p101.RankFailed, p101.LaunchTimeout}
    for kind in kinds | {p101.ScheduleError, NotEqualError, NoLayoutError}:
        assert any(kind.__name__ in message for message in messages), kind
    assert not any("/" in place for m in messages for place in re.findall(r"\S+\.py", m))


@pytest.mark.slow
def test_each_error_is_explained_and_its_lesson_has_the_section(errors):
    for heading in errors.select("h3"):
        parts = [p.get_text() for p in heading.find_next_siblings("p", limit=3)]
        assert [p.partition(".")[0] for p in parts] == ["What it means", "What to do", "Lesson"]
        link = heading.find_next("a", href=re.compile(r"^\d\d_"))
        page, _, anchor = link["href"].partition("#")
        notebook = nbformat.read(LESSONS / page.replace(".html", ".ipynb"), as_version=4)
        prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
        sections = re.findall(r"^##+ +(.*)$", prose, re.MULTILINE)
        assert unquote(anchor) in [section.strip().replace(" ", "-") for section in sections]


def test_a_program_that_raises_nothing_is_refused():
    with pytest.raises(ValueError, match="raises nothing:\n\nx = 1"):
        raised("x = 1\n")


TEACHING = "# Teach\n\n[a](../lessons/00_ranks.ipynb#Why), [b](../homework/hw1_a/hw1.py), [c](#d)"


@pytest.mark.parametrize("repository", [None, HERE], ids=["unknown", "known"])
def test_a_link_leads_to_a_page_or_to_the_repository_or_is_text(tmp_path, repository):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "teaching.md").write_text(f"{TEACHING}, [e](../x/y.py), <https://a.org>")
    pages = {"00_ranks.html", "hw1_a.html"}
    (page,) = course_pages(tmp_path, pages, repository)
    code = ["https://github.com/owner/name/blob/main/x/y.py"] if repository else []
    links = [link["href"] for link in BeautifulSoup(page.body, "html.parser").select("p a")]
    assert links == ["00_ranks.html#Why", "hw1_a.html", "#d", *code, "https://a.org"]
    (page,) = course_pages(tmp_path, (), None)
    links = [link["href"] for link in BeautifulSoup(page.body, "html.parser").select("p a")]
    assert links == ["#d", "https://a.org"]


CFF = """
cff-version: 1.2.0
message: If you use this software, please cite it.
title: "parallel101: parallel training"
version: 0.2.0
date-released: 2027-03-02
authors:
  - family-names: Lovelace
    given-names: Ada
  - name: The contributors
"""


def test_the_page_cite_has_what_the_file_says():
    shown = citation(CFF)
    assert (
        "Ada Lovelace, The contributors. *parallel101: parallel training*, version 0.2.0. 2027."
        in shown
    )
    entry = shown.partition("```\n")[2].partition("```")[0]
    assert entry.startswith("@software{parallel101,\n") and entry.endswith("}\n")
    for line in (
        "author  = {Lovelace, Ada and {The contributors}},",
        "title   = {{parallel101: parallel training}},",
        "version = {0.2.0},",
        "year    = {2027},",
    ):
        assert line in entry
    assert "url" not in entry, "no address is known"
    assert CFF.strip() in shown
    assert "url     = {https://github.com/owner/name}," in citation(CFF, HERE)


def test_a_site_has_these_pages_in_its_index(tmp_path, monkeypatch):
    monkeypatch.setattr(write_site, "run_notebook", lambda path, timeout: nbformat.read(path, 4))
    monkeypatch.setattr(module, "raised", lambda program: "an error")
    monkeypatch.setattr(write_site, "TOOL_PAGES", ())
    monkeypatch.setattr(write_site, "homework_body", lambda path: "")
    lessons = select_lessons(LESSONS, ["00"])
    write_site.publish(lessons, tmp_path, repository=HERE, report=lambda _: None)
    index = BeautifulSoup((tmp_path / "index.html").read_text(), "html.parser")
    listed = {a["href"] for a in index.select(".pages a")}
    there = {
        "glossary.html",
        "errors_explained.html",
        "teach_with_it.html",
        "hw9_thousand_gpus.html",
    }
    assert there <= listed and all((tmp_path / page).exists() for page in listed)
    jumps = [a["href"] for a in index.select("nav a")]
    assert [j for j in jumps if j.startswith("#")] == ["#lessons", "#homework"]
    assert all(index.find(id=j[1:]) is not None for j in jumps if j.startswith("#"))
    assert index.footer.a["href"] == "https://github.com/owner/name"


def test_a_lesson_can_be_opened_in_colab_if_the_repository_is_known():
    lesson = Lesson("00_ranks", "Ranks", "")
    assert "in Colab" not in lesson_page(lesson, "", 1.0, [lesson])
    page = lesson_page(lesson, "", 1.0, [lesson], Repository("owner/name", "v1.0"))
    link = BeautifulSoup(page, "html.parser").find("a", string="Open in Colab")
    colab = "https://colab.research.google.com/github/"
    assert link["href"] == f"{colab}owner/name/blob/v1.0/lessons/00_ranks.ipynb"


def test_the_repository_is_named_by_the_user_or_by_github():
    assert Repository.of("owner/name") == Repository("owner/name", "main")
    assert Repository.of("owner/name@v1") == Repository("owner/name", "v1")
    for wrong in ("name", "https://github.com/owner/name", "owner/name@", "a/b/c", ""):
        with pytest.raises(ValueError, match="expected OWNER/NAME"):
            Repository.of(wrong)
    github = {"GITHUB_REPOSITORY": "a/b", "GITHUB_REF_NAME": "v2"}
    assert Repository.of_environment(github) == Repository("a/b", "v2")
    assert Repository.of_environment({}) is None
    own = {**github, "GITHUB_SERVER_URL": "https://git.example.org"}
    assert Repository.of_environment(own) is None, "Colab opens github.com only"


@pytest.mark.parametrize("path", sorted(LESSONS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_lesson_installs_parallel101_first_where_it_is_missing(path):
    first = next(c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
    assert first.metadata.tags == ["install"], "pages leave this cell out"
    condition, line = first.source.splitlines()[-2:]
    assert condition == 'if importlib.util.find_spec("parallel101") is None:'
    assert line == "    %pip install -q parallel101"
