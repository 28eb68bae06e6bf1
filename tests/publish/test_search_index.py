"""The search's index has each section of a notebook, with an address that exists."""

from __future__ import annotations

import json

from bs4 import BeautifulSoup
from nbformat import v4

from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.glossary import read_terms
from parallel101.laboratory.publish.offline_page import Page
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


def entries_of(name: str, notebook: v4.NotebookNode) -> list[SearchEntry]:
    return [*notebook_entries("Lesson", Lesson.of(name, notebook), notebook)]


def test_each_section_is_found_by_its_heading_at_its_place():
    notebook = read_notebook(LESSONS / "01_collectives.ipynb")
    first, *others = entries_of("01_collectives", notebook)
    page = BeautifulSoup(lesson_body(notebook, LESSONS), "html.parser")
    assert first[:3] == ("Lesson", "01 Collectives", "01_collectives.html")
    headings = [(h.get_text().strip(), h["id"]) for h in page.select(":is(h2, h3)[id]")]
    assert [(entry.title, entry.address.partition("#")[2]) for entry in others] == headings
    assert {entry.place for entry in others} == {"01 Collectives"}


def test_words_of_text_code_and_title_are_weighed():
    cells = [
        v4.new_markdown_cell("# A lesson\n\nFirst words."),
        v4.new_markdown_cell("## Ring all-reduce\n\nA ring, a ring, and a *ring*."),
        v4.new_code_cell("p101.all_reduce(x)  # HybridTrainer"),
    ]
    entries = entries_of("00_a", v4.new_notebook(cells=cells))
    assert [entry.address for entry in entries] == ["00_a.html", "00_a.html#Ring-all-reduce"]
    words = json.loads(search_index(entries).partition(" = ")[2].removesuffix(";\n"))["words"]
    assert words["first"] == [0, 1] and words["hybridtrainer"] == [1, 1]
    assert words["ring"][1] > words["reduce"][1] > words["p101"][1] == 1
    # without capitals and accents
    assert words_of("Ü-Form: all_reduce, ZeRO-3") == ["form", "all", "reduce", "zero", "3"]
    assert words_of("Réseau fp8") == ["reseau", "fp8"]


def test_a_term_is_found_by_its_other_forms_and_a_page_around_the_lessons_by_its_sections():
    terms = read_terms(LESSONS)
    for term, entry in zip(terms, glossary_entries(terms)):
        assert entry.address == f"glossary.html#{term.anchor}"
        assert all(form in entry.also for form in term.forms)
    body = """<div class="text_cell_render"><h1 id="Errors">Errors</h1><nav>No.</nav><p>Why.</p>
    <h2 id="it-hangs">it hangs</h2><p>A cycle.</p></div>"""
    page = Page("errors.html", "Errors", "What errors mean.", "crash", body=body)
    assert [*page_entries(page)] == [
        SearchEntry("", "Errors", "errors.html", "Why.", also="crash"),
        SearchEntry("", "it hangs", "errors.html#it-hangs", "A cycle.", "Errors"),
    ]
