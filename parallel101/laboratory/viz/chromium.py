"""Controls Chromium over DevTools with websocket-client: opens a page, and runs JavaScript.

    with Browser(path) as browser: browser.open(url); browser.js("1 + 1")
    png(svg, 960, 500)

Scenes are saved as PNG (a still) and GIF (an animation) with it, so the result looks as in the
browser, and benchmarks measure pages. Chromium and Pillow, which comes with matplotlib, are needed
only here: scenes as SVG and HTML need neither.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, cast

from parallel101.extras import needs_extra
from parallel101.laboratory.viz.palette import LIGHT


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome on this machine, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--remote-debugging-port=0",
         "--remote-allow-origins=*"]  # fmt: skip

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


class Browser:
    """One tab of a headless Chromium with a temporary profile."""

    def __init__(self, path: str, width: int = 1000, height: int = 800):
        with needs_extra("A PNG, a GIF or a browser test"):
            import websocket  # comes with JupyterLab

        self.profile = tempfile.mkdtemp(prefix="p101-browser-")
        window = f"--user-data-dir={self.profile}", f"--window-size={width},{height}"
        streams: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        command = [path, *FLAGS, *window, "about:blank"]
        self.process = subprocess.Popen(command, start_new_session=True, **streams)
        log = self.log = cast(IO[str], self.process.stderr)
        self.errors: list[str] = []  # exceptions that scripts of the page have thrown
        self.number = 0
        ready = (re.search(r"listening on ws://([\d.]+:\d+)/", line) for line in log)
        address = next(match[1] for match in ready if match)
        # reads the log, so that it never fills the pipe
        self.drain = threading.Thread(target=log.read, daemon=True)
        self.drain.start()
        with urllib.request.urlopen(f"http://{address}/json", timeout=30) as answer:
            tab = next(target for target in json.load(answer) if target["type"] == "page")
        self.socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=180)
        for domain in ("Page", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)  # all that it keeps is in its profile
        self.process.wait()
        self.drain.join(10)  # until its last child has ended
        self.log.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **parameters: object) -> dict:
        """Send a DevTools command and return its result."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def js(self, expression: str):
        """Return the value of a JavaScript expression in the page.

        If it is a promise, wait for it.
        """
        how = {"awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", expression=expression, **how)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 20) -> None:
        """Wait until a JavaScript condition holds in the page.

        A condition that throws does not hold yet. This also works while the page's scripts, and so
        timers, are switched off. Raises RuntimeError if it does not hold within so many seconds.
        """
        end = time.monotonic() + seconds
        holds = f"(() => {{ try {{ return !!({condition}) }} catch {{ return false }} }})()"
        while not self.js(holds):
            if time.monotonic() > end:
                raise RuntimeError(f"{condition} does not hold within {seconds} s")
            time.sleep(0.01)

    def open(self, url: str) -> None:
        """Go to a page and wait until it has loaded."""
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'", 60)


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
    file, how = io.BytesIO(), {"duration": durations, "loop": 0, "optimize": True}
    first.save(file, "GIF", save_all=True, append_images=rest, **how)
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
