"""Screenshots of what the browser tests see.

They are kept in the folder named by SCREENSHOTS, or in build/screenshots.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel101.viz.chromium import Browser

FOLDER = Path(os.environ.get("SCREENSHOTS") or Path(__file__).parents[2] / "build" / "screenshots")


@pytest.fixture(scope="session")
def keep() -> Callable[..., None]:
    """keep(browser, "page-dark") writes page-dark.png; with whole=True also what lies below the
    window.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)

    def keep(browser: Browser, name: str, whole: bool = False) -> None:
        (FOLDER / f"{name}.png").write_bytes(browser.picture(whole))

    return keep
