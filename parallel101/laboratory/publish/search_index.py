"""The search over all pages of the site, which works offline.

    sections ── search_index ──▶ site/search_index.js, a script: a page from disk can't fetch JSON
    templates/search_box.html.jinja2 ──▶ the box on a page, with search.js, which loads that script

An entry's words count by how often it uses them, and more in its title. search.js multiplies
them by how rare a word is (inverse document frequency). It also finds words with one wrong letter,
words that are written together (allreduce), and the glossary's other forms of a term (moe).
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from textwrap import shorten
from typing import NamedTuple

from bs4 import BeautifulSoup
from nbformat import NotebookNode

from parallel101.laboratory.publish.arrange import HEADINGS, name_headings
from parallel101.laboratory.publish.glossary import PAGE, Term
from parallel101.laboratory.publish.markdown import to_html
from parallel101.laboratory.publish.offline_page import Page
from parallel101.laboratory.publish.page import Lesson

FILE = "search_index.js"
IN_TITLE, MOST_IN_TEXT = 12, 6  # weights of a word
NUMBERS = [("2", "two"), ("3", "three"), ("4", "four")]
SHOWN = 140  # letters of an entry's text that a result shows


class SearchEntry(NamedTuple):
    """An entry that the search can find: a section, a term or a name."""

    kind: str  # "Lesson", "Homework", "Glossary", "Reference", "Tool"; "" for other pages
    title: str
    address: str  # below site/
    text: str
    place: str = ""  # the lesson or page of a section, as its title says it
    also: str = ""  # other words by which it is found


def notebook_entries(kind: str, lesson: Lesson, notebook: NotebookNode) -> Iterator[SearchEntry]:
    """Yield the sections of a lesson or a homework, with the anchors that `arrange` gives them."""
    html = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            html += f'<div class="text_cell_render">{to_html(cell.source)}</div>'
        else:
            html += f'<pre class="cell">{escape(cell.source)}</pre>'
    soup = BeautifulSoup(html, "html.parser")
    name_headings(soup)
    yield from _sections(kind, lesson.short_title, lesson.address, soup)


def page_entries(page: Page) -> Iterator[SearchEntry]:
    """Yield the sections of a page around the lessons."""
    soup = BeautifulSoup(page.body, "html.parser")
    for contents in soup.select("nav"):
        contents.decompose()
    first, *others = _sections("", page.title, page.address, soup)
    yield from [first._replace(also=page.also), *others]


def _sections(kind: str, title: str, address: str, soup: BeautifulSoup) -> Iterator[SearchEntry]:
    section, texts = SearchEntry(kind, title, address, ""), list[str]()
    for element in soup.select(".text_cell_render > *, pre.cell"):
        if element.name not in HEADINGS or not element.has_attr("id"):
            texts.append(element.get_text(" " if element.name in ("table", "ul", "ol") else ""))
            continue
        if texts:
            yield section._replace(text=" ".join(" ".join(texts).split()))
        section, texts = SearchEntry(kind, title, address, ""), []
        if element.name != "h1":
            at, heading = f"{address}#{element['id']}", element.get_text().strip()
            section = section._replace(title=heading, address=at, place=title)
    yield section._replace(text=" ".join(" ".join(texts).split()))


def glossary_entries(terms: Sequence[Term]) -> list[SearchEntry]:
    """Return the terms of the glossary."""
    plain = [BeautifulSoup(to_html(term.definition), "html.parser").get_text() for term in terms]
    return [
        SearchEntry("Glossary", term.name, f"{PAGE}#{term.anchor}", text, also=" ".join(term.forms))
        for term, text in zip(terms, plain)
    ]


def words_of(text: str) -> list[str]:
    """Return the words of a text in small letters, without accents: all_reduce has two."""
    plain = unicodedata.normalize("NFKD", text)
    return re.findall(r"[a-z0-9]{2,}|\d", re.sub(r"[\u0300-\u036f]", "", plain).lower())


def search_index(entries: Sequence[SearchEntry], terms: Sequence[Term] = ()) -> str:
    """Return the script with what results show, and with each word's entries and weights.

    `terms`: of the glossary, for the other forms of a word.
    """
    words: dict[str, list[int]] = {}
    for at, entry in enumerate(entries):
        weights = {
            word: min(MOST_IN_TEXT, 1 + round(math.log2(count)))
            for word, count in Counter(words_of(f"{entry.text} {entry.place}")).items()
        }
        parts = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", entry.title)  # HybridTrainer: also "trainer"
        for word in {*words_of(f"{entry.title} {parts} {entry.also}")}:
            weights[word] = weights.get(word, 0) + IN_TITLE
        for word, weight in weights.items():
            words.setdefault(word, []).extend((at, weight))
    texts = (shorten(e.text.replace("`", ""), SHOWN, placeholder=" …") for e in entries)
    shown = [[*e[:2], e.place, e.address, text] for e, text in zip(entries, texts)]
    synonyms = [term.forms for term in terms if len(term.forms) > 1] + NUMBERS
    given = {"entries": shown, "words": dict(sorted(words.items())), "synonyms": synonyms}
    packed = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    return f"globalThis.SEARCH_INDEX = {packed};\n"
