"""The glossary: a page of the terms in lessons/glossary.md, and links to it from the lessons.

## all-reduce, all-reduced            a term, and other forms in which lessons use it; plurals are
                                      found without being listed
The sum of all ranks' arrays, …       its definition, as Markdown; the first sentence is also shown
                                      when the reader points at the link

The first use of each term in a lesson becomes a link.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bs4 import BeautifulSoup, NavigableString
from bs4.element import PageElement

FILE, PAGE = "glossary.md", "glossary.html"
NOT_LINKED = ["a", "code", "pre", "math", "summary", "button", "th", "em", "script", "style"]
NOT_LINKED += ["h1", "h2", "h3", "h4"]


class Term(NamedTuple):
    """A term of the glossary."""

    name: str
    forms: tuple[str, ...]  # the name and the other forms in which lessons use it
    definition: str  # Markdown

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def short(self) -> str:
        """The first sentence of the definition, as plain text."""
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*$\\]", r"\1", self.definition)
        return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0].rstrip(":")


def read_terms(folder: Path) -> list[Term]:
    """Return the terms of the folder's glossary.md in alphabetical order; none without the file.

    Raises ValueError for a term without a definition, or one that is defined twice.
    """
    if not (folder / FILE).exists():
        return []
    _, *entries = re.split(r"(?m)^## +", (folder / FILE).read_text(encoding="utf-8"))
    terms = []
    for entry in entries:
        heading, _, definition = entry.partition("\n")
        forms = tuple(form.strip() for form in heading.split(","))
        if not definition.strip():
            what = f"{heading.strip()!r} has no definition"
            raise ValueError(f"{folder / FILE}: {what}; write one under its heading")
        terms.append(Term(forms[0], forms, definition.strip()))
    names = [form.lower() for term in terms for form in term.forms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{folder / FILE} defines {', '.join(map(repr, twice))} twice; keep one")
    return sorted(terms, key=lambda term: term.name.lower())


def link_first_uses(body: BeautifulSoup, terms: Sequence[Term]) -> None:
    """Link the first use of each term in the lesson's prose to the glossary, in place.

    Code, headings and formulas stay as they are.
    """
    by_form = {form.lower(): term for term in terms for form in term.forms}
    if not by_form:
        return
    # a sentence may begin with a term, but a name is a name only as it is written: ZeRO is not zero
    forms = sorted((form for term in terms for form in term.forms), key=len, reverse=True)
    longest_first = "|".join(
        re.escape(form) if form != form.lower() else f"(?i:{re.escape(form)})" for form in forms
    )
    use = re.compile(rf"(?<![\w-])({longest_first})(?=(s|es)?(?![\w-]))")
    linked: set[str] = set()
    for node in list(body.find_all(string=use)):
        if not node.find_parent(class_="text_cell_render") or node.find_parent(NOT_LINKED):
            continue
        parts, done = list[PageElement](), 0
        for match in use.finditer(str(node)):
            term = by_form[match[1].lower()]
            if term.name not in linked:
                linked.add(term.name)
                look = {"class": "term", "href": f"{PAGE}#{term.anchor}", "title": term.short}
                link = body.new_tag("a", attrs=look)
                link.string = match[0]
                parts += [NavigableString(node[done : match.start()]), link]
                done = match.end()
        if parts:
            node.replace_with(*parts, NavigableString(node[done:]))
