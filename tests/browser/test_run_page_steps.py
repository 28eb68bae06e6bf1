"""The page of a long run in a browser: a reader chooses steps, and sees what happened in them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.publish import run_page as module
from parallel101.laboratory.publish.run_page import run_page
from parallel101.spans import recorder, span
from tests.browser.seen import out_of_reach, too_pale, too_small, without_a_name

pytestmark = pytest.mark.browser
STEPS, SLOW = 400, 123


def program():
    recorder().record_waits = True
    for step in range(1, STEPS + 1):
        with span("step"):
            extra = {1: 500.0, SLOW: 20.0}.get(step, 0.0)
            p101.compute(1.0 + dist.get_rank() + extra)
            dist.all_reduce(torch.ones(8))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "MOST_EVENTS", 1000)  # as if it were a long run
    trace = p101.launch(program, world_size=3, backend="sim").trace
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(run_page(trace, "train.py"), encoding="utf-8")
    patch.undo()
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_steps_are_chosen_by_number_by_pointer_and_by_time(page, browser, keep, scheme):
    browser.emulate(prefers_color_scheme=scheme)
    browser.open(page)
    browser.until("document.querySelector('.chooser').dataset.ready === ''")

    def chosen():
        return browser.js("[...document.querySelectorAll('.controls input')].map(i => +i.value)")

    def bars(look):
        return browser.js(f"document.querySelectorAll('.chooser .picture rect.{look}').length")

    assert chosen() == [STEPS - 4, STEPS]
    longest = browser.js("document.querySelector('.strip text').textContent")
    assert longest == "23.0 s", "the first step, which is slow in every run, doesn't set the scale"
    # of each rank and step: the span, and its call; and a wait of all but the slowest rank
    assert bars("collective") == 3 * 5 + 1  # and one in the legend
    browser.js("document.querySelector('.slowest').click()")
    assert chosen() == [SLOW, SLOW]
    assert "23.0 s" in browser.js("document.querySelector('.controls output').textContent")
    assert bars("collective") == 3 + 1
    browser.js("document.querySelector('.wider').click()")
    assert chosen() == [SLOW - 1, SLOW + 1]
    browser.js("(to => { to.value = 130; to.onchange(); })(document.querySelector('.to'))")
    assert chosen() == [SLOW - 1, 130]
    titles = browser.js("[...document.querySelectorAll('.picture title')].map(t => t.textContent)")
    assert any(t.startswith("all_reduce: 32 B, ") and " at " in t for t in titles)
    browser.click("document.querySelector('.strip svg')")  # in its middle
    assert abs(chosen()[0] - STEPS * (480 - 92) / 840) < 3 and chosen()[0] == chosen()[1]
    keep(browser, f"run-page-steps-{scheme}", whole=True)
    assert too_small(browser, 10) == []
    for fault in (too_pale, without_a_name, out_of_reach):
        assert fault(browser) == [], fault.__name__
