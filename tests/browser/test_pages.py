"""A lesson's page as a reader and a lecturer use it: folded answers, paper, and the presenter's view with the keys of a clicker."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from nbformat import v4

from parallel101.publish.page import Lesson, lesson_body, lesson_page
from parallel101.viz.chromium import Browser
from parallel101.viz.collective import collective_scene
from tests.viz.programs import recorded, ring_all_reduce

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(chromium, tmp_path_factory):
    picture = collective_scene(*recorded(ring_all_reduce, 4, 8)).html()
    cells = [
        v4.new_markdown_cell("# A lesson\n\nIts first words."),
        v4.new_markdown_cell("## A run\n\n> **Predict.** What happens?"),
        v4.new_code_cell("run.animate()", outputs=[v4.new_output("display_data", {"text/html": picture})]),
        v4.new_markdown_cell("The end of the answer."),
        v4.new_markdown_cell("## After it\n\nMore words."),
    ]
    lesson = Lesson("00_a", "A lesson", "")
    page = tmp_path_factory.mktemp("site") / "00_a.html"
    page.write_text(lesson_page(lesson, lesson_body(v4.new_notebook(cells=cells), Path()), 1.0, [lesson]), encoding="utf-8")
    with Browser(chromium, 1280, 720) as browser:
        browser.page = page.as_uri()
        yield browser
        assert browser.errors == []


@pytest.fixture
def opened(browser):
    browser.open("about:blank")
    browser.resize(1280, 720)
    browser.open(browser.page)
    return browser


def seen(browser: Browser, text: str) -> bool:
    """Whether an element with this text is laid out, wherever it is on the page."""
    return browser.js(f"[...document.querySelectorAll('p, h1, h2')].some(e => e.textContent.includes({text!r}) && e.checkVisibility())")


def test_an_answer_opens_with_the_keyboard_and_is_open_on_paper(opened):
    assert seen(opened, "What happens?") and not seen(opened, "The end of the answer")
    opened.js("document.querySelector('details.answer > summary').focus()")
    opened.key("Enter", text="\r")
    opened.until("document.querySelector('details.answer').open")
    assert seen(opened, "The end of the answer")


def test_a_printed_page_shows_the_answers(opened):
    pdf = base64.b64decode(opened.call("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF")
    assert opened.js("document.querySelector('details.answer').open"), "opened before printing"


def test_a_clicker_goes_through_the_page_section_by_section(opened):
    opened.key("p", text="p")
    assert opened.js("document.documentElement.classList.contains('presenting')")
    assert seen(opened, "Its first words") and not seen(opened, "What happens?")
    opened.key("PageDown")
    assert seen(opened, "What happens?") and not seen(opened, "Its first words") and not seen(opened, "The end of the answer")
    assert not opened.js("document.querySelector('.input').checkVisibility()"), "the code is folded"
    opened.key("PageDown")
    assert seen(opened, "The end of the answer"), "the second press opens the answer"
    height, bottom = opened.js("(r => [r.height, r.bottom])(document.querySelector('figure.p101').getBoundingClientRect())")
    assert 0.8 * 720 < height <= 720 and bottom <= 721, "the picture and its controls fill the screen"
    opened.js("document.querySelector('section.now .output_area:has(figure)').style.minHeight = '2000px'")  # taller than the screen
    for _ in range(5):
        if not seen(opened, "More words"):
            opened.key("PageDown")
    assert seen(opened, "More words") and opened.js("document.querySelector('.place').textContent") == "3 / 3"
    opened.key("PageUp")
    assert seen(opened, "What happens?")
    opened.key("c", text="c")
    assert opened.js("document.querySelector('.input').checkVisibility()")
    opened.key("Escape")
    assert (
        seen(opened, "Its first words") and seen(opened, "More words") and opened.js("document.querySelector('.input').checkVisibility()")
    )
