"""The README's picture as READMEs show it: an SVG in an <img>, without scripts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from parallel101.laboratory.viz.chromium import FLAGS
from parallel101.laboratory.viz.palette import THEMES
from tests.browser.browser import Browser

pytestmark = pytest.mark.browser
PICTURE = Path(__file__).parents[2] / "docs" / "ring.svg"


@pytest.fixture
def readme(tmp_path) -> str:
    """The address of a page that shows the picture and nothing else."""
    page = tmp_path / "readme.html"
    page.write_text(f"<body style='margin:0'><img src='{PICTURE.as_uri()}'>", encoding="utf-8")
    return page.as_uri()


def pixel(screenshot: bytes, x: int, y: int) -> str:
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    return "#{:02x}{:02x}{:02x}".format(*image.getpixel((x, y)))


def test_it_moves(browser, readme):
    browser.open(readme)
    first = browser.picture()
    assert any(browser.picture() != first for _ in range(100))


def test_with_reduced_motion_its_last_moment_stays(chromium, readme, monkeypatch):
    # DevTools' own setting doesn't reach an SVG inside an <img>; the reader's does
    flags = [*FLAGS, "--force-prefers-reduced-motion"]
    monkeypatch.setattr("parallel101.laboratory.viz.chromium.FLAGS", flags)
    with Browser(chromium, 960, 500) as browser:
        browser.open(readme)
        first = browser.picture()
        browser.js("""new Promise(done => {
            const frames = n => n ? requestAnimationFrame(() => frames(n - 1)) : done();
            frames(30); })""")
        assert browser.picture() == first
    last_row = {pixel(first, 530 + 103 * chunk, 338) for chunk in range(4)}
    assert last_row == {"#3b5bdb", "#ccbb44", "#117733", "#ee6677"}, "rank 3 has every chunk"


@pytest.mark.parametrize("theme", THEMES)
def test_its_card_has_the_readers_colours(browser, readme, theme):
    browser.emulate(prefers_color_scheme=theme)
    browser.open(readme)
    assert pixel(browser.picture(), 20, 80) == THEMES[theme]["bg"]
