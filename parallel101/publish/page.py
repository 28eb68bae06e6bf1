"""Converts a notebook that has run into one HTML file that needs no network, no kernel and no other file.

nbconvert's own pages load MathJax, RequireJS and a widget manager from the network. Here formulas become MathML, which browsers draw
themselves. An explorer, which needs a kernel, says how to get one. A page that would still load something is refused.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from bs4 import BeautifulSoup
from jinja2 import pass_context
from latex2mathml.converter import convert as to_mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

WIDGET = "application/vnd.jupyter.widget-view+json"
NEEDS_KERNEL = "This explorer runs the program again after each change, so it needs a kernel. Open the lesson with <code>make lab</code>."

# With this policy the browser loads nothing from outside the page. `external_addresses` tells the lesson's author earlier.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; media-src data:"


class Lesson(NamedTuple):
    """A lesson as the index and the links between lessons show it."""

    name: str
    title: str
    summary: str  # its first paragraph, as plain text

    @classmethod
    def of(cls, name: str, notebook: NotebookNode) -> Lesson:
        """Take the first heading as the title and the first paragraph as the summary."""
        prose = BeautifulSoup("\n".join(_markdown(c.source) for c in notebook.cells if c.cell_type == "markdown"), "html.parser")
        heading, paragraph = prose.find(["h1", "h2"]), prose.find("p")
        return cls(name, heading.get_text() if heading else name, paragraph.get_text() if paragraph else "")


class _OfflineRenderer(IPythonRenderer):
    """Markdown as JupyterLab shows it, with formulas as MathML."""

    def block_html(self, html: str) -> str:
        """Keep HTML without images as it is: nbconvert parses each block alone, and closes a <details> that spans several blocks."""
        return super().block_html(html) if "<img" in html else html + "\n"

    def inline_math(self, body: str) -> str:
        return _formula(body, "inline")

    def block_math(self, body: str) -> str:
        return _formula(body, "block")

    def latex_environment(self, name: str, body: str) -> str:
        return _formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")


class _OfflineExporter(HTMLExporter):
    """nbconvert's HTML for cells and outputs, with our Markdown."""

    @pass_context
    def markdown2html(self, context, source):
        path = context["resources"]["metadata"].get("path", "")
        return _markdown(source, context.get("cell", {}).get("attachments"), path)


def _markdown(source: str, attachments: dict | None = None, path: str = "") -> str:
    renderer = _OfflineRenderer(escape=False, embed_images=True, exclude_anchor_links=True, attachments=attachments or {}, path=path)
    return MarkdownWithMath(renderer=renderer).render(source)


def _formula(tex: str, display: str) -> str:
    mathml = to_mathml(tex, display=display)
    if unknown := re.search(r"\\[A-Za-z]+", mathml):
        raise ValueError(
            f"the formula {tex.strip()!r} uses {unknown[0]}, which cannot be converted to MathML; write it with simpler commands"
        )
    return mathml


def lesson_body(notebook: NotebookNode, folder: Path) -> str:
    """Return the cells and outputs of a notebook that has run, as HTML that loads nothing.

    Args:
        folder: the notebook's folder. Images from this folder are embedded in the page.

    Raises:
        ValueError: the page would load something, such as an image from the web, or a formula cannot be converted.
    """
    exporter = _OfflineExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(_without_kernel(notebook), {"metadata": {"path": str(folder)}})
    if addresses := sorted(set(external_addresses(body))):
        raise ValueError(f"the page would load {', '.join(addresses)}, but pages must work offline; put the file in the notebook's folder")
    return body


def lesson_page(lesson: Lesson, body: str, seconds: float, lessons: Sequence[Lesson]) -> str:
    """Return the whole page of a lesson: its body, how long it ran, and links to the lessons before and after it."""
    at = lessons.index(lesson)
    before = [f'<a rel="prev" href="{_page(e)}">← {escape(e.title)}</a>' for e in lessons[:at][-1:]]
    after = [f'<a rel="next" href="{_page(e)}">{escape(e.title)} →</a>' for e in lessons[at + 1 : at + 2]]
    links = '<nav><a href="index.html">All lessons</a>' + "".join(before + after) + "</nav>"
    ran = f"<footer>All outputs on this page come from one run of {seconds:.1f} s, with {_machine()}.</footer>"
    return offline_html(lesson.title, f"{links}\n<main>\n{body}\n</main>\n{ran}\n{links}")


def index_page(lessons: Sequence[Lesson]) -> str:
    """Return the page that lists the lessons in order."""
    rows = [
        f'<li><a href="{_page(e)}"><strong>{escape(e.title)}</strong></a><p>{escape(e.summary)}</p><small>{escape(e.name)}</small></li>'
        for e in lessons
    ]
    intro = (
        "<p>How neural networks are trained on many GPUs and machines. All pictures are drawn from programs that ran in the lessons.</p>"
    )
    listing = f'<ol class="lessons">{"".join(rows)}</ol>' if lessons else "<p>No lesson has finished.</p>"
    return offline_html("parallel101", f"<main><h1>parallel101</h1>{intro}{listing}</main>")


def external_addresses(html: str) -> Iterator[str]:
    """Yield every address that a browser would load when it opens `html`. Links that a reader can click are not loaded."""
    soup = BeautifulSoup(html, "html.parser")
    for tag in soup.find_all(True):
        names = ["src", "srcset", "poster", "data"] + ([] if tag.name in ("a", "area") else ["href", "xlink:href"])
        addresses = [str(tag[name]) for name in names if tag.get(name)]
        css = str(tag.get("style", "")) + (tag.get_text() if tag.name == "style" else "")
        addresses += [a for pair in re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css) for a in pair if a]
        yield from (a for a in addresses if not a.startswith(("data:", "#")))


def _without_kernel(notebook: NotebookNode) -> NotebookNode:
    """Return a copy for pages: each widget is replaced by its last picture, if it has one, and a note that it needs a kernel."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop("application/javascript", None)
            if data.pop(WIDGET, None):  # an explorer has its last picture as HTML beside it; a slider has none
                data["text/html"] = data.get("text/html", "") + f'<p class="needs-kernel">{NEEDS_KERNEL}</p>'
    return notebook


def offline_html(title: str, body: str) -> str:
    """Return a whole page that needs no other file and no network. It is light or dark, as the reader's system is."""
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("friendly", "github-dark"))
    css = files("parallel101.publish").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{light}
@media screen and (prefers-color-scheme: dark) {{
{dark}
}}
{css}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _page(lesson: Lesson) -> str:
    return escape(f"{lesson.name}.html")


def _machine() -> str:
    return f"Python {platform.python_version()} and torch {version('torch')} on {platform.system()} with {os.cpu_count()} cores"
