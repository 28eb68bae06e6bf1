"""The player in a real browser: buttons, keys, theme, narrow screens, print, and pages without
scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.palette import THEMES
from parallel101.laboratory.viz.timeline import timeline_scene
from tests.browser.browser import Browser
from tests.viz.programs import recorded, ring_all_reduce

pytestmark = pytest.mark.browser

FIGURE = "document.querySelector('figure')"
ROOT = "document.querySelector('figure > div').shadowRoot"
COUNT = f"{ROOT}.querySelector('.count').textContent"
TIME = f"+{FIGURE}.dataset.time"
NOW = f"{ROOT}.querySelector('svg').getCurrentTime()"
PLAY = f"{ROOT}.querySelector('[data-do=play]')"
END = f"+{ROOT}.querySelector('input').max"
SAID = f"{ROOT}.querySelector('[aria-live]').textContent"
DARK = f"{ROOT}.querySelector('.player').classList.contains('dark')"
VIEW = f"{ROOT}.querySelector('.stage svg').getAttribute('viewBox')"
SHOWN = "document.images.length === 1 && document.images[0].complete"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    trace, results = recorded(ring_all_reduce, 4, 8, uneven=True)
    folder = tmp_path_factory.mktemp("pages")
    timeline_scene(trace).save(folder / "timeline.html")
    ring = collective_scene(trace, results).save(folder / "ring.html")
    bare = re.sub(r"<script>.*</script>", "", ring.read_text(), flags=re.S)
    (folder / "bare.html").write_text(bare)
    return ring


@pytest.fixture
def player(browser, page) -> Iterator[Browser]:
    """The page, just opened at its usual width."""
    browser.view(page.as_uri(), 1000)
    browser.until(f"{FIGURE}.dataset.mounted && {FIGURE}.dataset.step")
    return browser


def test_it_waits_to_be_played_plays_to_the_end_and_keys_and_scrubbing_go_to_a_moment(player):
    player.do((COUNT, "0 / 6"), (TIME, 0))
    player.js(f"({ROOT}.querySelector('select').value = 4, {PLAY}.click())")
    player.until(f"{FIGURE}.dataset.step == 2")
    player.do((f"{NOW} > 1.5", True), (f"{PLAY}.ariaLabel", "Pause"))
    player.until(f"{PLAY}.ariaLabel == 'Play'")
    player.do((COUNT, "6 / 6"), (f"{TIME} - {END}", 0), (f"{SAID}.includes('all 4 ranks')", True))
    player.js(f"{ROOT}.querySelector('.stage').focus()")
    player.do("Home", (COUNT, "0 / 6"), (TIME, 0), "ArrowRight")
    player.until(f"{PLAY}.ariaLabel == 'Play' && {FIGURE}.dataset.step == 1")
    player.do((f"{SAID}.includes('Step 1 of 6')", True), "End", (COUNT, "6 / 6"))
    player.do("ArrowLeft", (COUNT, "5 / 6"), "Home", " ")
    player.until(f"{FIGURE}.dataset.step == 1")
    player.do(" ")
    stopped = player.js(TIME)
    player.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    player.do((TIME, stopped))
    scrub = "i.value = 5; i.dispatchEvent(new Event('input'));"
    player.js(f"(i => {{ {scrub} }})({ROOT}.querySelector('input'))")
    player.do((COUNT, "4 / 6"), (TIME, 5), (f"Math.abs({NOW} - 5) < .01", True))
    player.do((f"{ROOT}.querySelectorAll('.tick').length", 6))


def test_it_follows_theme_width_paper_and_reduced_motion_and_adds_nothing_to_the_page(player, page):
    loaded = "performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:'))"
    player.do(("document.querySelectorAll('svg, style:not(head style)').length", 0))
    player.do((f"{loaded}.length", 0), (DARK, False))
    for node in (FIGURE, "document.querySelector('figure > div')"):
        player.do((f"{node}.getAttribute('data-lm-suppress-shortcuts')", "true"))
    for background, dark in (("#111", DARK), ("#fff", f"!{DARK}")):
        player.js(f"document.body.style.background = '{background}'")
        player.until(dark)
    player.js("document.body.style.background = ''")
    player.emulate(prefers_color_scheme="dark")
    player.until(DARK)
    # on a phone the panels stand below each other, and on paper is the last frame
    player.resize(390)
    player.until(f"{VIEW} == '0 0 480 842'")
    player.do(("document.documentElement.scrollWidth <= 390", True))
    player.do((f"getComputedStyle({ROOT}.querySelector('.caption')).display", "block"))
    player.resize(1000)
    player.until(f"{VIEW} == '0 0 960 500'")
    player.js("dispatchEvent(new Event('beforeprint'))")
    player.do((f"Math.abs({NOW} - {END}) < .01", True))
    player.js("dispatchEvent(new Event('afterprint'))")
    player.do((f"{NOW} < .01", True))
    player.emulate(prefers_reduced_motion="reduce")
    player.js(f"{ROOT}.querySelector('[data-do=next]').click()")  # jumps to the end of the step
    player.do((COUNT, "1 / 6"), (f"{TIME} > 1.5", True))
    # a still has no controls
    player.view(page.with_name("timeline.html").as_uri())
    player.until(f"{FIGURE}.dataset.mounted && {FIGURE}.dataset.step")
    player.do((f"getComputedStyle({ROOT}.querySelector('.bar')).display", "none"))
    player.do((f"{ROOT}.querySelectorAll('rect title').length", 48))


def test_without_scripts_the_animation_plays_in_a_loop_or_is_still_for_who_wants_that(player, page):
    bare = page.with_name("bare.html").as_uri()
    player.open(bare)
    player.until(SHOWN)
    player.do(("document.images[0].naturalWidth", 960), ("document.scripts.length", 0))
    first = player.picture()
    assert any(player.picture() != first for _ in range(100))
    player.emulate(prefers_reduced_motion="reduce")
    player.open(bare)
    player.until(SHOWN)
    shown = player.js("atob(document.images[0].currentSrc.split(',')[1])")
    assert "<animate" not in shown and "</svg>" in shown


def test_the_readmes_picture_has_the_readers_colours_and_stands_still_for_who_wants_that(player):
    picture = Path(__file__).parents[2] / "docs" / "ring.svg"
    seen = "['.loop', '.still', '.card'].map(of => getComputedStyle(document.querySelector(of)))"
    motions = {"no-preference": ["inline", "none"], "reduce": ["none", "inline"]}
    for theme, colours in THEMES.items():
        card = ", ".join(str(int(colours["bg"][k : k + 2], 16)) for k in (1, 3, 5))
        for motion, shown in motions.items():
            player.emulate(prefers_color_scheme=theme, prefers_reduced_motion=motion)
            player.open(f"{picture.as_uri()}?{theme}-{motion}")
            player.do((f"{seen}.map(s => s.display)", [*shown, "inline"]))
            player.do((f"{seen}[2].fill", f"rgb({card})"))
    last = "[...document.querySelectorAll('.still path')].map(p => p.getAttribute('class'))"
    assert {f"f{chunk}" for chunk in range(4)} <= {*player.js(last)}, "every chunk is there"
