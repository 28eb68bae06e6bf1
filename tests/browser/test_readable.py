"""Every kind of page around the lessons can be read and used: on a screen, a phone and paper, in
both themes, with the keyboard, and without scripts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallel101.cost import step_memory
from parallel101.laboratory.planner.known_models import KNOWN_MODELS
from parallel101.laboratory.publish.tools import memory_page
from parallel101.laboratory.publish.tools.collectives_atlas_page import START, chosen_words
from parallel101.laboratory.record.units import decimal_bytes
from tests.browser.seen import (
    cut_off,
    out_of_reach,
    scrolls_without_a_cue,
    too_pale,
    too_small,
    unfold,
    without_a_name,
)

pytestmark = pytest.mark.browser

ATLAS = "#operation=all_reduce&network=switch&algorithm="
BUILDER = "#ranks=3&microbatches=3&stages=one&times=1,1,1,0&lists=0F0.0F1.0B0_1F0.1B0.1F1_2F0.2B0"
INTERLEAVED = "state.stages = 'loop', state.lists = listsOf('interleaved'), build()"
MEMORY = "#model=llama-3-405b&dp=8&tp=8&pp=16&microbatches=32&zero_stage=1"
SHOWN = "document.querySelector('.shown').dataset.shown === address()"
OPENED = [("", "true")]  # a page's states: what follows the address, and a script to wait for
STATES = {
    "atlas_of_collectives": [(f"{ATLAS}ring&ranks=8&beside=recursive_doubling", SHOWN),
                             (f"{ATLAS}recursive_doubling&ranks=64&beside=", SHOWN)],
    "build_a_schedule": [(BUILDER, "true"),
                         (BUILDER, f"({INTERLEAVED}, choose(1, 'a1F1'), true)")],
    "does_it_fit": [*OPENED, (MEMORY, "true"), ("#model=own&tp=7", "true")],
}  # fmt: skip
# have no other controls than other pages
LINKS = ("errors_explained", "teach_with_it", "cite", "reference/parallel101/sharding")
# also every page that `make lessons` has written into this folder
SITE = os.environ.get("SITE")
LESSONS = ["everything", *(path.resolve().as_uri() for path in Path(SITE or "-").glob("*.html"))]
PAGES = ["index", "reference/index", *STATES, *LESSONS, *LINKS]


@pytest.fixture
def page(site, name) -> str:
    return name if name.startswith("file:") else f"{site}/{name}.html"


@pytest.mark.parametrize("name", PAGES)
def test_it_can_be_read_and_reached(browser, page, name):
    states, picture = STATES.get(name, OPENED), name.rpartition("site/")[2].replace("/", "-")
    for scheme, width in (("light", 1100), ("dark", 375), ("dark", 1280)):
        for number, (more, ready) in enumerate(states):
            if width == 1280 and name not in LESSONS:
                continue  # the other pages look the same
            browser.view(page + more, width, scheme=scheme)
            browser.until(ready)
            unfold(browser)
            browser.do(("document.documentElement.scrollWidth <= innerWidth", True))
            for fault in (without_a_name, scrolls_without_a_cue, cut_off, too_pale):
                assert fault(browser) == [], fault.__name__
            browser.keep(f"{picture}-{number}-{scheme}-{width}")
            if (scheme, number) == ("light", 0) and name not in LINKS:
                assert out_of_reach(browser) == []
            assert name not in LESSONS or width > 375 or too_small(browser, 7.5) == []
    # on paper: A4 without Chromium's margins, for a reader who prefers dark pages
    more, ready = states[0]
    browser.view(page + more, 717, scheme="dark")
    browser.until(ready)
    browser.emulate("print", prefers_color_scheme="dark")
    browser.js("dispatchEvent(new Event('beforeprint'))")
    browser.do(("getComputedStyle(document.body).backgroundColor", "rgb(255, 255, 255)"))
    assert cut_off(browser, scrolls=False) == []
    browser.keep(f"{picture}-print", whole=True)
    folded = "[...document.querySelectorAll('details.answer, details.code')]"
    hosts = "[...document.querySelectorAll('figure.p101 > div')]"
    hidden = "getComputedStyle(host.shadowRoot.querySelector('.bar')).display == 'none'"
    browser.do((f"{folded}.every(part => part.open)", True))
    browser.do((f"{hosts}.every(host => !host.shadowRoot || {hidden})", True))


OPENS = KNOWN_MODELS[memory_page.START[0]], memory_page.START[2]
WORDS = {
    "atlas_of_collectives": [chosen_words(START), "Exchange sums with a partner"],
    "build_a_schedule": ["needs JavaScript", "ZB-H2"],
    "does_it_fit": ["needs JavaScript", decimal_bytes(step_memory(*OPENS)[0].total)],
    "reference/index": ["all_reduce"],
}


@pytest.mark.parametrize("name", [*WORDS, *LESSONS])
def test_without_scripts_the_text_is_there_and_nothing_that_needs_one(browser, page, name):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.view(page)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    said = browser.js("document.body.innerText")
    assert [word for word in WORDS.get(name, ()) if word not in said] == []
    controls = "[...document.querySelectorAll('select, input, button')]"
    browser.do((f"{controls}.some(control => control.checkVisibility())", False))
    images = "[...document.querySelectorAll('figure.p101')].map(f => f.querySelector('img'))"
    browser.do((f"{images}.every(image => image?.complete && image.naturalWidth)", True))
    unfold(browser)
    assert cut_off(browser) == [] and without_a_name(browser) == []


@pytest.mark.parametrize("name", LESSONS)
def test_each_section_fits_a_projector(browser, page, name):
    browser.view(page, 1280, 720)
    if not browser.js("!!document.querySelector('.present:not([hidden])')"):
        pytest.skip("only lessons are shown section by section")
    browser.click("document.querySelector('.present')")
    number, count, presses = "0", "", 0
    while number != count:
        presses += 1
        assert presses < 1000, f"a clicker stays at {number}"
        browser.do("PageDown", ("document.documentElement.scrollWidth <= 1280", True))
        assert cut_off(browser) == []
        if not SITE or presses % 5 == 1:
            browser.keep(f"{name.rpartition('/')[2]}-presenter-{presses:02}")
        place = browser.js("document.querySelector('.place').textContent")
        number, _, count = place.partition(" / ")


def test_on_a_phone_the_parts_of_the_moving_picture_are_stacked(browser, site):
    for width in (1280, 375):
        browser.view(f"{site}/index.html", width)
        image = "document.querySelector('.moving img')"
        browser.do((f"{image}.naturalHeight > {image}.naturalWidth", width == 375))
