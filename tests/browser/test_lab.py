"""In a real JupyterLab, an animation plays in its cell and follows the theme, an explorer runs again, and both keep their key presses."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from parallel101.viz.chromium import Browser
from tests.browser.lab import TOKEN, jupyterlab

pytestmark = pytest.mark.browser

CELLS = [
    "import torch.distributed as dist, parallel101 as p101",
    """def shift(x):
    r, n = dist.get_rank(), dist.get_world_size()
    got = x.clone()
    work = dist.isend(x, (r + 1) % n)
    dist.recv(got, (r - 1) % n)
    work.wait()
    return x + got
run = p101.watch(shift, 3, backend="sim")
run.animate()""",
    """from parallel101.viz.explore import explore_schedule
explore_schedule("1f1b", stages=2, microbatches=4)""",
]
FIGURE = "document.querySelector('figure')"
EXPLORER = "document.querySelector('.p101-explorer')"
PLAYER = "document.querySelector('figure > div').shadowRoot"


@pytest.fixture
def lab(tmp_path) -> Iterator[str]:
    """Start a JupyterLab with one notebook. Returns its address."""
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": s}
        for i, s in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (tmp_path / "nb").mkdir()
    (tmp_path / "nb" / "ring.ipynb").write_text(
        json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )
    with jupyterlab(tmp_path / "nb", tmp_path) as address:
        yield address


def test_a_run_plays_in_a_cell(lab, chromium):
    with Browser(chromium, 1280, 1000) as browser:
        browser.call("Page.navigate", url=f"{lab}/lab/tree/ring.ipynb?token={TOKEN}")
        browser.until("location.pathname.includes('ring.ipynb') && document.body.innerText.includes('| Idle')", 60)
        browser.js("(jupyterapp.commands.execute('notebook:run-all-cells'), true)")
        browser.until(f"{FIGURE}?.dataset.step", 60)
        browser.js(f"{PLAYER}.querySelector('.stage').focus()")
        active = "[...document.querySelectorAll('.jp-Cell')].findIndex(cell => cell.classList.contains('jp-mod-active'))"
        cells = "document.querySelectorAll('.jp-Cell').length"
        before = browser.js(active), browser.js(cells)
        browser.key("ArrowRight")
        browser.until(f"{FIGURE}.dataset.step == 1")
        for key in ("b", "a", "Home"):  # "b" and "a" would add cells
            browser.key(key, key if len(key) == 1 else "")
        browser.until(f"{FIGURE}.dataset.step == 0")
        assert (browser.js(active), browser.js(cells)) == before
        browser.until(f"{EXPLORER}.dataset.lmSuppressShortcuts && {EXPLORER}.querySelector('[aria-label=stages]')")
        browser.js(f"{EXPLORER}.querySelector('[aria-label=stages]').focus()")
        browser.key("b", "b")
        browser.key("ArrowRight")  # three stages: it runs again
        browser.until(f"{EXPLORER}.querySelector('table').innerText.includes('3, 2, 1')")
        assert browser.js(cells) == before[1]
        dark = f"{PLAYER}.querySelector('.player').classList.contains('dark')"
        assert browser.js(dark) is False
        browser.js("(jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' }), true)")
        browser.until(dark, 30)
        assert browser.errors == []
