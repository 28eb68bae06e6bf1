"""Homework 1 in a real JupyterLab: write a wrong solution, check it, read the verdict, look at
the picture, fix it, check again.
"""

from __future__ import annotations

import json

import pytest

from tests.browser.browser import Browser
from tests.browser.lab import ROOT, TOKEN

pytestmark = pytest.mark.browser

SENDS_FIRST = """import torch
import torch.distributed as dist


def ring_shift(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty(x.shape, dtype=x.dtype)
    dist.send(x.contiguous(), (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    return received
"""
OUTPUT = "document.querySelector('.p101g:has(.p101g-head)')"
FIGURE = "document.querySelector('figure.p101')"
DRAWN = "document.querySelector('figure.p101 > div').shadowRoot"


def save(browser: Browser, name: str, content: str) -> None:
    """Save a file as JupyterLab's editor does."""
    model = json.dumps({"type": "file", "format": "text", "content": content})
    browser.js(
        f"jupyterapp.serviceManager.contents.save({json.dumps(name)}, {model}).then(() => true)"
    )


def execute(browser: Browser, command: str, times: int = 1) -> None:
    for _ in range(times):
        browser.js(f"jupyterapp.commands.execute({json.dumps(command)}).then(() => true)")


def test_a_wrong_solution_is_explained_and_drawn_and_the_fixed_one_passes(lab, chromium):
    notebook = json.loads((ROOT / "homework" / "hw1_moving" / "hw1.ipynb").read_text("utf-8"))
    place = next(i for i, cell in enumerate(notebook["cells"]) if cell["id"] == "shift-check")
    with Browser(chromium, 1280, 1000) as browser:
        browser.call("Page.navigate", url=f"{lab}/lab/tree/hw1/hw1.ipynb?token={TOKEN}&reset")
        browser.until(
            "location.pathname.includes('hw1.ipynb') && document.body.innerText.includes('| Idle')",
            60,
        )
        save(browser, "hw1/hw1.py", SENDS_FIRST)
        execute(browser, "notebook:run-cell-and-select-next", place + 1)
        browser.until(f"{OUTPUT}.innerText.includes('Everyone sends first.')", 60)
        browser.until(f"{DRAWN}.querySelector('svg').textContent.includes('waits in send to rank')")
        assert "line 8: dist.send(" in browser.js(f"{DRAWN}.querySelector('svg').textContent")
        assert "0 of 10 points" in browser.js(f"{OUTPUT}.innerText")

        fixed = (ROOT / "tests" / "homework" / "hw1" / "reference.py").read_text(encoding="utf-8")
        save(browser, "hw1/hw1.py", fixed)
        execute(browser, "notebook:move-cursor-up")
        execute(browser, "notebook:run-cell")
        browser.until(f"{OUTPUT}.innerText.includes('10 of 10 points')", 60)
        assert "The kernel still holds the version" in browser.js(f"{OUTPUT}.innerText")
        browser.until(f"{FIGURE}.dataset.step")
        browser.js(f"{DRAWN}.querySelector('.stage').focus()")
        browser.key("ArrowRight")
        browser.until(f"{FIGURE}.dataset.step == 1")
        assert browser.errors == []
