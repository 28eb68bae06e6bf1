"""Converts a notebook that has run into one HTML file that needs no network, kernel or other file.

    cells ── nbconvert ──▶ HTML ── arrange.py: sections, folded answers
                                ── glossary.py: links to terms ──▶ the page's body

nbconvert's own pages load MathJax, RequireJS and a widget manager from the network. Here formulas
become MathML, which browsers draw themselves. An explorer, which needs a kernel, says how to get
one. A page that would still load something is refused.

A homework's page isn't run. It has the output of `help(hw1.ring_shift)`, the specification of an
exercise: the docstring of its stub, read from the file beside the notebook.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from html import unescape
from importlib.metadata import version
from pathlib import Path
from textwrap import indent
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

from bs4 import BeautifulSoup
from jinja2 import pass_context
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_output

from parallel101.laboratory.publish import glossary
from parallel101.laboratory.publish.arrange import arrange
from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.find import Repository
from parallel101.laboratory.publish.markdown import to_html
from parallel101.laboratory.publish.offline_page import offline_html
from parallel101.laboratory.publish.templates import render

WIDGET = "application/vnd.jupyter.widget-view+json"
NOTEBOOK = re.compile(r"^(\w+)\.ipynb(#.*)?$")  # a link to another lesson
HOMEWORK = re.compile(r"Homework (\d+), exercises?")
MINUTES = re.compile(r"takes about (\d+) minutes")
SHORT = re.compile(r"short way takes (\d+) minutes")
NEEDS_KERNEL = (
    "This explorer runs again after each change, so it needs a kernel. Open the lesson with "
    "<code>make lab</code>."
)
HELP = re.compile(r"^help\((\w+)\.(\w+)\)\s*$")  # of a homework's function
NONE: Mapping = MappingProxyType({})
# the picture for the index: that of the cell with the tag `cover`, or the first that plays
COVERS = ".celltag_cover figure.p101", "figure.p101:has(source)", "figure.p101"
NARROW = re.compile(r'"narrow": (.*?), "css"')  # in the script after a picture


class Lesson(NamedTuple):
    """A lesson, or a homework, as the index and the links between pages show it."""

    name: str
    title: str
    summary: str  # its first paragraph, as plain text
    homework: tuple[int, ...] = ()  # the numbers of the homeworks that it names
    minutes: int = 0  # how long it takes, if it says so
    short: int = 0  # the minutes of its short way, if it has one
    path: Path = Path()  # of its notebook

    @property
    def address(self) -> str:
        """The address of its page, from another page."""
        return quote(f"{self.name}.html")  # a teacher's file may be called "exercise #2"

    @property
    def numbered(self) -> str:
        """The title with the number of the lesson's name."""
        number = re.match(r"\d+(?=_)", self.name)
        return f"{number[0]} {self.title}" if number else self.title

    @property
    def short_title(self) -> str:
        """The number and the title up to its colon, such as "00 Ranks"."""
        return self.numbered.partition(":")[0]

    @property
    def text(self) -> str:
        """The first sentence of the summary."""
        return re.split(r"(?<=[.!?])\s", self.summary, maxsplit=1)[0]

    @classmethod
    def read(cls, path: Path, name: str) -> Lesson:
        """Read a notebook; raises LessonFailed if the file isn't one."""
        return cls.of(name, read_notebook(path))._replace(path=path)

    @classmethod
    def of(cls, name: str, notebook: NotebookNode) -> Lesson:
        """Take the first heading as the title and the first paragraph as the summary."""
        prose = BeautifulSoup(
            "\n".join(to_html(c.source) for c in notebook.cells if c.cell_type == "markdown"),
            "html.parser",
        )
        heading, paragraph = prose.find(["h1", "h2"]), prose.find("p")
        title = heading.get_text() if heading else name
        summary = paragraph.get_text() if paragraph else ""
        numbers = sorted({int(number) for number in HOMEWORK.findall(prose.get_text())})
        times = [said.search(prose.get_text()) for said in (MINUTES, SHORT)]
        minutes, short = (int(found[1]) if found else 0 for found in times)
        return cls(name, title, summary, tuple(numbers), minutes, short)


@cache
def _exporter() -> HTMLExporter:
    """Return nbconvert's HTML for cells and outputs, with our Markdown."""

    @pass_context
    def markdown(context, source):
        path = context["resources"]["metadata"].get("path", "")
        return to_html(source, context.get("cell", {}).get("attachments"), path)

    no_prompts = {"exclude_input_prompt": True, "exclude_output_prompt": True}
    own = {"markdown2html": markdown}
    return HTMLExporter(template_name="basic", filters=own, **no_prompts)


def lesson_body(
    notebook: NotebookNode,
    folder: Path,
    homework: Mapping[int, Lesson] = NONE,
    lessons: Collection[str] | None = None,
) -> str:
    """Return the cells and outputs of a notebook that has run, as HTML that loads nothing.

    Args:
        folder: the notebook's folder. Images from this folder are embedded in the page, and terms
            of its glossary.md become links.
        homework: those that have a page, by number. Where the text names one, it becomes a link.
        lessons: those of the course; a link to any other becomes text. None: all.

    Raises:
        ValueError: the page would load something, such as an image from the web, or a formula
            cannot be converted.
    """
    place = {"metadata": {"path": str(folder)}}
    body, _ = _exporter().from_notebook_node(_without_kernel(notebook), place)
    soup = BeautifulSoup(body, "html.parser")
    if addresses := sorted(set(external_addresses(soup))):
        would = f"the page would load {', '.join(addresses)}, but pages must work offline"
        raise ValueError(f"{would}; put the file in the notebook's folder")
    for frame in soup.select("iframe.p101-tool"):  # the site has the tool's own page
        link = soup.new_tag("a", href=str(frame["data-page"]))
        link.string = str(frame["title"])
        frame.replace_with(link)
    figures = filter(None, map(soup.select_one, COVERS))
    if figure := next(figures, None):  # before `arrange` moves pictures out of their cells
        figure["class"] = "p101 cover"
    arrange(soup)
    for text in list(soup.find_all("strong", string=HOMEWORK)):
        if (named := HOMEWORK.search(text.get_text())) and (task := homework.get(int(named[1]))):
            text.wrap(soup.new_tag("a", href=task.address))
    for link in soup.find_all("a", href=NOTEBOOK):  # beside the page is the other lesson's page
        if lessons is not None and str(link["href"]).partition(".")[0] not in lessons:
            link.unwrap()
        else:
            link["href"] = NOTEBOOK.sub(r"\1.html\2", str(link["href"]))
    glossary.link_first_uses(soup, glossary.read_terms(folder))
    return str(soup)


class Cover(NamedTuple):
    """The picture of a lesson's page, as the index shows it. The images are data URIs."""

    still: str  # if it moves, its last moment
    moving: str
    alt: str = ""
    narrow: tuple[int, int] | None = None  # the size of its layout for phones

    def stacked(self, image: str) -> str:
        """Return an image in the layout for phones, as player.js stacks its panels."""
        assert self.narrow is not None, "it has such a layout"
        (width, height), (head, _, data) = self.narrow, image.partition(",")
        svg = base64.b64decode(data).decode()
        size, inside = (f'width="{width - k}" height="{height - k}"' for k in (0, 1))
        for old, new in (
            (r'(viewBox="0 0) \d+ \d+" width="\d+" height="\d+"', rf'\1 {width} {height}" {size}'),
            (r'(class="card" x=".5" y=".5") width="\d+" height="\d+"', rf"\1 {inside}"),
            ('data-narrow="none"', 'display="none"'),
            (r'data-narrow="([^"]+)"', r'transform="\1"'),
        ):
            svg = re.sub(old, new, svg)
        return f"{head},{base64.b64encode(svg.encode()).decode()}"


def cover_of(page: str) -> Cover | None:
    """Return the picture of a lesson's page for the index; None if the page has none."""
    found = re.search(r'<figure [^>]*class="p101 cover".*?</picture>', page, re.DOTALL)
    if found is None:
        return None
    images = re.findall(r'"(data:image/svg[^"]+)"', found[0])
    alt, narrow = re.search(r' alt="(.*?)"', found[0]), NARROW.search(page, found.end())
    size = json.loads(narrow[1]) if narrow else None
    return Cover(images[0], images[-1], unescape(alt[1]) if alt else "", size)


def lesson_page(
    lesson: Lesson,
    body: str,
    seconds: float,
    lessons: Sequence[Lesson],
    repository: Repository | None = None,
) -> str:
    """Return the whole page of a lesson.

    It has the lesson's body, how long it ran, and links to the lessons before and after it. With a
    repository, Colab opens the notebook from its folder lessons/.
    """
    at = lessons.index(lesson)
    html = render(
        "lesson",
        before=lessons[at - 1] if at else None,
        after=lessons[at + 1] if at + 1 < len(lessons) else None,
        colab=repository.in_colab(f"lessons/{lesson.name}.ipynb") if repository else None,
        body=Markup(body),
        seconds=seconds,
        machine=machine(),
    )
    return offline_html(lesson.title, html)


def course_page(
    title: str, body: str, *, homework: bool = False, terms: Sequence[glossary.Term] = ()
) -> str:
    """Return a page of the course that isn't a lesson.

    Args:
        title: of the page.
        body: HTML.
        homework: whether it is a homework as it is handed out, with what is to be written.
        terms: those of the glossary, if it is the glossary.
    """
    html = render("course_page", body=Markup(body), homework=homework, terms=terms)
    return offline_html(title, html)


def external_addresses(html: str | BeautifulSoup) -> Iterator[str]:
    """Yield every address that a browser would load when it opens the page.

    Links that a reader can click are not loaded.
    """
    soup = BeautifulSoup(html, "html.parser") if isinstance(html, str) else html
    for tag in soup.find_all(True):
        names = ["src", "srcset", "poster", "data"]
        names += [] if tag.name in ("a", "area") else ["href", "xlink:href"]
        addresses = [str(tag[name]) for name in names if tag.get(name)]
        css = str(tag.get("style", "")) + (tag.get_text() if tag.name == "style" else "")
        loaded = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css)
        addresses += [address for pair in loaded for address in pair if address]
        yield from (a for a in addresses if not a.startswith(("data:", "#")))


def _without_kernel(notebook: NotebookNode) -> NotebookNode:
    """Return a copy for pages, in which each widget is replaced by its last picture, if any.

    A note says that the widget needs a kernel.
    """
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop("application/javascript", None)
            # an explorer has its last picture as HTML beside it; a slider has none
            if data.pop(WIDGET, None):
                note = f'<p class="needs-kernel">{NEEDS_KERNEL}</p>'
                data["text/html"] = data.get("text/html", "") + note
    return notebook


def machine() -> str:
    """Return in words what the lessons ran on."""
    python, system = platform.python_version(), platform.system()
    return f"Python {python} and torch {version('torch')} on {system} with {os.cpu_count()} cores"


def homework_body(path: Path) -> str:
    """Return the body of a homework's page: the notebook at `path`, with what help() shows.

    That is the signature and the docstring of a stub in the file beside the notebook. Raises
    ValueError if the file has no such function.
    """
    notebook = read_notebook(path)
    for cell in notebook.cells:
        if cell.cell_type == "code" and (asked := HELP.match(cell.source)):
            file, name = asked.groups()
            code = ast.parse(path.with_name(f"{file}.py").read_text(encoding="utf-8")).body
            stubs = {node.name: node for node in code if isinstance(node, ast.FunctionDef)}
            if (stub := stubs.get(name)) is None:
                raise ValueError(f"{path} asks for help({file}.{name}), but {file}.py lacks it")
            returns = f" -> {ast.unparse(stub.returns)}" if stub.returns else ""
            docstring = indent(ast.get_docstring(stub) or "", "    ")
            text = f"{name}({ast.unparse(stub.args)}){returns}\n{docstring}\n"
            cell.outputs = [new_output("stream", name="stdout", text=text)]
    return lesson_body(notebook, path.parent)
