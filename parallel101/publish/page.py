"""Writes a notebook that has run as one HTML file that needs nothing else: no network, no kernel, no other file.

nbconvert's own pages fetch MathJax, RequireJS and a widget manager from the network. Here formulas become MathML, which
browsers draw by themselves; an explorer that needs a kernel says so; and a page that would still fetch anything is refused.
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
NEEDS_KERNEL = "This explorer runs the program anew at each change, so it needs a kernel: open the lesson with <code>make lab</code>."

# The browser itself refuses what is not in the page; `fetched` tells the lesson's author before a reader sees a hole.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; media-src data:"


class Lesson(NamedTuple):
    """What the index and the links between lessons say of one lesson."""

    name: str
    title: str
    summary: str  #  its first paragraph, as plain text

    @classmethod
    def of(cls, name: str, notebook: NotebookNode) -> Lesson:
        """Title and summary are the first heading and the first paragraph of the lesson's own prose."""
        prose = BeautifulSoup("\n".join(_markdown(c.source) for c in notebook.cells if c.cell_type == "markdown"), "html.parser")
        heading, paragraph = prose.find(["h1", "h2"]), prose.find("p")
        return cls(name, heading.get_text() if heading else name, paragraph.get_text() if paragraph else "")


class _OfflineRenderer(IPythonRenderer):
    """Markdown as JupyterLab shows it, with formulas as MathML."""

    def block_html(self, html: str) -> str:
        """As it is: to find images nbconvert parses each block, which would close a <details> whose answer is more than one block."""
        return super().block_html(html) if "<img" in html else html + "\n"

    def inline_math(self, body: str) -> str:
        return _formula(body, "inline")

    def block_math(self, body: str) -> str:
        return _formula(body, "block")

    def latex_environment(self, name: str, body: str) -> str:
        return _formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")


class _OfflineExporter(HTMLExporter):
    """nbconvert's plain fragments of cells and outputs, without prompts and with our Markdown."""

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
        raise ValueError(f"the formula {tex.strip()!r} uses {unknown[0]}, which cannot be drawn without a network; write it more simply")
    return mathml


def lesson_body(notebook: NotebookNode, folder: Path) -> str:
    """The cells and outputs of a notebook that has run, as HTML that needs no network.

    Args:
        folder: where the notebook lies; images it shows from there are taken into the page.

    Raises:
        ValueError: it shows what would have to be fetched (an image at a web address, say), or a formula that cannot be drawn.
    """
    exporter = _OfflineExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(_without_kernel(notebook), {"metadata": {"path": str(folder)}})
    if asked := sorted(set(fetched(body))):
        raise ValueError(f"the page would have to fetch {', '.join(asked)}, and must play offline; put it into the notebook or beside it")
    return body


def lesson_page(lesson: Lesson, body: str, seconds: float, lessons: Sequence[Lesson]) -> str:
    """The whole page of one of `lessons`, around what `lesson_body` wrote of a run of `seconds`, with links to its neighbours."""
    at = lessons.index(lesson)
    before = [f'<a rel="prev" href="{_page(e)}">← {escape(e.title)}</a>' for e in lessons[:at][-1:]]
    after = [f'<a rel="next" href="{_page(e)}">{escape(e.title)} →</a>' for e in lessons[at + 1 : at + 2]]
    links = '<nav><a href="index.html">All lessons</a>' + "".join(before + after) + "</nav>"
    ran = f"<footer>Every output on this page comes from a run of {seconds:.1f} s with {_machine()}.</footer>"
    return _html(lesson.title, f"{links}\n<main>\n{body}\n</main>\n{ran}\n{links}")


def index_page(lessons: Sequence[Lesson]) -> str:
    """The page that lists the lessons in their order."""
    rows = [
        f'<li><a href="{_page(e)}"><strong>{escape(e.title)}</strong></a><p>{escape(e.summary)}</p><small>{escape(e.name)}</small></li>'
        for e in lessons
    ]
    intro = "<p>How neural networks are trained on many machines. Every lesson ran; its pictures are drawn from what was recorded.</p>"
    listing = f'<ol class="lessons">{"".join(rows)}</ol>' if lessons else "<p>No lesson has run to its end.</p>"
    return _html("parallel101", f"<main><h1>parallel101</h1>{intro}{listing}</main>")


def fetched(html: str) -> Iterator[str]:
    """What a browser would fetch by itself on opening `html`; nothing, for a page that plays offline. A link to click is no such thing."""
    soup = BeautifulSoup(html, "html.parser")
    for tag in soup.find_all(True):
        names = ["src", "srcset", "poster", "data"] + ([] if tag.name in ("a", "area") else ["href", "xlink:href"])
        addresses = [str(tag[name]) for name in names if tag.get(name)]
        css = str(tag.get("style", "")) + (tag.get_text() if tag.name == "style" else "")
        addresses += [a for pair in re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css) for a in pair if a]
        yield from (a for a in addresses if not a.startswith(("data:", "#")))


def _without_kernel(notebook: NotebookNode) -> NotebookNode:
    """A copy in which what only a kernel can bring to life says so, and what it shows without one is shown."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop("application/javascript", None)
            if data.pop(WIDGET, None):  #  an explorer brings its last picture along, a slider does not
                data["text/html"] = data.get("text/html", "") + f'<p class="needs-kernel">{NEEDS_KERNEL}</p>'
    return notebook


def _html(title: str, body: str) -> str:
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
