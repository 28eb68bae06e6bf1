"""A scene as PNG (a still) or GIF (the animation), for slides and READMEs.

Chromium draws it, so it looks as in the browser.

This file needs Chromium and Pillow, which comes with matplotlib. Scenes as SVG and HTML need
neither (scene.py).
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence

from parallel101.viz.chromium import Browser, find_chromium
from parallel101.viz.palette import THEMES
from parallel101.viz.scene import Scene, data_uri

# A canvas and not a screenshot: headless Chromium does not always answer when asked for one of a
# page that stands still.
DRAW = """
async function draw(source, width, height) {
  const image = new Image(), canvas = document.createElement("canvas");
  image.src = source;
  await image.decode();
  canvas.width = width; canvas.height = height;
  canvas.getContext("2d").drawImage(image, 0, 0, width, height);
  return canvas.toDataURL("image/png");
}
"""


def png(scene: Scene, t: float | None = None, *, theme: str = "light", scale: float = 2.0) -> bytes:
    """The scene at second t (default: the last) as PNG, `scale` pixels for each of its units."""
    (image,) = _drawn(scene, [scene.duration if t is None else t], theme, scale)
    return image


def gif(scene: Scene, *, theme: str = "light", scale: float = 1.0, rate: float = 12.5) -> bytes:
    """The animation as a GIF that plays in a loop, with `rate` images per second and a pause of two
    seconds at its end.

    Raises ValueError for a scene that does not move.
    """
    from PIL import Image

    if not scene.duration:
        raise ValueError(f"{scene!r} does not move: save it as .png")
    times = [k / rate for k in range(int(scene.duration * rate))] + [scene.duration]
    drawn = [
        Image.open(io.BytesIO(image)).convert("RGBA")
        for image in _drawn(scene, times, theme, scale)
    ]
    # the round corners are transparent, and a GIF would show them black
    card = Image.new("RGBA", drawn[0].size, THEMES[theme]["bg"])
    images = [Image.alpha_composite(card, image).convert("RGB") for image in drawn]
    # one palette for all, or flat areas would flicker
    colours = images[-1].quantize(128, dither=Image.Dither.NONE)
    first, *rest = [image.quantize(palette=colours, dither=Image.Dither.NONE) for image in images]
    durations = [int(1000 / rate)] * len(rest) + [2000]  # milliseconds
    file = io.BytesIO()
    first.save(
        file, "GIF", save_all=True, append_images=rest, duration=durations, loop=0, optimize=True
    )
    return file.getvalue()


def _drawn(scene: Scene, times: Sequence[float], theme: str, scale: float) -> Iterator[bytes]:
    """A PNG for each of the times. Raises RuntimeError if there is no Chromium."""
    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError(
            "PNG and GIF are drawn by Chromium, and none was found: install chromium or Google "
            "Chrome, or save as .svg"
        )
    with Browser(chromium) as browser:
        browser.js(DRAW)
        for t in times:
            source = data_uri(scene.svg(t, theme=theme))
            drawn = browser.js(
                f"draw({json.dumps(source)}, {scene.width * scale}, {scene.height * scale})"
            )
            yield base64.b64decode(drawn.partition(",")[2])
