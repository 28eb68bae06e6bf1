"""The frame of all pages: one HTML file that needs no other file and no network.

It needs no packages of notebooks, so that `parallel101 run --page` works with the core alone.
"""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from string import Template
from typing import NamedTuple

# With this policy the browser loads nothing from outside the page. `external_addresses` in page.py
# tells the lesson's author earlier.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; font-src data:; media-src data:"
)
HIGHLIGHTED = re.compile(r'class="[^"]*\bhighlight\b')  # code as Pygments writes it


class Page(NamedTuple):
    """A page of the site, as the index and the search list it."""

    address: str  # below site/
    title: str
    text: str  # what it is, or what the reader does there, in a sentence
    also: str = ""  # other words by which the search finds it
    invitation: str = ""  # what its button at the top of the index says
    body: str = ""  # HTML, of a page that is written in Markdown


def file_text(path: str) -> str:
    """Return the text of a style sheet, a script or another file in this folder."""
    return files(__package__).joinpath(path).read_text(encoding="utf-8")


def offline_html(title: str, body: str, scripts_beside: bool = False) -> str:
    """Return a whole page that needs no other file and no network.

    It is light or dark, as the reader's system is. `scripts_beside`: the page may load scripts that
    are beside it, on a disk or a server.
    """
    policy = POLICY
    if scripts_beside:  # on a disk, not every browser counts a file as "self"
        policy = POLICY.replace("script-src", "script-src 'self' file:")
    light, dark = _code_colours() if HIGHLIGHTED.search(body) else ("", "")
    frame, css = Template(file_text("page.html")), file_text("page.css")
    values = {"policy": policy, "light": light, "dark": dark, "css": css}
    return frame.substitute(values, title=escape(title), body=body)


def _code_colours() -> tuple[str, str]:
    """Return the colours of highlighted code, light and dark.

    Pygments is there, because it wrote the code.
    """
    from pygments.formatters import HtmlFormatter

    light, dark = (HtmlFormatter(style=name) for name in ("xcode", "github-dark"))
    return light.get_style_defs(".highlight"), dark.get_style_defs(".highlight")
