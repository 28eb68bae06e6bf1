"""The pages around the lessons: each message of Errors explained is one that a program raises, and
links lead to a page, to the repository, or nowhere.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup

import parallel101 as p101
from parallel101.laboratory.planner.search import NoLayoutError
from parallel101.laboratory.publish.course_pages import citation, course_pages, raised
from parallel101.laboratory.publish.find import Repository
from parallel101.trainers.verify.report import NotEqualError
from tests.lessons.lesson import LESSONS, prose

ROOT = LESSONS.parent
HERE = Repository("owner/name")
SITE = {f"{path.stem}.html" for path in LESSONS.glob("*.ipynb")}


@pytest.fixture(scope="module")
def errors() -> BeautifulSoup:
    page = next(p for p in course_pages(ROOT, SITE) if p.address == "errors_explained.html")
    assert page.title == "Errors explained"
    return BeautifulSoup(page.body, "html.parser")


@pytest.mark.slow
def test_each_message_is_raised_by_the_program_above_it_and_its_lesson_has_the_section(errors):
    headings = errors.select("h3")
    messages = [h.find_next("div", class_="output_error").get_text() for h in headings]
    said = [(heading.get_text(), text) for heading, text in zip(headings, messages, strict=True)]
    assert [pair for pair in said if pair[0] not in pair[1]] == []
    assert len(errors.select(".output_error")) == len(headings) > 20
    kinds = {p101.DeadlockError, p101.MisuseError, p101.RankFailed, p101.LaunchTimeout}
    for kind in kinds | {p101.ScheduleError, NotEqualError, NoLayoutError}:
        assert any(kind.__name__ in message for message in messages), kind
    assert not any("/" in place for m in messages for place in re.findall(r"\S+\.py", m))
    for heading in headings:
        parts = [p.get_text() for p in heading.find_next_siblings("p", limit=3)]
        assert [p.partition(".")[0] for p in parts] == ["What it means", "What to do", "Lesson"]
        link = heading.find_next("a", href=re.compile(r"^\d\d_"))
        page, _, anchor = link["href"].partition("#")
        sections = re.findall(r"^##+ +(.*)$", prose(page.removesuffix(".html")), re.MULTILINE)
        assert unquote(anchor) in [section.strip().replace(" ", "-") for section in sections]


def test_a_program_that_raises_nothing_is_refused():
    with pytest.raises(ValueError, match="raises nothing:\n\nx = 1"):
        raised("x = 1\n")


TEACHING = "# Teach\n\n[a](../lessons/00_ranks.ipynb#Why), [b](../homework/hw1_a/hw1.py), [c](#d)"


def test_a_link_leads_to_a_page_or_to_the_repository_or_is_text(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "teaching.md").write_text(f"{TEACHING}, [e](../x/y.py), <https://a.org>")
    pages = ["00_ranks.html#Why", "hw1_a.html"]
    code = ["https://github.com/owner/name/blob/main/x/y.py"]
    for known, repository, links in (
        (("00_ranks.html", "hw1_a.html"), None, [*pages, "#d"]),
        (("00_ranks.html", "hw1_a.html"), HERE, [*pages, "#d", *code]),
        ((), None, ["#d"]),
    ):
        (page,) = course_pages(tmp_path, known, repository)
        found = BeautifulSoup(page.body, "html.parser").select("p a")
        assert [link["href"] for link in found] == [*links, "https://a.org"]


CFF = """
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
    title = "*parallel101: parallel training*, version 0.2.0. 2027."
    assert f"Ada Lovelace, The contributors. {title}" in shown
    assert CFF.strip() in shown and "url" not in shown, "no address is known"
    fields = {"author": "{Lovelace, Ada and {The contributors}}", "version": "{0.2.0}"}
    fields |= {"title": "{{parallel101: parallel training}}", "year": "{2027}"}
    assert "@software{parallel101," in shown
    assert all(f"{name:7} = {value},\n" in shown for name, value in fields.items())
    assert "url     = {https://github.com/owner/name}," in citation(CFF, HERE)
