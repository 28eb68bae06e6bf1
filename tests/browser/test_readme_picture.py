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


def pixel(screenshot: bytes, x: int, y: int) -> str:
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    return "#{:02x}{:02x}{:02x}".format(*image.getpixel((x, y)))


def test_it_moves_in_the_readers_colours_and_stands_still_for_who_wants_that(
    browser, chromium, tmp_path, monkeypatch
):
    page = tmp_path / "readme.html"  # the picture and nothing else
    page.write_text(f"<body style='margin:0'><img src='{PICTURE.as_uri()}'>", encoding="utf-8")
    for theme, colours in THEMES.items():
        browser.view(page.as_uri(), 1000, 800, theme)
        first = browser.picture()
        assert pixel(first, 20, 80) == colours["bg"]
    assert any(browser.picture() != first for _ in range(100))
    # DevTools' own setting doesn't reach an SVG inside an <img>; the reader's does
    flags = [*FLAGS, "--force-prefers-reduced-motion"]
    monkeypatch.setattr("parallel101.laboratory.viz.chromium.FLAGS", flags)
    with Browser(chromium, 960, 500) as other:
        other.open(page.as_uri())
        last = other.picture()
        other.js("""new Promise(done => {
            const frames = n => n ? requestAnimationFrame(() => frames(n - 1)) : done();
            frames(30); })""")
        assert other.picture() == last
    last_row = {pixel(last, 530 + 103 * chunk, 338) for chunk in range(4)}
    assert last_row == {"#3b5bdb", "#ccbb44", "#117733", "#ee6677"}, "rank 3 has every chunk"
