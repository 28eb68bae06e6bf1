"""A lesson's page as a reader and a lecturer use it: folded answers, paper, and the presenter's
view with the keys of a clicker. Whether pages can be read is tested in test_readable.py.
"""

from __future__ import annotations

import base64

import pytest
from bs4 import BeautifulSoup

from parallel101.cost import ModelShape
from parallel101.laboratory.publish.tools.in_notebook import explore_memory, explore_schedule
from tests.browser.browser import Browser
from tests.browser.seen import cut_off, too_pale

pytestmark = pytest.mark.browser

ANSWER = "document.querySelector('details.answer')"
FIGURE = "document.querySelector('figure.p101')"
ROOT = f"{FIGURE}.querySelector('div').shadowRoot"
CODE = "document.querySelector('.cell:not(.celltag_install) .input').checkVisibility()"
PLACE = "document.querySelector('.place').textContent"
PRESENTING = "document.documentElement.classList.contains('presenting')"
KEYS = "document.querySelector('.keys')"
GUESS = "document.querySelector('textarea.guess')"


@pytest.fixture
def page(site) -> str:
    return f"{site}/everything.html"


@pytest.fixture
def opened(browser, page):
    browser.view(page, 1280, 720)
    return browser


def seen(text: str) -> str:
    """Whether an element with this text is laid out, wherever it is on the page."""
    holds = f"e.textContent.includes({text!r}) && e.checkVisibility()"
    return f"[...document.querySelectorAll('p, h1, h2')].some(e => {holds})"


def write_and_come_back(browser: Browser, field: str, text: str) -> None:
    """Write into a field, leave the page, and open it again."""
    address = browser.js("location.href")
    browser.write(field, text)
    browser.open("about:blank")
    browser.open(address)
    browser.do((f"{field}.value", text))


def test_the_index_leads_to_its_sections_and_keeps_the_dates_of_a_term(browser, site):
    browser.view(f"{site}/index.html", 1280)
    links = "[...document.querySelectorAll('nav a[href^=\"#\"]')]"
    names = ["Lessons", "Homework", "Tools"]
    browser.do((f"{links}.map(link => link.textContent)", names))
    for number, name in enumerate(names):
        browser.click(f"{links}[{number}]")
        place = f"document.querySelector('#{name.lower()}').getBoundingClientRect()"
        browser.until(f"{place}.top < innerHeight && {place}.bottom > 0")
        browser.js("scrollTo(0, 0)")
    dates = "[...document.querySelectorAll('input.date')]"
    browser.js(f"{dates}[0].closest('details').open = true")
    write_and_come_back(browser, f"{dates}[0]", "Mon 12 October")
    browser.do((f"{dates}.filter(f => f.value).length", 1))


@pytest.mark.parametrize("width", [1280, 1600])
def test_the_contents_stay_in_sight(browser, page, width):
    browser.view(page, width)
    browser.js("scrollTo(0, document.documentElement.scrollHeight)")
    contents, beside = "document.querySelector('.toc')", (width == 1600)
    browser.do((f"{contents}.open", beside))  # where there is room beside the text
    browser.until(f"{contents}.querySelector('li:last-child a').hasAttribute('aria-current')")
    if not beside:
        browser.click(f"{contents}.querySelector('summary')")
    browser.click(f"{contents}.querySelector('a')")
    browser.until("document.querySelector('#A-run').getBoundingClientRect().top > -5")
    browser.do((f"{contents}.open", beside))


def test_an_answer_opens_with_the_keyboard_and_on_paper_and_predictions_are_kept(opened):
    opened.do((seen("What happens?"), True), (seen("The end of the answer"), False))
    opened.js(f"{ANSWER}.querySelector('summary').focus()")
    opened.do("Enter")
    opened.until(f"{ANSWER}.open")
    opened.do((seen("The end of the answer"), True))
    write_and_come_back(opened, GUESS, "seven p")
    opened.do((PRESENTING, False), (f"{ANSWER}.open", False))  # "p" begins no presentation
    opened.js(f"({GUESS}.value = '', {GUESS}.dispatchEvent(new Event('input')))")
    assert base64.b64decode(opened.call("Page.printToPDF")["data"]).startswith(b"%PDF")
    opened.do((f"{ANSWER}.open", True))


def test_a_clicker_goes_through_the_page_section_by_section(opened):
    first, second, asked = seen("Its first words"), seen("What happens?"), seen("A question about")
    opened.do("p", (PRESENTING, True), (first, True), (second, False))
    opened.do("PageDown", (second, True), (first, False), (CODE, False))
    opened.do((asked, False))  # it appears with the answer before it
    opened.do("PageDown", (f"{ANSWER}.open", True), (asked, True))
    height, bottom = opened.js(f"(r => [r.height, r.bottom])({FIGURE}.getBoundingClientRect())")
    assert 0.8 * 720 < height <= 720 and bottom <= 721, "picture and controls fill the screen"
    # it plays the picture before it goes on
    picture = FIGURE.replace("figure", "section.now figure")
    scrolled = opened.js("scrollY")
    opened.do((f"{picture}.dataset.time", "0.000"), "PageDown")
    opened.until(f"{picture}.dataset.time > 0")
    end = float(opened.js(f"{picture}.querySelector('div').shadowRoot.querySelector('input').max"))
    opened.do("PageDown")  # while it plays: to its end
    opened.until(f"{picture}.dataset.time > {end - 0.01}")
    opened.do(("scrollY", scrolled))
    output = "document.querySelector('section.now .output_area:has(figure)')"
    opened.js(f"{output}.style.minHeight = '2000px'")  # taller than the screen
    for _ in range(9):
        if not opened.js(seen("After it")):
            opened.key("PageDown")
    opened.do((seen("After it"), True), (PLACE, "3 / 4"), "PageUp", (second, True))
    opened.do("c", (CODE, True), "Escape", (first, True), (seen("More words"), True), (CODE, True))


def test_the_running_text_is_in_the_notes_on_a_second_screen(opened):
    notes, before = "open('', 'parallel101-notes').document", seen("Before the question")
    opened.do("p", "PageDown", (before, False), "t", (before, True), "t", "n")
    said = opened.js(f"{notes}.body.textContent")
    assert said.index("Only for the lecturer") < said.index("Before the question")
    assert "The end of the answer" in said and "Next: After it" in said and "2 / 4 · 0:" in said
    opened.do((seen("Only for the lecturer"), False))
    opened.do((f"{notes}.querySelector('.guess').checkVisibility()", False))
    press = "new KeyboardEvent('keydown', { key: 'End', bubbles: true })"
    opened.js(f"{notes}.body.dispatchEvent({press})")  # the keys work in both windows
    opened.do((f"{notes}.body.textContent.includes('4 / 4')", True), (PLACE, "4 / 4"))
    opened.js("open('', 'parallel101-notes').close()")


def test_a_timer_runs_the_keys_are_listed_and_controls_grow_with_the_screen(opened):
    opened.resize(1920, 1080)
    opened.js(f"{ANSWER}.open = true")
    high = f"{ROOT}.querySelector('[data-do=play]').getBoundingClientRect().height"
    usual, timer = opened.js(high), "document.querySelector('.timer')"
    opened.do("p", (f"{timer}.checkVisibility() && /^0:0\\d$/.test({timer}.textContent)", True))
    opened.do((f"{KEYS}.checkVisibility()", False), "?", (f"{KEYS}.checkVisibility()", True))
    listed = opened.js(f"{KEYS}.textContent")
    assert all(key in listed for key in ("PageDown", "Home", "Enter", "notes", "timer", "Escape"))
    assert cut_off(opened) == [] and too_pale(opened) == []
    opened.do("Escape", (f"{KEYS}.checkVisibility()", False), (PRESENTING, True))
    opened.do("PageDown", (high, 1.5 * usual), "Escape", (PRESENTING, False), (high, usual))


def test_on_paper_a_handout_has_no_answers_and_an_animation_is_a_storyboard(browser, page):
    browser.view(f"{page}?handout", 717)
    browser.emulate("print")
    browser.js("dispatchEvent(new Event('beforeprint'))")
    browser.keep("page-lesson-handout", whole=True)
    browser.do((seen("What happens?"), True), (seen("More words"), True))
    browser.do((seen("The end of the answer"), False), (seen("A worked answer"), False))
    browser.do((f"{GUESS}.getBoundingClientRect().height > 60", True))
    browser.do(("document.querySelector('button.handout').matches(':not([hidden])')", True))
    assert cut_off(browser, scrolls=False) == []
    browser.view(page, 1280, 720)
    browser.js(f"{ANSWER}.open = true")
    browser.emulate("print")
    browser.js("dispatchEvent(new Event('beforeprint'))")
    steps, moments, captions = browser.js(f"""(r => [r.querySelectorAll('.tick').length,
        [...r.querySelectorAll('.frame svg')].map(s => s.getCurrentTime()),
        [...r.querySelectorAll('.frame')].map(f => f.lastChild.textContent)])({ROOT})""")
    assert len(captions) == min(steps + 1, 6) and moments == sorted({*moments})
    assert captions[0] == f"1 / {steps}" and captions[-1] == "the end"
    stage = f"{ROOT}.querySelector('.stage').checkVisibility()"
    browser.do((stage, False))
    browser.js("dispatchEvent(new Event('afterprint'))")
    browser.do((f"{ROOT}.querySelectorAll('.frame').length", 0), (stage, True))


def test_play_is_in_reach_while_a_picture_is_higher_than_the_window(browser, page):
    for width in (1280, 375):
        browser.view(page, width, 400)
        browser.js(f"({ANSWER}.open = true, {FIGURE}.scrollIntoView())")
        play = f"{ROOT}.querySelector('[data-do=play]').getBoundingClientRect().bottom"
        bottom, whole = browser.js(f"[{play}, {FIGURE}.offsetHeight]")
        assert whole > 400 and 0 < bottom <= 400


LAYOUT = "state.layout.dp, state.layout.zero_stage, state.layout.overlap"
OWN = ModelShape(768, 12, 12, 50257, 1024, tied=True)
IN_NOTEBOOK = {  # the settings on the page, and their values → how the tool is opened
    (f"state.model, state.gpu, {LAYOUT}", "llama-3-70b,H200,4,3,false"): (
        *(explore_memory, "llama-3-70b", "H200", {"dp": 4, "zero_stage": 3, "overlap": False}),
    ),
    (
        *("state.model, state.shape.width, state.shape.tied, state.shape.kv_heads",),
        "own,768,true,",
    ): (explore_memory, OWN, {}),
    ("state.ranks, state.microbatches, state.costs.W, complete()", "2,3,0.5,true"): (
        *(explore_schedule, "zb-h1", {"stages": 2, "microbatches": 3, "weight_grad": 0.5}),
    ),
}


def test_a_tool_in_a_notebook_opens_with_its_settings(browser):
    for (settings, values), (explore, *given, options) in IN_NOTEBOOK.items():
        frame = BeautifulSoup(explore(*given, **options)._repr_html_(), "html.parser").iframe
        browser.call("Page.navigate", url=frame["src"])
        browser.until(f"[{settings}].join() === '{values}'")
        browser.do(("getComputedStyle(document.querySelector('nav')).display", "none"))
