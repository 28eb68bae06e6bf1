"""Draws SVG as PNG (a still) or GIF (an animation), for slides and READMEs.

`Scene.save` calls this. Chromium draws, so the result looks as in the browser. Chromium and Pillow,
which comes with matplotlib, are needed only here: scenes as SVG and HTML need neither.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Iterator

from parallel101.extras import needs_extra
from parallel101.laboratory.viz.chromium import Browser, find_chromium
from parallel101.laboratory.viz.palette import LIGHT

RATE = 12.5  # a GIF's images per second
# A canvas and not a screenshot: headless Chromium does not always answer when asked for one of a
# page on which nothing moves.
DRAW = """
async function draw(svg, width, height) {
  const image = new Image(), canvas = document.createElement("canvas");
  image.src = "data:image/svg+xml," + encodeURIComponent(svg);
  await image.decode();
  canvas.width = width; canvas.height = height;
  canvas.getContext("2d").drawImage(image, 0, 0, width, height);
  return canvas.toDataURL("image/png");
}
"""


def png(svg: str, width: float, height: float) -> bytes:
    """Return an SVG as a PNG of `width` × `height` pixels."""
    (drawn,) = _drawn([svg], width, height)
    return drawn


def gif(svg: Callable[[float], str], duration: float, width: float, height: float) -> bytes:
    """Return the SVG of each moment as a GIF that plays in a loop, `RATE` images per second.

    It pauses for two seconds at its end. Its background is that of the light theme.

    Raises:
        ValueError: the duration is 0 seconds.
    """
    if not duration:
        raise ValueError("the scene does not move: save it as .png")
    with needs_extra("A GIF"):
        from PIL import Image

    times = [k / RATE for k in range(int(duration * RATE))] + [duration]
    images = _drawn(map(svg, times), width, height)
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
            drawn = browser.js(f"draw({json.dumps(image)}, {width}, {height})")
            yield base64.b64decode(drawn.partition(",")[2])
