"""The atlas of collectives: it shows what a run recorded anew takes, and plays its picture."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import starmap
from pathlib import Path

import pytest

from parallel101.laboratory.publish.tools.recorded_collectives import Choice, record
from parallel101.laboratory.record.units import human_bytes, human_seconds
from tests.browser.browser import Browser

pytestmark = pytest.mark.browser

RING = Choice("all_reduce", "ring", 4, "switch")
SAID = "document.querySelector('#said').textContent"
MENUS = "MENUS.map(name => at(name).value)"
COUNTS = "players().map(root => root.querySelector('.count').textContent)"


@pytest.fixture
def atlas(browser, site) -> Callable[..., None]:
    """atlas(choice, beside) opens the page with this choice."""

    def atlas(choice: Choice, beside: str = "") -> None:
        wanted = "&".join(f"{k}={v}" for k, v in (choice._asdict() | {"beside": beside}).items())
        browser.view(f"{site}/atlas_of_collectives.html#{wanted}")
        is_shown(browser, choice.algorithm, beside)

    return atlas


def is_shown(browser: Browser, *algorithms: str) -> None:
    names = json.dumps([name for name in algorithms if name])
    shown = "[...document.querySelectorAll('.shown article')].map(a => a.dataset.algorithm)"
    browser.until(f"document.querySelector('.shown').dataset.shown === address() && "
                  f"{shown}.join() === {names}.join()")  # fmt: skip


def choose(browser: Browser, menu: str, value: str) -> None:
    browser.choose(f"at('{menu}')", value)


def facts(choice: Choice) -> list[str]:
    found, _ = record(choice)
    seconds = map(human_seconds, (found.seconds, found.seconds_small))
    return [f"{found.steps:g}", *seconds, human_bytes(found.busiest), human_bytes(found.total)]


CHOICES = (("all_reduce", "ring", 5, "switch"), ("all_reduce", "torus", 8, "torus"),
           ("all_gather", "bruck", 8, "ring"))  # fmt: skip


@pytest.mark.parametrize("choice", [*starmap(Choice, CHOICES)], ids=str)
def test_facts_and_picture_are_those_of_a_run_recorded_anew(browser, atlas, choice):
    atlas(choice)
    place = f"document.querySelector('.shown [data-algorithm={choice.algorithm}]')"
    shown = f"[...{place}.querySelectorAll('dd')].map(d => d.textContent)"
    svg = "runs[key()].svg.map(number => elements[number]).join('')"
    name = f"{choice.operation}.{choice.algorithm}"
    scene = record(choice)[1]
    browser.do(
        (shown, facts(choice)),
        (f"load('{name}').then(({{elements, runs}}) => {svg})", scene.svg(smil=True)),
        (COUNTS, [f"0 / {len(scene.stops)}"]),
    )


def test_bytes_and_seconds_are_written_as_in_python_and_both_play_together(browser, atlas):
    atlas(RING, "recursive_doubling")
    draw = random.Random(5)
    sizes = [0, 1, 1023, 1024, 1536, 2**40, *(int(10 ** draw.uniform(0, 13)) for _ in range(300))]
    times = [1e-6, 1e-3, 1.0, 0.25, *(10 ** draw.uniform(-7, 2) for _ in range(300))]
    browser.do(
        (f"{sizes}.map(humanBytes)", [*map(human_bytes, sizes)]),
        (f"{times}.map(humanSeconds)", [*map(human_seconds, times)]),
        (COUNTS, ["0 / 6", "0 / 2"]),
    )
    browser.js("players().forEach(root => { root.querySelector('select').value = 4; })")
    browser.click("at('next-both')")
    browser.until(f"{COUNTS}.join() === '1 / 6,1 / 2'")
    browser.click("at('play-both')")
    browser.until(f"{COUNTS}.join() === '2 / 6,2 / 2'")
    top = browser.js("document.querySelector('.shown figure').getBoundingClientRect().top")
    assert 0 <= top < 100, "what plays is in sight"
    browser.do((f"/takes.*as long as/.test({SAID})", True))


def test_the_address_carries_the_choice_and_a_missing_file_is_named(browser, atlas, site):
    atlas(Choice("all_reduce", "ring", 8, "switch"), "recursive_doubling")
    choose(browser, "network", "torus")
    choose(browser, "beside", "torus")
    is_shown(browser, "ring", "torus")
    browser.reload()
    is_shown(browser, "ring", "torus")
    browser.do((MENUS, ["all_reduce", "ring", "torus", "8", "torus"]))
    browser.click("document.querySelector('.algorithms a')")
    is_shown(browser, "ring", "recursive_doubling")
    hash_ = "location.hash = '#operation=all_reduce&algorithm=%s'"
    browser.js(hash_ % "torus")
    is_shown(browser, "torus")
    browser.js(hash_ % "tours")
    browser.until(f"{SAID}.includes('address')")
    browser.do((MENUS, ["all_reduce", "torus", "", "8", "torus"]))
    path = Path(site.removeprefix("file://"), "atlas", "all_gather.bruck.js")
    aside = path.rename(path.with_suffix(".aside"))
    try:
        browser.js("location.hash = '#operation=all_gather&algorithm=bruck&ranks=8'")
        browser.until(f"{SAID}.includes('atlas/all_gather.bruck.js')")
    finally:
        aside.rename(path)
    choose(browser, "ranks", "8")
    is_shown(browser, "bruck")


def test_what_a_choice_rules_out_is_said_and_keys_choose_and_play(browser, atlas):
    atlas(Choice("all_reduce", "torus", 8, "switch"), "recursive_doubling")
    choose(browser, "ranks", "5")
    is_shown(browser, "ring", "recursive_doubling")
    grid = "Torus needs a grid of two axes, which 5 ranks"
    torus = "[...at('algorithm').options].find(o => o.value === 'torus')"
    browser.do((f"{SAID}.startsWith('{grid}')", True), (f"{torus}.disabled", True))
    choose(browser, "algorithm", "recursive_doubling")
    is_shown(browser, "recursive_doubling", "ring")
    choose(browser, "ranks", "64")
    is_shown(browser, "recursive_doubling")
    atlas(RING)
    browser.js("at('algorithm').focus()")
    browser.key("r")  # from "ring" to the next one with this letter
    is_shown(browser, "recursive_doubling")
    browser.js("players()[0].querySelector('.stage').focus()")
    browser.do("End", (COUNTS, ["2 / 2"]))
