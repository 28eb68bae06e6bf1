"""A browser that does what a reader does: it presses keys, clicks, resizes the window, prefers a
theme, and shows what it sees.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

from parallel101.laboratory.viz import chromium

TEXTS = {"Enter": "\r"}  # what a key writes, if it isn't its name
CODES = {" ": "Space"}


class Browser(chromium.Browser):
    """A browser with a reader."""

    def emulate(self, media: str = "", **features: str) -> None:
        """Set media features, e.g. emulate(prefers_color_scheme="dark").

        `media`: "print" for the layout on paper.
        """
        settings = [{"name": k.replace("_", "-"), "value": value} for k, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=media, features=settings)

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def view(self, page: str, width: int = 1100, height: int = 900, scheme: str = "light") -> None:
        """Open a page in a new window, so to speak."""
        self.open("about:blank")
        self.emulate(prefers_color_scheme=scheme)
        self.resize(width, height)
        self.open(page)

    def key(self, key: str) -> None:
        """Press and release a key."""
        down: dict[str, object] = {"text": TEXTS.get(key, key if len(key) == 1 else "")}
        if key == "Tab":  # Chromium moves the focus only if it gets the key's number
            down["windowsVirtualKeyCode"] = 9
        code = CODES.get(key, key)
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=code, **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=code)

    def write(self, field: str, text: str) -> None:
        """Write into a field, given as a JavaScript expression, in place of what is there."""
        self.js(f"({field}.focus(), {field}.select())")
        self.call("Input.insertText", text=text)

    def choose(self, field: str, value: object) -> None:
        """Choose what a reader does with a menu, a box or a number."""
        what = "checked = true" if value is True else f"value = '{value}'"
        change = "new Event('change', { bubbles: true })"
        self.js(f"(field => {{ field.{what}; field.dispatchEvent({change}); }})({field})")

    def click(self, element: str, still: int = 1) -> None:
        """Click with the mouse in the middle of an element, given as a JavaScript expression, once
        it has not moved for `still` frames.

        If another element covers it, that one gets the click.
        """
        x, y = self.js(f"""new Promise(done => {{
            const place = () => {{
                ({element}).scrollIntoView({{ block: "center" }});
                const box = ({element}).getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }};
            const rest = (was, frames) => requestAnimationFrame(() =>
                place().join() !== was.join() ? rest(place(), 1)
                    : frames < {still} ? rest(was, frames + 1) : done(was));
            rest([], 1); }})""")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def do(self, *steps: str | tuple[str, object]) -> None:
        """Do what a reader does, and check what they see.

        A step is a key to press; "click …" with an element as a JavaScript expression; or an
        expression and its value, which it must have now.
        """
        for step in steps:
            if isinstance(step, tuple):
                expression, value = step
                seen = self.js(expression)
                assert seen == value, (expression, seen)
            elif step.startswith("click "):
                self.click(step.removeprefix("click "))
            else:
                self.key(step)

    def reload(self) -> None:
        """Load the page again, at the address that its script has set.

        The page asks for it: Chromium's own command may not have heard of that address yet.
        """
        self.js("window.before = true; setTimeout(() => location.reload())")
        self.until("!window.before && document.readyState === 'complete'")

    def picture(self, whole: bool = False) -> bytes:
        """Take a screenshot, as PNG.

        `whole`: of the whole page, also what is below the window.
        """
        area: dict[str, object] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            area = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **area)["data"])

    def keep(self, name: str, whole: bool = False) -> None:
        """Keep a screenshot if SCREENSHOTS names a folder; they take longer than the tests."""
        if folder := os.environ.get("SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"{name}.png").write_bytes(self.picture(whole))
