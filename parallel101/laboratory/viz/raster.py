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


def png(image: str, width: float, height: float) -> bytes:
    """Return the image at this URL as a PNG of `width` × `height` pixels."""
    (drawn,) = _drawn([image], width, height)
    return drawn


def gif(images: Iterable[str], width: float, height: float) -> bytes:
    """Return the images at these URLs, `RATE` of them per second, as a GIF that plays in a loop.

    It pauses for two seconds at its end. Its background is that of the light theme.
    """
    with needs_extra("A GIF"):
        from PIL import Image

    drawn = [Image.open(io.BytesIO(png)).convert("RGBA") for png in _drawn(images, width, height)]
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
    """Yield a PNG of each image. Raises RuntimeError if there is no Chromium."""
    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError(
            "PNG and GIF are drawn by Chromium, and none was found: install chromium or Google "
            "Chrome, or save as .svg"
        )
    with Browser(chromium) as browser:
        browser.js(DRAW)
        for image in images:
            drawn = browser.js(f"draw({json.dumps(image)}, {width}, {height})")
            yield base64.b64decode(drawn.partition(",")[2])
