"""A lesson in a real JupyterLab: it runs without an error, its animation plays, its explorer runs
again, and both keep their keys.

LESSONS=all tries every lesson. `make test` tries a part of lesson 01, with an animation and an
explorer; tests/lessons/test_run.py runs all lessons without JupyterLab.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator

import nbformat
import pytest

from parallel101.laboratory.publish.page import WIDGET
from tests.browser.browser import Browser
from tests.lessons.lesson import LESSONS, read

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT, TOKEN = LESSONS.parent, "for-this-test-only"
EVERY = sorted(path.stem for path in LESSONS.glob("*.ipynb"))
NAMES = EVERY if os.environ.get("LESSONS") == "all" else ["part"]

LAB = "jupyterapp.shell.currentWidget"
NOTEBOOK = f"{LAB}.content"
STATE = f"[{NOTEBOOK}.activeCellIndex, {NOTEBOOK}.widgets.length]"
FIGURE = "[...document.querySelectorAll('figure')].find(figure => figure.dataset.step)"
PLAYER = f"{FIGURE}.querySelector('div').shadowRoot"
BUTTON = f"{PLAYER}.querySelector('[data-do=play]')"
EXPLORER = "document.querySelector('.p101-explorer')"
DARK = """[...document.querySelectorAll('figure')].map(f =>
    f.querySelector('div').shadowRoot.querySelector('.player').matches('.dark'))"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab with settings and kernels of its own. It shows copies of the
    lessons and part.ipynb, and is stopped at the end, with its kernels.
    """
    scratch = tmp_path_factory.mktemp("lab")
    leave_out = shutil.ignore_patterns(".*", "pictures", "__pycache__")
    shutil.copytree(LESSONS, scratch / "root", ignore=leave_out)
    part = read("01_collectives")
    wanted = ("imports", "flat-broadcast-watch", "explorer-run")
    part.cells = [cell for cell in part.cells if cell.id in wanted]
    nbformat.write(part, scratch / "root" / "part.ipynb")
    environ = {name: text for name, text in os.environ.items() if "JUPYTER" not in name}
    environ |= {"HOME": str(scratch), "PYTHONPATH": str(ROOT)}
    options = ["--no-browser", "--allow-root", "--ServerApp.port=0"]
    options += [f"--IdentityProvider.token={TOKEN}", "--LabApp.expose_app_in_browser=True"]
    command = [sys.executable, "-m", "parallel101", "lab", "--lessons", str(scratch / "root")]
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    server = subprocess.Popen([*command, *options], env=environ, **streams)
    lines = (re.search(r"http://(?:localhost|127\.0\.0\.1):\d+", line) for line in server.stderr)
    address = next((found[0] for found in lines if found), None)
    assert address, "JupyterLab did not start"
    drain = threading.Thread(target=server.stderr.read, daemon=True)
    drain.start()
    yield address
    header = {"Authorization": f"token {TOKEN}"}  # the server ends its kernels first
    request = urllib.request.Request(f"{address}/api/shutdown", data=b"", headers=header)
    urllib.request.urlopen(request, timeout=30).close()
    server.wait(30)
    drain.join()
    server.stderr.close()


@pytest.fixture(scope="module")
def tab(chromium: str) -> Iterator[Browser]:
    """A browser of its own, which keeps the scripts of JupyterLab."""
    with Browser(chromium) as browser:
        yield browser


@pytest.fixture
def opened(tab, lab) -> Iterator[Callable[[str], Browser]]:
    """opened("part.ipynb") opens a notebook in JupyterLab, and waits for its kernel."""

    def opened(path: str) -> Browser:
        tab.resize(1280, 1000)
        tab.call("Page.navigate", url=f"{lab}/lab/tree/{path}?token={TOKEN}&reset")
        kernel = f"{LAB}.sessionContext.session.kernel"
        tab.until(f"{LAB}.context.path == '{path}' && {kernel}.status == 'idle'", 120)
        return tab

    tab.errors.clear()
    yield opened
    execute(tab, "docmanager:save")  # or the next page would ask whether to leave this one
    assert tab.errors == []


def execute(browser: Browser, command: str, times: int = 1, **given: str) -> None:
    """Execute a command of JupyterLab, and wait until it is done."""
    call = f"jupyterapp.commands.execute({json.dumps(command)}, {json.dumps(given)})"
    for _ in range(times):
        browser.js(f"({call}.then(() => {{ globalThis.finished = true; }}), finished = false)")
        browser.until("globalThis.finished", 170)


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_runs_plays_and_runs_again(name, opened):
    notebook = opened(f"{name}.ipynb")
    execute(notebook, "apputils:change-theme", theme="JupyterLab Light")
    execute(notebook, "notebook:run-all-cells")
    asked = "[...document.querySelectorAll('.Toastify__toast')].map(toast => toast.textContent)"
    assert notebook.js(asked) == [], "no question about news"
    bundles = []
    for cell in notebook.js(f"[...{NOTEBOOK}.model.cells].map(cell => cell.toJSON())"):
        if cell["cell_type"] == "code":
            failed = [out["ename"] for out in cell["outputs"] if out["output_type"] == "error"]
            may_fail = "raises-exception" in cell["metadata"].get("tags", [])
            assert cell["execution_count"] and bool(failed) == may_fail, (cell["id"], failed)
            bundles += [output["data"] for output in cell["outputs"] if "data" in output]
    shown = str([bundle for bundle in bundles if WIDGET not in bundle])
    pictures = "document.querySelectorAll('figure:not(.p101-explorer figure)').length"
    assert notebook.js(pictures) == shown.count("<figure"), "each picture is in its cell"
    if "<source" in shown:  # an animation
        plays_and_keeps_its_keys(notebook)
        notebook.keep(f"jupyterlab-{name}-animation")
    if notebook.js(f"!!{EXPLORER}"):
        cells = notebook.js(STATE)[1]
        said = f"{EXPLORER}.querySelector('.p101-status').textContent"
        if "First predict" in notebook.js(said):
            press(notebook, "button")
            notebook.until(f"{said}.includes('Write down a prediction first')")
            assert not notebook.js(f"!!{EXPLORER}.querySelector('figure')")
        runs(notebook, "button")
        if notebook.js(f"!!{EXPLORER}.querySelector('[role=slider]')"):
            runs(notebook, "[role=slider]", "b", "ArrowLeft")  # "b" would add a cell
        assert notebook.js(STATE)[1] == cells
        notebook.keep(f"jupyterlab-{name}-explorer")
    height = notebook.js("document.querySelector('.jp-WindowedPanel-inner').scrollHeight")
    notebook.resize(1280, height + 200)  # so high that nothing scrolls
    notebook.picture()  # draws the cells that were out of sight
    for theme, wanted in (("Light", "!dark"), ("Dark", "dark")):
        execute(notebook, "apputils:change-theme", theme=f"JupyterLab {theme}")
        notebook.until(f"{DARK}.every(dark => {wanted})", 60)
        notebook.keep(f"jupyterlab-{name}-{theme.lower()}")


def plays_and_keeps_its_keys(notebook: Browser) -> None:
    notebook.click(BUTTON)
    notebook.until(f"{FIGURE}.dataset.step == 1")
    before = notebook.js(STATE)
    notebook.key("End")
    last = int(notebook.js(f"{FIGURE}.dataset.step"))
    # to the end of the last step, if the picture rests after it
    notebook.do("ArrowLeft", "ArrowLeft")
    step = int(notebook.js(f"{FIGURE}.dataset.step"))
    assert step < last
    notebook.do("b", "a", "ArrowRight")  # JupyterLab's shortcuts that add a cell
    notebook.until(f"{FIGURE}.dataset.step == {step + 1} && {BUTTON}.ariaLabel == 'Play'")
    assert notebook.js(STATE) == before, "JupyterLab has not taken a key"


def press(notebook: Browser, control: str) -> None:
    place = f"{EXPLORER}.querySelector('{control}')"
    notebook.until(f"({EXPLORER}.scrollIntoView(), {place}.getBoundingClientRect().width)")
    notebook.click(place, still=30)  # the cells above it are measured when they come into sight


def runs(notebook: Browser, control: str, *keys: str) -> None:
    """Click on a control, press keys, and wait for a new picture."""
    notebook.js(f"{EXPLORER}.querySelectorAll('figure').forEach(figure => {{ figure.old = 1; }})")
    press(notebook, control)
    notebook.do(*keys)
    new = f"(figure => figure?.dataset.mounted && !figure.old)({EXPLORER}.querySelector('figure'))"
    notebook.until(new, 60)
