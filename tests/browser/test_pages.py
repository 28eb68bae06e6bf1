"""A lesson's page as a reader and a lecturer use it: folded answers, paper, and the presenter's
view with the keys of a clicker.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat import v4

from parallel101.laboratory.publish.page import (
    Lesson,
    lesson_body,
    lesson_page,
)
from parallel101.laboratory.publish.repository import Repository
from parallel101.laboratory.publish.tools.in_notebook import explore_memory, explore_schedule
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.explore import explore_collective
from parallel101.laboratory.viz.plots import sweep
from parallel101.laboratory.viz.timeline import timeline_scene
from tests.browser.browser import Browser
from tests.browser.seen import (
    check_on_paper,
    check_readable,
    cut_off,
    out_of_reach,
    too_pale,
    too_small,
    unfold,
    view,
    without_a_name,
    without_scripts,
)
from tests.viz.programs import recorded, ring_all_reduce

pytestmark = pytest.mark.browser


SITE = os.environ.get("SITE")


def shown(value: object) -> v4.NotebookNode:
    """The output of a cell with this value."""
    bundle = (
        value._repr_mimebundle_()[0]
        if hasattr(value, "_repr_mimebundle_")
        else {"text/html": value._repr_html_()}
    )
    return v4.new_output("display_data", bundle)


@pytest.fixture(scope="module")
def lesson(tmp_path_factory) -> str:
    """The address of a lesson's page with everything that pages contain."""
    trace, results = recorded(ring_all_reduce, 4, 8)
    animation, timeline = collective_scene(trace, results), timeline_scene(trace)
    times = {2.0**k: 1e-4 + 2.0**k / 1e9 for k in range(6, 27, 4)}
    plot = sweep(
        {"ring": times}, {"ring": times}, title="Time against size", subtitle="one message"
    )
    lines = v4.new_output(
        "stream", name="stdout", text="".join(f"[rank 0] line {i}\n" for i in range(2_000))
    )
    error = v4.new_output(
        "error",
        ename="ValueError",
        evalue="no",
        traceback=["\x1b[0;31mValueError\x1b[0m: " + "no, " * 60],
    )
    long_line = (
        'seen = p101.watch(lambda x: p101.all_reduce(x, algorithm="ring"), world_size=8, '
        'backend="sim")  # the same ring as above'
    )
    table = "\n".join(
        [
            "| " + " | ".join(f"the heading of column {i}" for i in range(7)) + " |",
            "|---" * 7 + "|",
            "| 1.25 GB/s " * 7 + "|",
        ]
    )
    cells = [
        v4.new_markdown_cell(
            "# A lesson\n\nIts first words, and a formula: $$T = \\alpha + \\frac{m}{\\beta}$$"
        ),
        v4.new_code_cell("%pip install", metadata={"tags": ["install"]}),
        v4.new_markdown_cell("## A run\n\nBefore the question.\n\n> **Predict.** What happens?"),
        v4.new_code_cell("run.animate()", outputs=[shown(animation)]),
        v4.new_markdown_cell("The end of the answer."),
        v4.new_markdown_cell(
            "> **Write it.** A question about the answer.\n\n"
            "<details><summary>Answer</summary>\n\nA worked answer.\n\n</details>"
        ),
        v4.new_markdown_cell("Only for the lecturer.", metadata={"tags": ["notes"]}),
        v4.new_markdown_cell("## After it\n\nMore words.\n\n" + table),
        v4.new_code_cell(long_line, outputs=[shown(timeline), lines]),
        v4.new_code_cell("plot", outputs=[shown(plot)]),
        v4.new_code_cell("explore_memory()", outputs=[shown(explore_memory()), error]),
        v4.new_markdown_cell("## An explorer"),
        v4.new_code_cell("explore()", outputs=[shown(explore_collective(world="sim"))]),
    ]
    lesson = Lesson("00_a", "A lesson", "")
    page = tmp_path_factory.mktemp("site") / "00_a.html"
    page.write_text(
        lesson_page(
            lesson,
            lesson_body(v4.new_notebook(cells=cells), Path()),
            1.0,
            [lesson],
            Repository("owner/name"),
        ),
        encoding="utf-8",
    )
    return page.as_uri()


@pytest.fixture
def opened(browser, lesson):
    view(browser, lesson, 1280, 720)
    return browser


@pytest.fixture(
    params=sorted(Path(SITE).glob("*.html")) if SITE else [None],
    ids=lambda path: path.stem if path else "lesson",
)
def page(request) -> str:
    """The address of a page to look at: the lesson above, or each page of the folder SITE."""
    return request.param.resolve().as_uri() if request.param else request.getfixturevalue("lesson")


def name_of(page: str) -> str:
    return f"page-{Path(page).stem if SITE else 'lesson'}"


def test_the_first_line_of_the_index_leads_to_its_sections(browser, index):
    view(browser, index, 1280)
    links = "[...document.querySelectorAll('nav a[href^=\"#\"]')]"
    names = browser.js(f"{links}.map(link => link.textContent)")
    assert names == ["Lessons", "Homework", "Tools"]
    for number, name in enumerate(names):
        browser.click(f"{links}[{number}]")
        place = f"document.querySelector('#{name.lower()}').getBoundingClientRect()"
        browser.until(f"{place}.top < innerHeight && {place}.bottom > 0")
        browser.js("scrollTo(0, 0)")


def test_the_index_keeps_the_dates_of_a_term(browser, index):
    first = "document.querySelector('input.date')"
    view(browser, index, 1280)
    browser.js(f"{first}.closest('details').open = true")
    browser.js(f"{first}.focus()")
    browser.call("Input.insertText", text="Mon 12 October")
    browser.open("about:blank")
    browser.open(index)
    assert browser.js(f"{first}.value") == "Mon 12 October"
    filled = "[...document.querySelectorAll('input.date')].filter(f => f.value).length"
    assert browser.js(filled) == 1


@pytest.mark.parametrize("width", [1280, 1600])
def test_the_contents_stay_in_sight(browser, lesson, width):
    view(browser, lesson, width)
    browser.js("scrollTo(0, document.documentElement.scrollHeight)")
    contents, last = "document.querySelector('.toc')", ".querySelector('li:last-child a')"
    assert browser.js(f"{contents}.open") == (width == 1600), "where there is room beside the text"
    browser.until(f"{contents}{last}.hasAttribute('aria-current')")
    if width == 1280:
        browser.click(f"{contents}.querySelector('summary')")
    browser.click(f"{contents}.querySelector('a')")
    browser.until("document.querySelector('#A-run').getBoundingClientRect().top > -5")
    assert browser.js(f"{contents}.open") == (width == 1600)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_or_pale_and_everything_has_a_name(browser, page, scheme, keep):
    view(browser, page, 1280, scheme=scheme)
    assert scheme == "dark" or out_of_reach(browser) == []  # for the tab key, folded and unfolded
    check_readable(browser)
    keep(browser, f"{name_of(page)}-{scheme}")
    assert scheme == "dark" or out_of_reach(browser) == []


def test_on_a_phone_the_page_is_as_wide_as_the_screen_and_pictures_are_readable(
    browser, page, keep
):
    view(browser, page, 375, 812)
    check_readable(browser)
    keep(browser, f"{name_of(page)}-narrow")
    assert too_small(browser, 7.5) == []


def test_on_paper_everything_is_open_and_still_and_nothing_is_cut_off(browser, page, keep):
    view(browser, page, 717, scheme="dark")
    check_on_paper(browser)
    keep(browser, f"{name_of(page)}-print", whole=True)
    folded = "[...document.querySelectorAll('details.answer, details.code')]"
    assert browser.js(f"{folded}.every(part => part.open)")
    hosts = "[...document.querySelectorAll('figure > div')]"
    hidden = "getComputedStyle(host.shadowRoot.querySelector('.bar')).display == 'none'"
    assert browser.js(f"{hosts}.every(host => {hidden})"), "no controls on paper"


def test_without_scripts_the_pictures_play_and_nothing_needs_a_script(browser, page, keep):
    with without_scripts(browser):
        view(browser, page, 1280)
        figures = browser.js("document.querySelectorAll('figure.p101').length")
        images = "[...document.querySelectorAll('figure.p101 img')]"
        drawn = f"{images}.filter(image => image.complete && image.naturalWidth).length"
        assert browser.js(drawn) == figures
        idle = browser.js("document.querySelector('.present')?.checkVisibility()")
        assert not idle, "no button that does nothing"
        unfold(browser)
        keep(browser, f"{name_of(page)}-without-scripts")
        assert cut_off(browser) == []
        assert without_a_name(browser) == []


def test_each_section_fits_a_projector(browser, page, keep):
    view(browser, page, 1280, 720)
    if not browser.js("!!document.querySelector('.present:not([hidden])')"):
        pytest.skip("only lessons are shown section by section")
    browser.click("document.querySelector('.present')")
    place = "document.querySelector('.place').textContent"
    for press in range(1000):
        browser.key("PageDown")
        assert browser.js("document.documentElement.scrollWidth") <= 1280
        assert cut_off(browser) == []
        if not SITE or press % 5 == 0:
            keep(browser, f"{name_of(page)}-presenter-{press:02}")
        number, _, count = browser.js(place).partition(" / ")
        if number == count:
            break
    else:
        raise AssertionError(f"a clicker stays at {browser.js(place)}")


def seen(browser: Browser, text: str) -> bool:
    """Whether an element with this text is laid out, wherever it is on the page."""
    return browser.js(
        "[...document.querySelectorAll('p, h1, h2')].some(e => "
        f"e.textContent.includes({text!r}) && e.checkVisibility())"
    )


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


def test_the_presenters_controls_are_larger_on_a_larger_screen(browser, lesson):
    root = "document.querySelector('figure.p101 div').shadowRoot"
    high = f"{root}.querySelector('[data-do=play]').getBoundingClientRect().height"
    view(browser, lesson, 1920, 1080)
    browser.js("document.querySelector('details.answer').open = true")
    usual = browser.js(high)
    browser.key("p", text="p")
    browser.key("PageDown")
    assert browser.js(high) == 1.5 * usual
    browser.key("Escape")
    assert browser.js(high) == usual


def test_a_clicker_goes_through_the_page_section_by_section(opened):
    code = "document.querySelector('.cell:not(.celltag_install) .input')"
    opened.key("p", text="p")
    assert opened.js("document.documentElement.classList.contains('presenting')")
    assert seen(opened, "Its first words") and not seen(opened, "What happens?")
    opened.key("PageDown")
    assert seen(opened, "What happens?") and not seen(opened, "Its first words")
    assert not opened.js(f"{code}.checkVisibility()"), "the code is folded"
    assert not seen(opened, "A question about the answer"), "it appears with the answer before it"
    opened.key("PageDown")
    assert opened.js("document.querySelector('details.answer').open"), "the second press opens it"
    assert seen(opened, "A question about the answer")
    box = "document.querySelector('figure.p101').getBoundingClientRect()"
    height, bottom = opened.js(f"(r => [r.height, r.bottom])({box})")
    assert 0.8 * 720 < height <= 720 and bottom <= 721, "picture and controls fill the screen"
    output = "document.querySelector('section.now .output_area:has(figure)')"
    opened.js(f"{output}.style.minHeight = '2000px'")  # taller than the screen
    for _ in range(9):
        if not seen(opened, "After it"):
            opened.key("PageDown")
    assert seen(opened, "After it")
    assert opened.js("document.querySelector('.place').textContent") == "3 / 4"
    opened.key("PageUp")
    assert seen(opened, "What happens?")
    opened.key("c", text="c")
    assert opened.js(f"{code}.checkVisibility()")
    opened.key("Escape")
    assert seen(opened, "Its first words") and seen(opened, "More words")
    assert opened.js(f"{code}.checkVisibility()")


def test_the_clicker_plays_a_picture_before_it_goes_on(opened):
    picture = "document.querySelector('section.now figure.p101')"
    opened.key("p", text="p")
    opened.key("PageDown")
    opened.key("PageDown")  # opens the answer
    scrolled = opened.js("scrollY")
    assert float(opened.js(f"{picture}.dataset.time")) == 0
    opened.key("PageDown")
    opened.until(f"{picture}.dataset.time > 0")
    end = float(opened.js(f"{picture}.querySelector('div').shadowRoot.querySelector('input').max"))
    opened.key("PageDown")  # while it plays: to its end
    opened.until(f"{picture}.dataset.time > {end - 0.01}")
    assert opened.js("scrollY") == scrolled
    for _ in range(3):
        opened.key("PageDown")
    assert opened.js("document.querySelector('.place').textContent") == "3 / 4"


def test_the_running_text_is_in_the_notes_on_a_second_screen(opened):
    notes = "open('', 'parallel101-notes').document"
    opened.key("p", text="p")
    opened.key("PageDown")
    assert not seen(opened, "Before the question")
    opened.key("t", text="t")
    assert seen(opened, "Before the question")
    opened.key("t", text="t")
    opened.key("n", text="n")
    said = opened.js(f"{notes}.body.textContent")
    assert said.index("Only for the lecturer") < said.index("Before the question")
    assert "The end of the answer" in said and "Next: After it" in said and "2 / 4 · 0:" in said
    assert not seen(opened, "Only for the lecturer")
    assert not opened.js(f"{notes}.querySelector('.guess').checkVisibility()")
    opened.js(
        f"{notes}.body.dispatchEvent(new KeyboardEvent('keydown', {{ key: 'End', bubbles: true }}))"
    )
    assert "4 / 4" in opened.js(f"{notes}.body.textContent"), "the keys work in both windows"
    assert opened.js("document.querySelector('.place').textContent") == "4 / 4"
    opened.js("open('', 'parallel101-notes').close()")


def test_a_timer_runs_and_the_keys_are_listed(opened):
    opened.key("p", text="p")
    shown = "document.querySelector('.timer')"
    assert opened.js(f"{shown}.checkVisibility() && /^0:0\\d$/.test({shown}.textContent)")
    keys = "document.querySelector('.keys')"
    assert not opened.js(f"{keys}.checkVisibility()")
    opened.key("?", text="?")
    assert opened.js(f"{keys}.checkVisibility()")
    listed = opened.js(f"{keys}.textContent")
    assert all(key in listed for key in ("PageDown", "Home", "Enter", "notes", "timer", "Escape"))
    assert cut_off(opened) == [] and too_pale(opened) == []
    opened.key("Escape")
    assert not opened.js(f"{keys}.checkVisibility()")
    assert opened.js("document.documentElement.classList.contains('presenting')")
    opened.key("Escape")
    assert not opened.js("document.documentElement.classList.contains('presenting')")


def test_the_browser_keeps_predictions(opened, lesson):
    box = "document.querySelector('textarea.guess')"
    opened.js(f"{box}.focus()")
    opened.call("Input.insertText", text="seven p")
    assert not opened.js("document.documentElement.classList.contains('presenting')")
    opened.open("about:blank")
    opened.open(lesson)
    assert opened.js(f"{box}.value") == "seven p"
    opened.js(f"({box}.value = '', {box}.dispatchEvent(new Event('input')))")


def test_a_handout_has_no_answers(browser, lesson, keep):
    view(browser, f"{lesson}?handout", 717)
    browser.emulate("print")
    browser.js("dispatchEvent(new Event('beforeprint'))")
    keep(browser, "page-lesson-handout", whole=True)
    assert seen(browser, "What happens?") and seen(browser, "More words")
    assert not seen(browser, "The end of the answer") and not seen(browser, "A worked answer")
    assert browser.js("document.querySelector('.guess').getBoundingClientRect().height") > 60
    assert cut_off(browser, scrolls=False) == []
    assert browser.js("document.querySelector('button.handout').matches(':not([hidden])')")


def test_an_animation_is_a_storyboard_on_paper(opened):
    root = "document.querySelector('figure.p101 div').shadowRoot"
    opened.js("document.querySelector('details.answer').open = true")
    opened.emulate("print")
    opened.js("dispatchEvent(new Event('beforeprint'))")
    steps, frames, moments, captions = opened.js(
        f"(r => [r.querySelectorAll('.tick').length, r.querySelectorAll('.frame').length, "
        "[...r.querySelectorAll('.frame svg')].map(s => s.getCurrentTime()), "
        f"[...r.querySelectorAll('.frame')].map(f => f.lastChild.textContent)])({root})"
    )
    assert frames == min(steps + 1, 6) and moments == sorted(set(moments))
    assert captions[0] == f"1 / {steps}" and captions[-1] == "the end"
    assert not opened.js(f"{root}.querySelector('.stage').checkVisibility()")
    opened.js("dispatchEvent(new Event('afterprint'))")
    assert opened.js(f"{root}.querySelectorAll('.frame').length") == 0
    assert opened.js(f"{root}.querySelector('.stage').checkVisibility()")


@pytest.mark.parametrize("width", [1280, 375])
def test_play_is_in_reach_while_a_picture_is_higher_than_the_window(browser, lesson, width):
    height = 400
    view(browser, lesson, width, height)
    browser.js("document.querySelector('details.answer').open = true")
    browser.js("document.querySelector('figure.p101').scrollIntoView()")
    bottom, whole = browser.js(
        "(f => [f.querySelector('div').shadowRoot.querySelector('[data-do=play]')"
        ".getBoundingClientRect().bottom, f.offsetHeight])(document.querySelector('figure.p101'))"
    )
    assert whole > height and 0 < bottom <= height


@pytest.mark.parametrize(
    ("tool", "shows"),
    [
        (
            explore_memory("llama-3-70b", "H200", dp=4, zero_stage=3, overlap=False),
            "[state.model, state.gpu, state.layout.dp, state.layout.zero_stage, "
            "state.layout.overlap].join() === 'llama-3-70b,H200,4,3,false'",
        ),
        (
            explore_schedule("zb-h1", stages=2, microbatches=3, weight_grad=0.5),
            "[state.ranks, state.microbatches, state.costs.W, complete()].join() "
            "=== '2,3,0.5,true'",
        ),
    ],
    ids=["memory", "schedule"],
)
def test_a_tool_in_a_notebook_opens_with_its_settings(browser, tool, shows):
    frame = BeautifulSoup(tool._repr_html_(), "html.parser").iframe
    browser.call("Page.navigate", url=frame["src"])
    browser.until(shows)
    assert browser.js("getComputedStyle(document.querySelector('nav')).display") == "none"
