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


CHOSEN = "[...document.querySelectorAll('.controls input')].map(i => +i.value)"
CALLS = "document.querySelectorAll('.chooser .picture rect.collective').length"
TITLES = "[...document.querySelectorAll('.picture title')].map(t => t.textContent)"


def text(selector: str) -> str:
    return f"document.querySelector('{selector}').textContent"


def test_steps_are_chosen_by_number_by_pointer_and_by_time(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_EVENTS", 1000)  # as if it were a long run
    trace = p101.launch(program, world_size=3, backend="sim").trace
    (tmp_path / "page.html").write_text(run_page(trace, "train.py"), encoding="utf-8")
    for scheme in ("light", "dark"):
        browser.view((tmp_path / "page.html").as_uri(), scheme=scheme)
        browser.until("document.querySelector('.chooser').dataset.ready === ''")
        browser.do(
            (CHOSEN, [STEPS - 4, STEPS]),
            # the first step, which is slow in every run, doesn't set the scale
            (text(".strip text"), "23.0 s"),
            (CALLS, 3 * 5 + 1),  # of each rank and step, and one in the legend
            "click document.querySelector('.slowest')",
            (CHOSEN, [SLOW, SLOW]),
            (f"{text('.controls output')}.includes('23.0 s')", True),
            (CALLS, 3 + 1),
            "click document.querySelector('.wider')",
            (CHOSEN, [SLOW - 1, SLOW + 1]),
        )
        browser.choose("document.querySelector('.to')", 130)
        browser.do((CHOSEN, [SLOW - 1, 130]))
        assert any(t.startswith("all_reduce: 32 B, ") and " at " in t for t in browser.js(TITLES))
        browser.click("document.querySelector('.strip svg')")  # in its middle
        begin, end = browser.js(CHOSEN)
        assert abs(begin - STEPS * (480 - 92) / 840) < 3 and begin == end
        browser.keep(f"run-page-steps-{scheme}", whole=True)
        assert too_small(browser, 10) == []
        for fault in (too_pale, without_a_name, out_of_reach):
            assert fault(browser) == [], fault.__name__
