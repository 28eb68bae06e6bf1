"""Fills the templates of the site's pages (templates/), and converts Markdown to HTML.

In a template, values are escaped, unless a filter or a macro has made them HTML. The HTML of
Markdown loads nothing: formulas become MathML, which browsers draw.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from latex2mathml.converter import convert as to_mathml
from markupsafe import Markup
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from parallel101.laboratory.viz.scene import script_json


def file_text(path: str) -> str:
    """Return the text of a style sheet or script in this folder."""
    return files(__package__).joinpath(path).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """Return the site's templates.

    {{ file("page.css") }} is the text of a file in this folder.
    """
    made = Environment(
        loader=PackageLoader("parallel101.laboratory.publish"),
        autoescape=lambda name: ".html" in str(name),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals["file"] = as_html(file_text)
    made.filters["script"] = as_html(script_json)
    made.filters["markdown"] = as_html(to_html)
    made.filters["inline"] = as_html(
        lambda text: to_html(text).strip().removeprefix("<p>").removesuffix("</p>")
    )
    return made


def render(name: str, **values: object) -> str:
    """Return the template `name`.html.jinja2, or that of a file with an ending, such as cite.md."""
    file = name if "." in name else f"{name}.html"
    return environment().get_template(f"{file}.jinja2").render(**values)


def as_html(function: Callable[..., str]) -> Callable[..., Markup]:
    """Let a template use what the function returns as HTML."""
    return lambda *args: Markup(function(*args))


class _OfflineRenderer(IPythonRenderer):
    """Markdown as JupyterLab shows it, with formulas as MathML."""

    def block_html(self, html: str) -> str:
        """Keep HTML without images as it is.

        nbconvert parses each block alone, and closes a <details> that spans several blocks.
        """
        return super().block_html(html) if "<img" in html else html + "\n"

    def inline_math(self, body: str) -> str:
        return _formula(body, "inline")

    def block_math(self, body: str) -> str:
        return _formula(body, "block")

    def latex_environment(self, name: str, body: str) -> str:
        return _formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")


def to_html(source: str, attachments: dict | None = None, path: str = "") -> str:
    """Return Markdown as HTML that loads nothing."""
    renderer = _OfflineRenderer(
        escape=False,
        embed_images=True,
        exclude_anchor_links=True,
        attachments=attachments or {},
        path=path,
    )
    return MarkdownWithMath(renderer=renderer).render(source)


def _formula(tex: str, display: str) -> str:
    mathml = to_mathml(tex, display=display)
    if unknown := re.search(r"\\[A-Za-z]+", mathml):
        raise ValueError(
            f"the formula {tex.strip()!r} uses {unknown[0]}, which cannot be converted to MathML; "
            "write it with simpler commands"
        )
    return mathml
