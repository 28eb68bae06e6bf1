"""A JupyterLab, and screenshots of what the browser tests see.

The screenshots are kept in the folder named by SCREENSHOTS, or in build/screenshots.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from tests.browser.browser import Browser
from tests.browser.lab import ROOT, jupyterlab
from tests.lessons.lesson import read

FOLDER = Path(os.environ.get("SCREENSHOTS") or Path(__file__).parents[2] / "build" / "screenshots")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with Browser(chromium) as browser:
        yield browser


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab with copies of the lessons, part.ipynb and homework 1."""
    scratch = tmp_path_factory.mktemp("lab")
    leave_out = shutil.ignore_patterns(".*", "pictures", "__pycache__")
    shutil.copytree(ROOT / "lessons", scratch / "root", ignore=leave_out)
    shutil.copytree(ROOT / "homework" / "hw1_moving", scratch / "root" / "hw1", ignore=leave_out)
    part = read("01_collectives")
    wanted = ("imports", "flat-broadcast-watch", "explorer-run")
    part.cells = [cell for cell in part.cells if cell.id in wanted]
    nbformat.write(part, scratch / "root" / "part.ipynb")
    with jupyterlab(scratch / "root", scratch) as address:
        yield address


@pytest.fixture(scope="session")
def keep() -> Callable[..., None]:
    """keep(browser, "page-dark") writes page-dark.png; with whole=True also what lies below the
    window.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)

    def keep(browser: Browser, name: str, whole: bool = False) -> None:
        (FOLDER / f"{name}.png").write_bytes(browser.picture(whole))

    return keep
