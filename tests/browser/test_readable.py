"""Every kind of page around the lessons can be read and used: on a screen, a phone and paper, in
both themes, with the keyboard, and without scripts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallel101.cost import step_memory
from parallel101.laboratory.planner.known_models import KNOWN_MODELS
from parallel101.laboratory.publish.reference import ADDRESS
from parallel101.laboratory.publish.tools import memory_page
from parallel101.laboratory.publish.tools.collectives_atlas_page import START, chosen_words
from parallel101.laboratory.record.units import decimal_bytes
from tests.browser.seen import (
    check_on_paper,
    check_readable,
    cut_off,
    out_of_reach,
    too_small,
    unfold,
    view,
    without_a_name,
    without_scripts,
)

pytestmark = pytest.mark.browser

AROUND = ("errors_explained.html", "teach_with_it.html", "cite.html")
SHARDING = "reference/parallel101/sharding.html"
ATLAS = "#operation=all_reduce&network=switch&algorithm="
BUILDER = "#ranks=3&microbatches=3&stages=one&times=1,1,1,0&lists=0F0.0F1.0B0_1F0.1B0.1F1_2F0.2B0"
INTERLEAVED = "state.stages = 'loop', state.lists = listsOf('interleaved'), build()"
MEMORY = "#model=llama-3-405b&dp=8&tp=8&pp=16&microbatches=32&zero_stage=1"
SHOWN = "document.querySelector('.shown').dataset.shown === address()"
STATES = {  # page → its states: what follows the address, and a script to wait for
    "index": [("", "")],
    "reference": [("", "")],
    SHARDING: [("", "")],
    "atlas": [(f"{ATLAS}ring&ranks=8&beside=recursive_doubling", SHOWN),
              (f"{ATLAS}recursive_doubling&ranks=64&beside=", SHOWN)],
    "builder": [(BUILDER, ""), (BUILDER, f"({INTERLEAVED}, choose(1, 'a1F1'), true)")],
    "memory": [("", ""), (MEMORY, ""), ("#model=own&tp=7", "")],
    "lesson": [("", "")],
    **{page: [("", "")] for page in AROUND},
}  # fmt: skip


# also every page that `make lessons` has written into this folder
SITE = os.environ.get("SITE")
STATES |= {path.resolve().as_uri(): [("", "")] for path in Path(SITE or "-").glob("*.html")}
LESSONS = [name for name in STATES if name == "lesson" or name.startswith("file:")]


@pytest.fixture
def page(request, name) -> str:
    if name in AROUND:
        return request.getfixturevalue("index").replace("index.html", name)
    if name.startswith("reference"):
        place = ADDRESS if name == "reference" else name
        return (request.getfixturevalue("site") / place).as_uri()
    return name if name.startswith("file:") else request.getfixturevalue(name)


@pytest.mark.parametrize("name", STATES)
def test_it_can_be_read_and_reached(browser, page, name, keep):
    picture = name.rpartition("site/")[2].replace("/", "-")
    for scheme, width in (("light", 1100), ("dark", 375), ("dark", 1280)):
        for number, (more, ready) in enumerate(STATES[name]):
            if width == 1280 and name not in LESSONS:
                continue  # the other pages look the same
            view(browser, page + more, width, scheme=scheme)
            browser.until(ready or "true")
            check_readable(browser)
            keep(browser, f"{picture}-{number}-{scheme}-{width}")
            many_links = name in (*AROUND, SHARDING)  # and no other controls than other pages
            if (scheme, number) == ("light", 0) and not many_links:
                assert out_of_reach(browser) == []
            assert name not in LESSONS or width > 375 or too_small(browser, 7.5) == []
    view(browser, page + STATES[name][0][0], 717, scheme="dark")
    browser.until(STATES[name][0][1] or "true")
    check_on_paper(browser)
    keep(browser, f"{picture}-print", whole=True)
    folded = "[...document.querySelectorAll('details.answer, details.code')]"
    hosts = "[...document.querySelectorAll('figure.p101 > div')]"
    hidden = "getComputedStyle(host.shadowRoot.querySelector('.bar')).display == 'none'"
    browser.do((f"{folded}.every(part => part.open)", True))
    browser.do((f"{hosts}.every(host => !host.shadowRoot || {hidden})", True))


OPENS = KNOWN_MODELS[memory_page.START[0]].shape, memory_page.START[2]
WORDS = {
    "atlas": ["needs JavaScript", chosen_words(START), "Exchange sums with a partner"],
    "builder": ["needs JavaScript", "ZB-H2"],
    "memory": ["needs JavaScript", decimal_bytes(step_memory(*OPENS)[0].total)],
    "reference": ["all_reduce"],
}


@pytest.mark.parametrize("name", [*WORDS, *LESSONS])
def test_without_scripts_the_text_is_there_and_nothing_that_needs_one(browser, page, name):
    with without_scripts(browser):
        view(browser, page, 1100)
        said = browser.js("document.body.innerText")
        assert [word for word in WORDS.get(name, ()) if word not in said] == []
        controls = "[...document.querySelectorAll('select, input, button')]"
        browser.do((f"{controls}.some(control => control.checkVisibility())", False))
        images = "[...document.querySelectorAll('figure.p101 img')]"
        drawn = f"{images}.filter(image => image.complete && image.naturalWidth).length"
        browser.do((drawn, browser.js("document.querySelectorAll('figure.p101').length")))
        unfold(browser)
        assert cut_off(browser) == [] and without_a_name(browser) == []


@pytest.mark.parametrize("name", LESSONS)
def test_each_section_fits_a_projector(browser, page, keep, name):
    view(browser, page, 1280, 720)
    if not browser.js("!!document.querySelector('.present:not([hidden])')"):
        pytest.skip("only lessons are shown section by section")
    browser.click("document.querySelector('.present')")
    place = "document.querySelector('.place').textContent"
    for press in range(1000):
        browser.do("PageDown", ("document.documentElement.scrollWidth <= 1280", True))
        assert cut_off(browser) == []
        if not SITE or press % 5 == 0:
            keep(browser, f"{name.rpartition('/')[2]}-presenter-{press:02}")
        number, _, count = browser.js(place).partition(" / ")
        if number == count:
            break
    else:
        raise AssertionError(f"a clicker stays at {browser.js(place)}")


def test_on_a_phone_the_parts_of_the_moving_picture_are_stacked(browser, index):
    for width in (1280, 375):
        view(browser, index, width)
        image = "document.querySelector('.moving img')"
        tall = browser.js(f"{image}.naturalHeight > {image}.naturalWidth")
        assert tall == (width == 375)
