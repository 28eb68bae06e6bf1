"""Converts Markdown to HTML that loads nothing: formulas become MathML, which browsers draw."""

from __future__ import annotations

import re

from latex2mathml.converter import convert as to_mathml
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath


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
