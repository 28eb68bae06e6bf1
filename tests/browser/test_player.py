"""The player in a real browser: buttons, keys, theme, narrow screens, print, and pages without
scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.timeline import timeline_scene
from tests.browser.browser import Browser
from tests.viz.programs import recorded, ring_all_reduce

pytestmark = pytest.mark.browser

FIGURE = "document.querySelector('figure')"
ROOT = "document.querySelector('figure > div').shadowRoot"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    trace, results = recorded(ring_all_reduce, 4, 8, uneven=True)
    folder = tmp_path_factory.mktemp("pages")
    timeline_scene(trace).save(folder / "timeline.html")
    ring = collective_scene(trace, results).save(folder / "ring.html")
    (folder / "bare.html").write_text(
        re.sub(r"<script>.*</script>", "", ring.read_text(), flags=re.S)
    )
    return ring


@pytest.fixture
def player(browser, page) -> Iterator[Browser]:
    """The page, just opened at its usual width."""
    browser.emulate(prefers_color_scheme="light")
    browser.resize(1000)
    browser.open(page.as_uri())
    browser.until(f"{FIGURE}.dataset.mounted && {FIGURE}.dataset.step")
    yield browser
    assert browser.errors == []


def state(browser: Browser) -> tuple[str, float]:
    """The text of the counter, and the time that is shown, in seconds."""
    return browser.js(f"{ROOT}.querySelector('.count').textContent"), float(
        browser.js(f"{FIGURE}.dataset.time")
    )


def press(browser: Browser, button: str) -> None:
    browser.js(f"{ROOT}.querySelector('[data-do={button}]').click()")


def test_it_waits_to_be_played_and_plays_to_the_end(player):
    assert state(player) == ("0 / 6", 0.0)
    player.js(f"{ROOT}.querySelector('select').value = 4")
    press(player, "play")
    player.until(f"{FIGURE}.dataset.step == 2")
    assert player.js(f"{ROOT}.querySelector('svg').getCurrentTime()") > 1.5
    assert (
        player.js(f"{ROOT}.querySelector('[data-do=play]').getAttribute('aria-label')") == "Pause"
    )
    player.until(f"{ROOT}.querySelector('[data-do=play]').getAttribute('aria-label') == 'Play'")
    count, time = state(player)
    assert count == "6 / 6"
    assert time == pytest.approx(float(player.js(f"{ROOT}.querySelector('input').max")))
    assert "all 4 ranks" in player.js(f"{ROOT}.querySelector('[aria-live]').textContent")


def test_steps_and_keys(player):
    player.js(f"{ROOT}.querySelector('.stage').focus()")
    player.js(f"{ROOT}.querySelector('select').value = 4")
    player.key("ArrowRight")
    player.until(
        f"{ROOT}.querySelector('[data-do=play]').getAttribute('aria-label') == 'Play' && "
        f"{FIGURE}.dataset.step == 1"
    )
    assert "Step 1 of 6" in player.js(f"{ROOT}.querySelector('[aria-live]').textContent")
    player.key("End")
    assert state(player)[0] == "6 / 6"
    player.key("ArrowLeft")
    assert state(player)[0] == "5 / 6"
    player.key("Home")
    assert state(player) == ("0 / 6", 0.0)
    player.key(" ", " ")
    player.until(f"{FIGURE}.dataset.step == 1")
    player.key(" ", " ")
    stopped = state(player)
    player.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert state(player) == stopped


def test_scrubbing_shows_that_moment(player):
    player.js(
        f"(i => {{ i.value = 5; i.dispatchEvent(new Event('input')); "
        f"}})({ROOT}.querySelector('input'))"
    )
    assert state(player) == ("4 / 6", 5.0)
    assert player.js(f"{ROOT}.querySelector('svg').getCurrentTime()") == pytest.approx(
        5.0, abs=0.01
    )
    assert player.js(f"{ROOT}.querySelectorAll('.tick').length") == 6


def test_the_theme_follows_the_page(player):
    dark = f"{ROOT}.querySelector('.player').classList.contains('dark')"
    assert player.js(dark) is False
    player.js("document.body.style.background = '#111'")
    player.until(dark)
    player.js("document.body.style.background = '#fff'")
    player.until(f"!{dark}")
    player.js("document.body.style.background = ''")
    player.emulate(prefers_color_scheme="dark")
    player.until(dark)


def test_with_reduced_motion_it_jumps_from_step_to_step(player):
    player.emulate(prefers_reduced_motion="reduce")
    press(player, "next")
    count, time = state(player)
    assert count == "1 / 6" and time > 1.5


def test_on_a_phone_the_panels_stand_below_each_other(player):
    player.resize(390)
    player.until(f"{ROOT}.querySelector('.stage svg').getAttribute('viewBox') == '0 0 480 842'")
    assert player.js("document.documentElement.scrollWidth") <= 390
    assert player.js(f"getComputedStyle({ROOT}.querySelector('.caption')).display") == "block"
    player.resize(1000)
    player.until(f"{ROOT}.querySelector('.stage svg').getAttribute('viewBox') == '0 0 960 500'")


def test_it_adds_no_styles_to_the_page_and_loads_nothing(player):
    assert player.js("document.querySelectorAll('svg, style:not(head style)').length") == 0
    assert (
        player.js(
            "performance.getEntriesByType('resource').filter(e => "
            "!e.name.startsWith('data:')).length"
        )
        == 0
    )
    for node in (FIGURE, "document.querySelector('figure > div')"):
        assert player.js(f"{node}.getAttribute('data-lm-suppress-shortcuts')") == "true"


def test_printing_shows_the_last_frame(player):
    player.js("dispatchEvent(new Event('beforeprint'))")
    duration = float(player.js(f"{ROOT}.querySelector('input').max"))
    assert player.js(f"{ROOT}.querySelector('svg').getCurrentTime()") == pytest.approx(
        duration, abs=0.01
    )
    player.js("dispatchEvent(new Event('afterprint'))")
    assert player.js(f"{ROOT}.querySelector('svg').getCurrentTime()") < 0.01


def test_a_picture_without_animation_has_no_controls(player, page):
    player.open(page.with_name("timeline.html").as_uri())
    player.until(f"{FIGURE}.dataset.mounted && {FIGURE}.dataset.step")
    assert player.js(f"getComputedStyle({ROOT}.querySelector('.bar')).display") == "none"
    assert player.js(f"{ROOT}.querySelectorAll('rect title').length") == 48


def test_without_scripts_the_animation_plays_in_a_loop(player, page):
    player.open(page.with_name("bare.html").as_uri())
    player.until("document.images.length === 1 && document.images[0].complete")
    assert player.js("document.images[0].naturalWidth") == 960
    assert player.js("document.scripts.length") == 0
    first = player.picture()
    assert any(player.picture() != first for _ in range(100))


def test_with_reduced_motion_and_without_scripts_a_still_picture_is_shown(player, page):
    player.emulate(prefers_reduced_motion="reduce")
    player.open(page.with_name("bare.html").as_uri())
    player.until("document.images.length === 1 && document.images[0].complete")
    shown = player.js("atob(document.images[0].currentSrc.split(',')[1])")
    assert "<animate" not in shown and "</svg>" in shown
