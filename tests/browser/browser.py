"""A browser that does what a reader does: it presses keys, clicks, resizes the window, prefers a
theme, and shows what it sees.
"""

from __future__ import annotations

import base64

from parallel101.laboratory.viz import chromium


class Browser(chromium.Browser):
    """A browser with a reader."""

    def emulate(self, media: str = "", **features: str) -> None:
        """Set media features, e.g. emulate(prefers_color_scheme="dark").

        `media`: "print" for the layout on paper.
        """
        settings = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", media=media, features=settings)

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def key(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            extra: dict[str, object] = {"text": text} if text and kind == "keyDown" else {}
            if key == "Tab":  # Chromium moves the focus only if it gets the key's number
                extra["windowsVirtualKeyCode"] = 9
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                **extra,
            )

    def click(self, element: str) -> None:
        """Click with the mouse in the middle of an element, given as a JavaScript expression.

        If another element covers it, that one gets the click.
        """
        x, y = self.js(f"""new Promise(done => {{
            const place = () => {{
                const box = ({element}).getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }};
            const rest = was => requestAnimationFrame(() =>
                place().join() === was.join() ? done(was) : rest(place()));
            ({element}).scrollIntoView({{ block: "center" }});
            rest([]); }})""")
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
                self.key(step, text=step if len(step) == 1 else {"Enter": "\r"}.get(step, ""))

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
            area = {
                "captureBeyondViewport": True,
                "clip": {**self.call("Page.getLayoutMetrics")["cssContentSize"], "scale": 1},
            }
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **area)["data"])
