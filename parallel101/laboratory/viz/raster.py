"""Draws SVG as PNG (a still) or GIF (an animation), for slides and READMEs.

`Scene.save` calls this. Chromium draws, so the result looks as in the browser. Chromium and Pillow,
which comes with matplotlib, are needed only here: scenes as SVG and HTML need neither.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator

from parallel101.extras import needs_extra
from parallel101.laboratory.viz.chromium import Browser, find_chromium
from parallel101.laboratory.viz.palette import LIGHT
from parallel101.laboratory.viz.scene import Scene, data_uri

RATE = 12.5  # a GIF's images per second
# A canvas and not a screenshot: headless Chromium does not always answer when asked for one of a
# page on which nothing moves.
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


def png(scene: Scene) -> bytes:
    """Return the last moment of a scene as a PNG, twice as large, in light colours."""
    (drawn,) = _drawn([scene.svg(theme="light")], 2 * scene.width, 2 * scene.height)
    return drawn


def gif(scene: Scene) -> bytes:
    """Return a scene as a GIF that plays in a loop, `RATE` images per second, in light colours.

    It pauses for two seconds at its end.

    Raises:
        ValueError: the scene does not move.
    """
    if not scene.duration:
        raise ValueError(f"{scene!r} does not move: save it as .png")
    with needs_extra("A GIF"):
        from PIL import Image

    times = [k / RATE for k in range(int(scene.duration * RATE))] + [scene.duration]
    images = _drawn((scene.svg(t, theme="light") for t in times), scene.width, scene.height)
    drawn = [Image.open(io.BytesIO(image)).convert("RGBA") for image in images]
    # the round corners are transparent, and a GIF would show them black
    card = Image.new("RGBA", drawn[0].size, LIGHT["bg"])
    frames = [Image.alpha_composite(card, image).convert("RGB") for image in drawn]
    # one palette for all, or flat areas would flicker
    colours = frames[-1].quantize(128, dither=Image.Dither.NONE)
    first, *rest = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    durations = [int(1000 / RATE)] * len(rest) + [2000]  # milliseconds
    file = io.BytesIO()
    first.save(
        file, "GIF", save_all=True, append_images=rest, duration=durations, loop=0, optimize=True
    )
    return file.getvalue()


def _drawn(images: Iterable[str], width: float, height: float) -> Iterator[bytes]:
    """Yield a PNG of each SVG. Raises RuntimeError if there is no Chromium."""
    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError(
            "PNG and GIF are drawn by Chromium, and none was found: install chromium or Google "
            "Chrome, or save as .svg"
        )
    with Browser(chromium) as browser:
        browser.js(DRAW)
        for image in images:
            source = json.dumps(data_uri(image))
            drawn = browser.js(f"draw({source}, {width}, {height})")
            yield base64.b64decode(drawn.partition(",")[2])
