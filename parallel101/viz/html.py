"""A scene as HTML: the self-playing SVG in an <img>, and a script that puts play, step and scrub in its place.

Where scripts are stripped the <img> goes on looping, or stands still for readers who asked for less motion. Nothing is
fetched: the SVG is a data URI, the script stands in the fragment. `player.js` and `player.css` are the player itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from parallel101.viz.palette import variables

if TYPE_CHECKING:
    from parallel101.viz.scene import Scene

_HERE = Path(__file__).parent
_SCRIPT = (_HERE / "player.js").read_text(encoding="utf-8")
_CSS = (_HERE / "player.css").read_text(encoding="utf-8").replace("/*LIGHT*/", variables("light")).replace("/*DARK*/", variables("dark"))


def figure(scene: Scene) -> str:
    """The scene as a fragment for a notebook cell or any page. The same scene gives the same text, byte for byte."""
    moving = scene.svg(smil=True)
    name = "p101-" + hashlib.sha256(moving.encode()).hexdigest()[:12]
    setup = {
        "duration": scene.duration,
        "steps": [[round(step.start, 3), round(step.end, 3), step.label] for step in scene.steps],
        "intro": scene.intro,
        "title": scene.title,
        "narrow": scene.narrow,
        "css": _CSS,
    }
    still = f'<source media="(prefers-reduced-motion: reduce)" srcset="{_uri(scene.svg())}">' if scene.steps else ""
    alt = escape(f"{scene.title}. {scene.description}".strip())
    return (
        f'<figure id="{name}" class="p101" data-lm-suppress-shortcuts="true" style="margin:0;max-width:{scene.width}px">'
        f'<picture>{still}<img src="{_uri(moving)}" alt="{alt}" style="width:100%;height:auto"></picture></figure>'
        f"<script>(() => {{\n{_SCRIPT}\n"
        f"document.querySelectorAll('#{name}').forEach(figure => mount(figure, {_json(setup)}));\n}})()</script>"
    )


def page(scene: Scene) -> str:
    """The scene as a page of its own, in the reader's theme."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(scene.title)}</title><style>body{{margin:24px auto;max-width:{scene.width}px;padding:0 12px}}"
        f"@media (prefers-color-scheme:dark){{body{{background:#0e1116}}}}</style></head><body>{figure(scene)}</body></html>\n"
    )


def _uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _json(value: object) -> str:
    """JSON that can stand in a <script>: no "</script>" and no "<!--" in it."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
