"""Runs lessons and writes the site: a page for each lesson and homework, the glossary, the index.

If a lesson fails, the others still run. Pages are written whole or not at all.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from parallel101.extras import needs_extra
from parallel101.laboratory.publish.course_pages import CITATION, CoursePage, course_pages
from parallel101.laboratory.publish.execute import LessonFailed, read_notebook, run_notebook
from parallel101.laboratory.publish.find import Repository, homework_notebooks, select_lessons
from parallel101.laboratory.publish.glossary import PAGE, read_terms
from parallel101.laboratory.publish.index import (
    REFERENCE,
    ListedPage,
    Opening,
    index_page,
    read_opening,
)
from parallel101.laboratory.publish.page import (
    Lesson,
    course_page,
    cover_of,
    homework_body,
    lesson_body,
    lesson_page,
    machine,
    offline_html,
    page_name,
    parts_of_page,
)
from parallel101.laboratory.publish.search_index import FILE as SEARCH
from parallel101.laboratory.publish.search_index import (
    SearchEntry,
    glossary_entries,
    notebook_entries,
    page_entries,
    search_index,
)
from parallel101.laboratory.publish.syllabus import Syllabus
from parallel101.laboratory.publish.tools import TOOL_PAGES, ToolPage
from parallel101.laboratory.publish.unchanged import (
    digest,
    digest_of_package,
    files_of_module,
    is_unchanged,
    marked,
)


class Published(NamedTuple):
    """The result of `publish`: the pages it wrote, and the lessons that failed.

    The index is the last page.
    """

    written: list[Path]
    failed: list[LessonFailed]


def make_output_folder(out: Path) -> None:
    """Create the folder `out` if it is missing, and check that it is writable.

    This takes place before any lesson runs.

    Raises:
        ValueError: `out` cannot be created or is not writable.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        why = f"cannot write pages to {out} ({error.strerror})"
        raise ValueError(f"{why}; give a writable folder, e.g. --out site") from error


MadePage = tuple[str, float, str]  # a lesson's body, its seconds, and what it was made from


class Course(NamedTuple):
    """The facts that the pages of a course have in common."""

    lessons: list[Path]  # in order
    homework: dict[int, Lesson]  # those that have a page
    whole: bool  # whether the glossary has all terms, or only those that are linked
    opening: Opening
    syllabus: Syllabus | None = None
    repository: Repository | None = None  # that has the lessons, if it is known


def publish(
    notebooks: Sequence[Path],
    out: Path,
    *,
    only: bool = False,
    syllabus: Syllabus | None = None,
    repository: Repository | None = None,
    timeout: float = 600.0,
    again: bool = False,
    report: Callable[[str], None] = print,
) -> Published:
    """Run each notebook from top to bottom and write it as a page.

    If a lesson fails, the others still run. A lesson with a page in `out` doesn't run again as long
    as its notebook, the files beside it and this package are the same.

    Args:
        notebooks: the lessons to run, all from one folder.
        out: the folder for the pages and index.html; it is created if it is missing. The old page
            of a lesson that fails is deleted.
        only: whether these lessons are the whole course. If not, the index also lists the folder's
            lessons that have a page in `out`. A course of some lessons has only the homework that
            they name, and only the terms of the glossary that they use.
        syllabus: the same, for the lessons and the homework that it names. It becomes the index.
        repository: the one that has the lessons. Their pages then have a link that opens them in
            Colab.
        timeout: time limit for each cell, in seconds.
        again: run the lessons even if nothing has changed.
        report: called with one line of progress per lesson. Progress bars go to standard error if
            that is a terminal.

    Raises:
        ValueError: `out` cannot be created or is not writable.
        OSError: a page could not be written, for example because the disk is full. `.filename` is
            that page; its old content is kept.
    """
    make_output_folder(out)
    folder = notebooks[0].parent
    given = _digest_of_site(notebooks, folder, only, syllabus, repository)
    if not again and is_unchanged(out / "index.html", given):
        report("Nothing has changed since these pages were written.")
        return Published([*(out / f"{p.stem}.html" for p in notebooks), out / "index.html"], [])
    course = _course(notebooks, folder, only, syllabus)._replace(repository=repository)
    _write_homework(course, folder, out)
    # a folder of some notebooks, without an opening, has no need of a reference and a search
    everything = course.whole and bool(course.opening.text) and {*notebooks} == {*course.lessons}
    reference = _write_reference(out) if everything else []
    names = None if course.whole else {path.stem for path in course.lessons}
    ran: dict[Path, MadePage] = {}
    failed = []
    try:
        for path in notebooks:
            began = time.perf_counter()
            page, made_from = out / f"{path.stem}.html", _digest_of_lesson(path, course)
            if not again and is_unchanged(page, made_from):
                ran[path] = (*parts_of_page(page.read_text(encoding="utf-8")), made_from)
                report(f"✓ {path.stem} has not changed")
                continue
            try:
                notebook = run_notebook(path, timeout=timeout)
                seconds = time.perf_counter() - began
                body = lesson_body(notebook, path.parent, course.homework, names)
            except (LessonFailed, ValueError) as error:
                if not isinstance(error, LessonFailed):
                    error = LessonFailed(path.stem, str(error))
                failed.append(error)
                page.unlink(missing_ok=True)
                report(f"✗ {path.stem} failed after {time.perf_counter() - began:.1f} s")
            else:  # written at once: after a run that is killed, it doesn't run again
                ran[path] = body, seconds, made_from
                lesson = _lesson(path.stem, path)
                _write(page, _page_of_lesson(lesson, ran[path], [lesson], course))
                report(f"✓ {path.stem} ran in {seconds:.1f} s")
        if ran and course.whole:
            _write_tools(out, {*notebooks} >= {*course.lessons}, report)
    finally:  # also after Ctrl-C: links the finished pages to each other
        if everything:
            shown = [path for path in course.lessons if (out / f"{path.stem}.html").exists()]
            tasks = [homework_notebooks(folder)[number] for number in course.homework]
            entries = [*search_entries(shown, tasks, folder), *reference]
            _write(out / SEARCH, search_index(entries, read_terms(folder)))
        written = _write_pages(course, out, ran)
    if not failed:
        index = out / "index.html"
        _write(index, marked(index.read_text(encoding="utf-8"), given))
    return Published(written, failed)


def _digest_of_lesson(path: Path, course: Course) -> str:
    """Return the digest of what a lesson's page is made from.

    That is the package, the notebook and the files beside it.
    """
    beside = [file for file in path.parent.iterdir() if file.is_file() and file.suffix != ".ipynb"]
    names = [lesson.stem for lesson in course.lessons]
    facts = course.homework, course.whole or names, machine()
    return digest([path, *beside], digest_of_package(), facts)


def _digest_of_site(notebooks: Sequence[Path], folder: Path, *facts: object) -> str:
    """Return the digest of what the whole site is made from.

    That includes the homework and the pages around the lessons.
    """
    around = [folder, folder.parent / "homework", folder.parent / "docs"]
    files = [file for place in around for file in place.rglob("*") if file.is_file()]
    left = {"__pycache__", "pictures"}  # by a run, or by a learner
    files = [f for f in files if not left & {*f.parts} and not f.name.startswith(".")]
    citation = [file for file in (folder.parent / CITATION,) if file.exists()]
    return digest([*files, *citation], digest_of_package(), notebooks, facts, machine())


def _course(
    notebooks: Sequence[Path], folder: Path, only: bool, syllabus: Syllabus | None
) -> Course:
    found = homework_notebooks(folder)
    lessons, wanted = select_lessons(folder), set(found)
    if syllabus is not None:
        lessons = [path for path in lessons if path.stem in syllabus.lessons]
        wanted = syllabus.homework
    elif only:
        lessons, wanted = list(notebooks), set()
        for path in lessons:
            with suppress(LessonFailed):  # it is reported when it runs
                wanted |= {*_lesson(path.stem, path).homework}
    chosen = {number: path for number, path in found.items() if number in wanted}
    homework = {number: _lesson(path.parent.name, path) for number, path in chosen.items()}
    whole = not only and syllabus is None
    return Course(lessons, homework, whole, read_opening(folder), syllabus)


def _lesson(name: str, path: Path) -> Lesson:
    """Return what the index says of a notebook. Raises LessonFailed if it isn't one."""
    return _read_lesson(name, path, path.stat().st_mtime_ns)


@cache
def _read_lesson(name: str, path: Path, changed: int) -> Lesson:
    return Lesson.of(name, read_notebook(path))


def _page_of_lesson(
    lesson: Lesson, made: MadePage, lessons: Sequence[Lesson], course: Course
) -> str:
    body, seconds, made_from = made
    return marked(lesson_page(lesson, body, seconds, lessons, course.repository), made_from)


def _write_pages(course: Course, out: Path, ran: Mapping[Path, MadePage]) -> list[Path]:
    """Write the pages of the lessons that ran, the glossary and the index; return the paths.

    The index lists all lessons of the course that have a page.
    """
    lessons = {}
    for path in course.lessons:
        if path in ran or (out / f"{path.stem}.html").exists():
            # a notebook that did not run now and that has become unreadable
            with suppress(LessonFailed):
                lessons[path] = _lesson(path.stem, path)
    for path, body in ran.items():
        html = _page_of_lesson(lessons[path], body, [*lessons.values()], course)
        _write(out / f"{path.stem}.html", html)
    shown = {path.stem: (out / f"{path.stem}.html").read_text(encoding="utf-8") for path in lessons}
    glossary = _write_glossary(course, out, [*shown.values()])
    covers = {name: cover_of(page) for name, page in shown.items()}
    opening = course.opening if course.syllabus is None else Opening()
    around: list[CoursePage | ListedPage] = []
    tools: list[ToolPage] = []
    if course.whole:  # with the pages around the lessons, and what has been made of the others
        known = [page_name(lesson) for lesson in (*lessons.values(), *course.homework.values())]
        root = course.lessons[0].parent.parent
        made = course_pages(root, [*known, *[PAGE] * glossary], course.repository)
        for page in made:
            _write(out / page.address, course_page(page.title, page.body))
        around = [REFERENCE] * (out / REFERENCE.address).exists() + made
        tools = [tool for tool in TOOL_PAGES if (out / tool.address).exists()]
    index = index_page(
        [*lessons.values()],
        covers,
        course.homework,
        glossary,
        opening,
        covers.get(opening.picture),
        course.syllabus,
        tools,
        around,
        course.repository,
        (out / SEARCH).exists() and course.whole,
    )
    _write(out / "index.html", index)
    return [*(out / f"{path.stem}.html" for path in ran), out / "index.html"]


def _write_glossary(course: Course, out: Path, lessons: Sequence[str]) -> bool:
    """Write the glossary, and return whether there is one.

    In a course of some lessons it has the terms that they and the homework link to.
    """
    terms = read_terms(course.lessons[0].parent)
    if not course.whole:
        tasks = [out / f"{task.name}.html" for task in course.homework.values()]
        pages = "".join([*lessons, *(page.read_text(encoding="utf-8") for page in tasks)])
        links = re.findall(rf'"{re.escape(PAGE)}#([^"]+)"', pages)
        terms = [term for term in terms if term.anchor in links]
    if terms:
        _write(out / PAGE, course_page("Glossary", "", terms=terms))
    return bool(terms)


def _write_tools(out: Path, anew: bool, report: Callable[[str], None]) -> None:
    """Write the pages that play without Python, unless they are made from the same files.

    If not `anew`, a page that is there stays.
    """
    beside = Path(__file__).parent.rglob("*")
    frame = [file for file in beside if file.suffix in (".css", ".jinja2")]
    for tool in TOOL_PAGES:
        if (out / tool.address).exists() and not anew:
            continue
        made_from = digest([*files_of_module(tool.module.__name__), *frame], machine())
        if is_unchanged(out / tool.address, made_from):
            report(f"✓ {tool.title} has not changed")
            continue
        began = time.perf_counter()
        body, files = tool.make()
        for path, text in files.items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            _write(out / path, text)
        html = offline_html(tool.title, body, scripts_beside=bool(files))
        _write(out / tool.address, marked(html, made_from))
        report(f"✓ {tool.title} took {time.perf_counter() - began:.1f} s")


def _write_homework(course: Course, folder: Path, out: Path) -> None:
    """Write a page for each homework of the course, unless it is made from the same files."""
    found = homework_notebooks(folder)
    for number, homework in course.homework.items():
        path = found[number]
        page = out / f"{homework.name}.html"
        beside = (file for file in path.parent.iterdir() if file.is_file())
        made_from = digest(beside, digest_of_package())
        if not is_unchanged(page, made_from):
            html = course_page(homework.title, homework_body(path), homework=True)
            _write(page, marked(html, made_from))


def _write_reference(out: Path) -> list[SearchEntry]:
    """Write the reference, and return its names for the search."""
    with needs_extra("The reference"):  # pdoc imports the whole package, which takes seconds
        from parallel101.laboratory.publish.reference import make_reference

    reference = make_reference()
    for address, html in reference.pages.items():
        (out / address).parent.mkdir(parents=True, exist_ok=True)
        _write(out / address, html)
    return reference.names


def search_entries(
    lessons: Sequence[Path], homework: Sequence[Path], folder: Path
) -> list[SearchEntry]:
    """Return what the search finds, except for the reference: these notebooks and the other pages.

    `folder`: that of the lessons, which also has the glossary.
    """
    entries: list[SearchEntry] = []
    for kind, paths in (("Lesson", lessons), ("Homework", homework)):
        for path in paths:
            name = path.stem if kind == "Lesson" else path.parent.name
            with suppress(LessonFailed):
                notebook = read_notebook(path)
                entries += notebook_entries(kind, Lesson.of(name, notebook), notebook)
    entries += glossary_entries(read_terms(folder))
    for page in course_pages(folder.parent):
        entries += page_entries(page)
    tools = (SearchEntry("Tool", t.title, t.address, t.text, also=t.also) for t in TOOL_PAGES)
    return [*entries, *tools]


def _write(page: Path, html: str) -> None:
    """Write the whole page or nothing: if the disk is full, the old page stays."""
    partial = page.with_name(f"{page.name}.part")
    try:
        partial.write_text(html, encoding="utf-8")
        os.replace(partial, page)
    except OSError as error:
        # an error of write() itself does not name the file
        raise OSError(error.errno, error.strerror, str(page)) from error
    finally:
        partial.unlink(missing_ok=True)
