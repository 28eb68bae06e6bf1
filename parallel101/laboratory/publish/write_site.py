"""Runs lessons and writes the site: a page for each lesson and homework, the glossary, the index.

    notebooks ── execute.py, page.py ──▶ a page each, written as soon as its lesson has run
    the others ──▶ {path in the site: text} ──▶ written at the end, the index last

If a lesson fails, the others still run. Files are written whole or not at all. What depends on
nothing that has changed isn't made again, by a digest of what it is made from, which is noted in
.ran/made_from.json:

    a lesson that has run   the notebook, the other files beside it, and this package
    the index               the same of the whole site: all notebooks, docs/, the homework
    the atlas               those folders of the package that its 984 runs depend on

Lessons are kept with their outputs beside the pages, which are made from these again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

from parallel101.extras import needs_extra
from parallel101.laboratory import PACKAGE
from parallel101.laboratory.publish.course_pages import CITATION, course_pages
from parallel101.laboratory.publish.execute import LessonFailed, read_notebook, run_notebook
from parallel101.laboratory.publish.find import Repository, homework_notebooks, select_lessons
from parallel101.laboratory.publish.glossary import Term, read_terms
from parallel101.laboratory.publish.index import (
    GLOSSARY,
    REFERENCE,
    Opening,
    index_page,
    read_opening,
)
from parallel101.laboratory.publish.offline_page import Page
from parallel101.laboratory.publish.page import (
    NONE,
    Lesson,
    course_page,
    cover_of,
    homework_body,
    lesson_body,
    lesson_page,
    machine,
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
from parallel101.laboratory.publish.tools import TOOLS, collectives_atlas_page

ROOT, INDEX = Path(PACKAGE), "index.html"
LEFT = "__pycache__", "pictures"  # by a run, or by a learner
STAMPS = ".ran/made_from.json"  # from what the files of a site were made: name → digest
ATLAS = (  # what the runs of the atlas and their pictures depend on
    *("collectives", "cost", "mesh.py", "spans.py"),
    *(f"laboratory/{room}" for room in ("analysis", "publish", "record", "sim", "viz")),
)


class Published(NamedTuple):
    """The result of `publish`: the pages it wrote, and the lessons that failed.

    The index is the last page.
    """

    written: list[Path]
    failed: list[LessonFailed]


RunLesson = tuple[str, float]  # its body, and its seconds


class Course(NamedTuple):
    """The lessons and the homework of a site, and what its pages have in common."""

    folder: Path  # of the lessons
    lessons: dict[str, Lesson]  # by name, in order, without files that aren't notebooks
    homework: dict[int, Lesson]  # by number
    whole: bool  # whether it is all there is in the folder, with the pages around it
    opening: Opening
    syllabus: Syllabus | None
    repository: Repository | None


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

    If a lesson fails, the others still run. A lesson that has run for `out` doesn't run again as
    long as its notebook, the files beside it and this package are the same.

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
    given = _digest_of_site(folder, notebooks, only, syllabus, repository)
    if not again and _is_unchanged(out, INDEX, given):
        report("Nothing has changed since these pages were written.")
        return Published([*(out / f"{path.stem}.html" for path in notebooks), out / INDEX], [])
    course = _course(notebooks, only, syllabus, repository)
    names = None if course.whole else {*course.lessons}
    ran: dict[str, RunLesson] = {}
    failed: list[LessonFailed] = []
    for path in notebooks:
        began, name, page = time.perf_counter(), path.stem, out / f"{path.stem}.html"
        said = "has not changed"
        try:
            if (notebook := None if again else last_run(path, out)) is None:
                notebook = run_notebook(path, timeout=timeout)
                notebook.metadata.seconds = time.perf_counter() - began
                said = f"ran in {notebook.metadata.seconds:.1f} s"
                _write(out / kept_run(path), gzip.compress(nbformat.writes(notebook).encode()))
                _stamp(out, kept_run(path), _digest_of_lesson(path))
            body = lesson_body(notebook, folder, course.homework, names)
        except (LessonFailed, ValueError) as error:
            if not isinstance(error, LessonFailed):
                error = LessonFailed(name, str(error))
            failed.append(error)
            page.unlink(missing_ok=True)
            report(f"✗ {name} failed after {time.perf_counter() - began:.1f} s")
        else:  # written at once: after a run that is stopped, it doesn't run again
            ran[name] = body, notebook.metadata.seconds
            _write(page, _page_of_lesson(name, ran[name], [*course.lessons.values()], course))
            report(f"✓ {name} {said}")
    files = _files(course, ran, out, report)
    for address, text in files.items():
        _write(out / address, text)
    if (atlas := collectives_atlas_page.PAGE.address) in files:
        _stamp(out, atlas, _digest_of_package(*ATLAS))
    _stamp(out, INDEX, "" if failed else given)
    return Published([*(out / f"{name}.html" for name in ran), out / INDEX], failed)


def _course(
    notebooks: Sequence[Path], only: bool, syllabus: Syllabus | None, repository: Repository | None
) -> Course:
    folder, lessons = notebooks[0].parent, {}
    for path in notebooks if only else select_lessons(folder):
        if syllabus is None or path.stem in syllabus.lessons:
            with suppress(LessonFailed, ValueError):  # which are reported when it runs
                lessons[path.stem] = Lesson.read(path, path.stem)
    tasks = homework_notebooks(folder)
    wanted = {*tasks} if syllabus is None else syllabus.homework
    if only:
        wanted = {number for lesson in lessons.values() for number in lesson.homework}
    homework = {n: Lesson.read(p, p.parent.name) for n, p in tasks.items() if n in wanted}
    opening = read_opening(folder) if syllabus is None else NONE
    whole = not only and syllabus is None
    return Course(folder, lessons, homework, whole, opening, syllabus, repository)


def _page_of_lesson(name: str, ran: RunLesson, lessons: Sequence[Lesson], course: Course) -> str:
    return lesson_page(course.lessons[name], *ran, lessons, course.repository)


def _files(
    course: Course, ran: Mapping[str, RunLesson], out: Path, report: Callable[[str], None]
) -> dict[str, str]:
    """Return the files of the site by their path: all but the pages of earlier runs.

    The index, which is the last, lists all lessons of the course that have a page.
    """
    shown = [one for name, one in course.lessons.items() if (out / f"{name}.html").exists()]
    files = {f"{name}.html": _page_of_lesson(name, one, shown, course) for name, one in ran.items()}
    texts = {
        name: files.get(f"{name}.html") or (out / f"{name}.html").read_text(encoding="utf-8")
        for name in (one.name for one in shown)
    }
    for task in course.homework.values():
        body = homework_body(task.path)
        files[f"{task.name}.html"] = course_page(task.title, body, homework=True)
    terms, more = read_terms(course.folder), list[Page]()
    tools = TOOLS if ran and course.whole else ()
    for tool in tools:
        began, page = time.perf_counter(), tool.PAGE
        runs = _digest_of_package(*ATLAS)
        if tool is collectives_atlas_page and _is_unchanged(out, page.address, runs):
            report(f"✓ {page.title} has not changed")
            continue
        files |= tool.files()
        report(f"✓ {page.title} took {time.perf_counter() - began:.1f} s")
    if course.whole:
        known = [one.address for one in (*shown, *course.homework.values())]
        pages = [*known, *[GLOSSARY.address] * bool(terms)]
        more = course_pages(course.folder.parent, pages, course.repository)
        files |= {page.address: course_page(page.title, page.body) for page in more}
    if search := course.whole and bool(course.opening):  # other notebooks need none
        with needs_extra("The reference"):  # pdoc imports the whole package, which takes seconds
            from parallel101.laboratory.publish.reference import make_reference

        reference, names = make_reference()
        found = [*_search_entries(course, shown, terms, more), *names]
        files |= reference | {SEARCH: search_index(found, terms)}
        more = [REFERENCE, *more]
    if not course.whole:  # the terms that its pages link to
        written = "".join([*texts.values(), *files.values()])
        links = re.findall(rf'"{GLOSSARY.address}#([^"]+)"', written)
        terms = [term for term in terms if term.anchor in links]
    if terms:
        files[GLOSSARY.address] = course_page(GLOSSARY.title, "", terms=terms)
        more = [GLOSSARY, *more]
    files[INDEX] = index_page(
        shown,
        {name: cover_of(text) for name, text in texts.items()},
        course.homework,
        course.opening,
        course.syllabus,
        [tool.PAGE for tool in tools],
        more,
        course.repository,
        search,
    )
    return files


def _search_entries(
    course: Course, lessons: Sequence[Lesson], terms: Sequence[Term], pages: Sequence[Page]
) -> Iterator[SearchEntry]:
    """Yield what the search finds, except for the reference.

    These are the sections of notebooks and of the pages around them, terms, and tools.
    """
    for kind, notebooks in (("Lesson", lessons), ("Homework", course.homework.values())):
        for one in notebooks:
            yield from notebook_entries(kind, one, read_notebook(one.path))
    yield from glossary_entries(terms)
    for page in pages:
        yield from page_entries(page)
    for tool in (tool.PAGE for tool in TOOLS):
        yield SearchEntry("Tool", tool.title, tool.address, tool.text, also=tool.also)


# ---- what has changed ----


def _is_unchanged(out: Path, name: str, made_from: str) -> bool:
    """Return whether a site has this file, made from the same files and facts."""
    return (out / name).exists() and _stamps(out).get(name) == made_from


def _stamp(out: Path, name: str, made_from: str) -> None:
    """Note from what a file of the site was made."""
    _write(out / STAMPS, json.dumps(_stamps(out) | {name: made_from}))


def _stamps(out: Path) -> dict[str, str]:
    return json.loads((out / STAMPS).read_text()) if (out / STAMPS).exists() else {}


def kept_run(path: Path) -> str:
    """Return where a lesson that has run is kept, below the site's folder."""
    return f".ran/{path.stem}.ipynb.gz"


def last_run(path: Path, out: Path) -> NotebookNode | None:
    """Return a lesson with its outputs, if it has run for `out` and nothing has changed since."""
    if not _is_unchanged(out, kept_run(path), _digest_of_lesson(path)):
        return None
    return nbformat.reads(gzip.decompress((out / kept_run(path)).read_bytes()), as_version=4)


def _digest_of_lesson(path: Path) -> str:
    """Return the digest of what the outputs of a lesson depend on."""
    beside = [file for file in path.parent.iterdir() if file.is_file() and file.suffix != ".ipynb"]
    return _digest([path, *beside], _digest_of_package(), machine())


def _digest_of_site(folder: Path, *facts: object) -> str:
    """Return the digest of what the whole site is made from.

    That includes the homework and the pages around the lessons.
    """
    around = [folder, *(folder.parent / name for name in ("homework", "docs", CITATION))]
    return _digest(around, _digest_of_package(), facts, machine())


@cache
def _digest_of_package(*parts: str) -> str:
    """Return the digest of this package, or of these files and folders of it."""
    return _digest([ROOT / part for part in parts] or [ROOT])


def _digest(places: Iterable[Path], *facts: object) -> str:
    """Return a digest of files, by name and content, and of what else a page depends on.

    `places` are files, and folders with all files in them, but for those that a run or a learner
    leaves there, and hidden ones.
    """
    found, files = hashlib.sha256(repr(facts).encode()), set[Path]()
    for place in places:
        for path in (place, *place.rglob("*")):
            inside = path.relative_to(place).parts
            if path.is_file() and not any(part in LEFT or part[0] == "." for part in inside):
                files.add(path)
    for path in sorted(files):
        found.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def _write(page: Path, content: str | bytes) -> None:
    """Write the whole file or nothing: if the disk is full, the old one stays."""
    page.parent.mkdir(parents=True, exist_ok=True)
    partial = page.with_name(f"{page.name}.part")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, page)
    except OSError as error:
        # an error of write() itself does not name the file
        raise OSError(error.errno, error.strerror, str(page)) from error
    finally:
        partial.unlink(missing_ok=True)
