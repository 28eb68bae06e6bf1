"""The pages around the lessons, which are written in Markdown beside them.

    docs/teaching.md    ──▶ site/teach_with_it.html      how a teacher sets up a course
    lessons/errors.md   ──▶ site/errors_explained.html   with the messages that its programs raise
    CITATION.cff        ──▶ site/cite.html               (templates/cite.md.jinja2)

A page whose file is missing is left out. A link in a file leads to the page made from its target,
or to the repository. Where neither is known, it is text.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import runpy
import tempfile
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from pathlib import Path

import yaml
from bs4 import BeautifulSoup, Tag

from parallel101.laboratory.publish.arrange import name_headings
from parallel101.laboratory.publish.find import Repository
from parallel101.laboratory.publish.markdown import to_html
from parallel101.laboratory.publish.offline_page import Page
from parallel101.laboratory.publish.templates import render

ERRORS, CITATION = "lessons/errors.md", "CITATION.cff"
PAGES = {
    ERRORS: Page(
        "errors_explained.html",
        "",
        "What each error means, what to do about it, and the lesson that explains it.",
        "my program hangs crashes fails: hang crash timeout NCCL watchdog exception bug debug",
    ),
    "docs/teaching.md": Page(
        "teach_with_it.html",
        "",
        "Choose lessons, give lectures from the pages, hand out homework and grade a class.",
        "teacher course syllabus grading",
    ),
    CITATION: Page(
        "cite.html",
        "",
        "How to name parallel101 in a paper or a thesis.",
        "BibTeX paper reference",
    ),
}
PROGRAM = "train.py"  # the name under which the programs of a page run


def course_pages(
    root: Path, pages: Collection[str] = (), repository: Repository | None = None
) -> list[Page]:
    """Return the pages whose files are in the folder `root`, the one that has docs/.

    Args:
        pages: the addresses of the site's other pages, to which links may lead.
        repository: to whose files other links lead.

    Raises ValueError if a program in lessons/errors.md raises nothing.
    """
    there = {file: page for file, page in PAGES.items() if (root / file).is_file()}
    known = {*pages, *(page.address for page in there.values())}
    made = []
    for file, page in there.items():
        text = (root / file).read_text(encoding="utf-8")
        if file == CITATION:
            text = citation(text, repository)
        cell = '<div class="text_cell"><div class="text_cell_render">{}</div></div>'
        soup = BeautifulSoup(cell.format(to_html(text)), "html.parser")
        if file == ERRORS:
            _show_messages(soup, text)
        contents, heading = name_headings(soup), soup.h1
        assert heading is not None, f"{file} has no title"
        if contents is not None and soup.h2 is not None:
            soup.h2.insert_before(contents)
        for link in soup.select("a[href]:not([href^='#'])"):
            _lead_somewhere(link, posixpath.dirname(file), known, repository)
        made.append(page._replace(title=heading.get_text(), body=str(soup)))
    return made


def citation(text: str, repository: Repository | None = None) -> str:
    """Return the page that says how to cite parallel101, as Markdown.

    Args:
        text: of CITATION.cff, whose format is described at https://citation-file-format.github.io.
        repository: the one with the code, for a file that names none.
    """
    said = yaml.safe_load(text)
    address = said.get("repository-code") or said.get("url")
    address = address or (repository.address if repository is not None else "")
    every = defaultdict(str, said), [defaultdict(str, author) for author in said["authors"]]
    return render("cite.md", said=every[0] | {"authors": every[1]}, address=address, text=text)


def _lead_somewhere(
    link: Tag, folder: str, pages: Collection[str], repository: Repository | None
) -> None:
    """Let a link of a file in `folder` lead to the page of its target, or to the repository."""
    path, hash, heading = str(link["href"]).partition("#")
    if "://" in path:
        return
    target = posixpath.normpath(posixpath.join(folder, path))
    kind, name, *_ = [*target.split("/"), ""]  # a lesson's notebook, or the folder of a homework
    page = PAGES[target].address if target in PAGES else ""
    if not page and kind in ("lessons", "homework"):  # or of the glossary
        page = f"{name.partition('.')[0]}.html"
    if page in pages:
        link["href"] = page + hash + heading
    elif repository is not None:
        link["href"] = repository.file(target) + hash + heading
    else:
        link.unwrap()


def _show_messages(soup: BeautifulSoup, text: str) -> None:
    """Show under each program the error that it raises."""
    programs = soup.select("div.highlight")
    if len(programs) != text.count("```python\n"):
        raise ValueError(f"{ERRORS}: each program is a block that begins with ```python")
    for program in programs:
        output = soup.new_tag("div", attrs={"class": "output_area output_error"})
        message = soup.new_tag("pre")
        message.string = raised(program.get_text())
        output.append(message)
        program.insert_after(output)


@cache
def raised(program: str) -> str:
    """Run a program, and return the error that it raises, as the last lines of a traceback.

    The traceback of a rank, in the message, is left out if it leads through files of libraries.

    Raises ValueError if the program raises nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / PROGRAM
        path.write_text(program, encoding="utf-8")
        unseen = io.StringIO()
        try:
            with contextlib.redirect_stdout(unseen), contextlib.redirect_stderr(unseen):
                runpy.run_path(str(path), run_name="__main__")
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace(f"{path.parent}{os.sep}", "")
            message, _, traceback = text.partition("\n\nTraceback")
            files = set(re.findall('File "(.*?)"', traceback))
            return text if files == {PROGRAM} else message
    raise ValueError(f"{ERRORS}: this program raises nothing:\n\n{program}")
