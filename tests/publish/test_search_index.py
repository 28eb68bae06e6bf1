"""The search's index has each section of a notebook, with an address that exists."""

from __future__ import annotations

import json

import pytest
from bs4 import BeautifulSoup
from nbformat import v4

from parallel101.laboratory.publish.course_pages import CoursePage
from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.glossary import read_terms
from parallel101.laboratory.publish.page import Lesson, lesson_body
from parallel101.laboratory.publish.search_index import (
    SearchEntry,
    glossary_entries,
    notebook_entries,
    page_entries,
    search_index,
    words_of,
)
from tests.lessons.lesson import LESSONS


def entries_of(path) -> list[SearchEntry]:
    notebook = read_notebook(path)
    return [*notebook_entries("Lesson", Lesson.of(path.stem, notebook), notebook)]


@pytest.fixture(scope="module")
def collectives() -> list[SearchEntry]:
    return entries_of(LESSONS / "01_collectives.ipynb")


def test_each_section_is_found_by_its_heading_at_its_place(collectives):
    page = BeautifulSoup(
        lesson_body(read_notebook(LESSONS / "01_collectives.ipynb"), LESSONS), "html.parser"
    )
    headings = page.select(":is(h2, h3)[id]")
    assert [entry.title for entry in collectives[1:]] == [h.get_text().strip() for h in headings]
    for entry in collectives:
        address, _, anchor = entry.address.partition("#")
        assert address == "01_collectives.html"
        assert not anchor or page.find(id=anchor)
    assert collectives[0].title == "01 Collectives"
    assert {entry.place for entry in collectives[1:]} == {"01 Collectives"}


def test_words_of_text_code_and_title_are_weighed():
    cells = [
        v4.new_markdown_cell("# A lesson\n\nFirst words."),
        v4.new_markdown_cell("## Ring all-reduce\n\nA ring, a ring, and a *ring*."),
        v4.new_code_cell("p101.all_reduce(x)  # HybridTrainer"),
    ]
    notebook = v4.new_notebook(cells=cells)
    entries = [*notebook_entries("Lesson", Lesson.of("00_a", notebook), notebook)]
    assert [entry.address for entry in entries] == ["00_a.html", "00_a.html#Ring-all-reduce"]
    packed = search_index(entries).removeprefix("globalThis.SEARCH_INDEX = ").removesuffix(";\n")
    words = json.loads(packed)["words"]
    assert words["first"] == [0, 1]
    assert words["hybridtrainer"] == [1, 1]
    assert words["ring"][1] > words["reduce"][1] > words["p101"][1] == 1


def test_words_are_found_without_capitals_and_accents():
    assert words_of("Ü-Form: all_reduce, ZeRO-3") == ["form", "all", "reduce", "zero", "3"]
    assert words_of("Réseau fp8") == ["reseau", "fp8"]


def test_terms_are_found_by_their_other_forms():
    terms = read_terms(LESSONS)
    for term, entry in zip(terms, glossary_entries(terms)):
        assert entry.address == f"glossary.html#{term.anchor}"
        assert all(form in entry.also for form in term.forms)


def test_a_page_around_the_lessons_is_found_by_its_sections():
    body = """<div class="text_cell_render"><h1 id="Errors">Errors</h1><nav>No.</nav><p>Why.</p>
    <h2 id="it-hangs">it hangs</h2><p>A cycle.</p></div>"""
    page = CoursePage("errors.html", "Errors", "What errors mean.", body, "crash")
    assert [*page_entries(page)] == [
        SearchEntry("", "Errors", "errors.html", "Why.", also="crash"),
        SearchEntry("", "it hangs", "errors.html#it-hangs", "A cycle.", "Errors"),
    ]
