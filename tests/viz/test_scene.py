"""Scenes: every still and every loop is well-formed SVG, and a still shows what its keyframes
say.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from parallel101.laboratory.viz.palette import THEMES
from parallel101.laboratory.viz.scene import Scene, Stop, value_at

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def scene():
    scene = Scene(200, 100, 'A <ball> & "more"', "It rolls.")
    scene.duration = 4.0
    scene.add("circle", r=5, class_="ball", fill_opacity=0.5).key(
        "translate", (1.0, (0, 10)), (3.0, (100, 10))
    )
    scene.add("text", "only <then>", x=1).show((1.0, 2.0))
    scene.stops += [Stop(0.5, 2.0, "there"), Stop(2.0, 4.0, "</script><!-- and back")]
    scene.intro = "before"
    return scene


def test_keyframes_between_before_and_after():
    linear = ("linear", [(1.0, 10.0), (3.0, 20.0)])
    assert [value_at(linear, t) for t in (0, 1, 2, 3, 9)] == [10, 10, 15, 20, 20]
    discrete = ("discrete", [(0.0, "a"), (2.0, "b")])
    assert [value_at(discrete, t) for t in (0, 1.99, 2, 3)] == ["a", "a", "b", "b"]
    ease = ("ease", [(0.0, (0.0, 0.0)), (1.0, (1.0, 2.0))])
    assert value_at(ease, 0.5) == (0.5, 1.0)
    assert value_at(ease, 0.1)[0] < 0.1 < 0.9 < value_at(ease, 0.9)[0]


@pytest.mark.parametrize(
    ("t", "x", "shown"),
    [(0, "0", False), (1.5, "25", True), (2, "50", False), (None, "100", False)],
)
def test_a_still_is_one_moment(scene, t, x, shown):
    root = ET.fromstring(scene.svg(t))
    assert root.find(f"{SVG}circle").get("transform") == f"translate({x},10)"
    assert ("only <then>" in [e.text for e in root.iter(f"{SVG}text")]) is shown
    assert not list(root.iter(f"{SVG}animate"))


def test_a_loop_holds_every_frame(scene):
    root = ET.fromstring(scene.svg(smil=True))
    motion = next(root.iter(f"{SVG}animateTransform"))
    assert (motion.get("keyTimes"), motion.get("values")) == (
        "0;0.25;0.75;1",
        "0 10;0 10;100 10;100 10",
    )
    blink = next(root.iter(f"{SVG}animate"))
    assert (blink.get("keyTimes"), blink.get("values")) == ("0;0.25;0.5", "hidden;visible;hidden")
    assert {e.get("dur") for e in (motion, blink)} == {"4s"}


def test_html_needs_nothing_else_and_is_the_same_each_time(scene):
    html = scene.html()
    assert html == scene.html() == scene._repr_html_()
    assert not re.search(r"(?:src|href|srcset)=\"(?!data:)", html)
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert html.count("</script>") == 1 and "<!--" not in html
    assert 'data-lm-suppress-shortcuts="true"' in html


def test_save_by_suffix(scene, tmp_path):
    page = scene.save(tmp_path / "ball.html").read_text()
    assert page.startswith("<!doctype html>") and scene.html() in page
    svg = scene.save(str(tmp_path / "ball.svg")).read_text()
    loop, still = ET.fromstring(svg).findall(f"{SVG}g")
    assert (loop.get("class"), still.get("class")) == ("loop", "still")
    moves = [next(group.iter(f"{SVG}animate"), None) is not None for group in (loop, still)]
    assert moves == [True, False]


def test_a_still_and_an_animation_for_slides(scene, tmp_path, chromium):
    saved = (scene.save(tmp_path / name).read_bytes() for name in ("ball.png", "ball.gif"))
    still, moving = (Image.open(io.BytesIO(image)) for image in saved)
    assert still.size == (2 * scene.width, 2 * scene.height)
    assert moving.size == (scene.width, scene.height) and moving.n_frames > 2, "it moves"
    bottom = still.convert("L").crop((0, still.height - 20, still.width, still.height))
    assert bottom.getextrema()[0] < 255, "the card reaches down to the last pixel"


def test_what_a_scene_cannot_do_is_said(scene, tmp_path, monkeypatch):
    monkeypatch.setattr("parallel101.laboratory.viz.chromium.find_chromium", lambda: None)
    for error, said, wrong in (
        (RuntimeError, r"chromium .* or save as \.svg", lambda: scene.save(tmp_path / "a.png")),
        (ValueError, r"\.html", lambda: scene.save(tmp_path / "ball.mp4")),
        (ValueError, "sepia", lambda: scene.svg(theme="sepia")),
        (ValueError, "bounce", lambda: scene.key("r", (0.0, 1), mode="bounce")),
        (ValueError, "no frames", lambda: scene.key("r")),
    ):
        with pytest.raises(error, match=said):
            wrong()


@pytest.mark.parametrize("theme", THEMES)
def test_themes_and_hatching_that_can_be_seen_in_both(theme, scene):
    def luminance(name):
        parts = [int(THEMES[theme][name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear))

    svg = scene.svg(theme=theme)
    assert THEMES[theme]["hatch"] in svg and THEMES[theme]["bg"] in svg and "var(" not in svg
    assert "prefers-color-scheme:dark" in scene.svg() and "prefers-color" not in svg
    low, high = sorted((luminance("hatch"), luminance("bg")))
    assert (high + 0.05) / (low + 0.05) > {"light": 2, "dark": 3.5}[theme]
