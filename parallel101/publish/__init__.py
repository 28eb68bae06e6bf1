"""Runs the lessons and writes them as web pages that work offline.

    lessons/*.ipynb ── execute.py: run in a fresh kernel ──▶ outputs
                    ── page.py ──▶ site/*.html
    routes.json     ── index.py ─▶ site/index.html

`parallel101 lessons` and `make lessons` call `publish`.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from parallel101.publish.execute import LessonFailed, read_notebook, run_notebook
from parallel101.publish.glossary import read_terms
from parallel101.publish.index import Opening, index_page, read_opening
from parallel101.publish.page import (
    Lesson,
    cover_of,
    glossary_page,
    homework_page,
    lesson_body,
    lesson_page,
    moving_picture_of,
)
from parallel101.publish.specification import with_specifications

__all__ = [
    "LessonFailed",
    "Published",
    "find_lessons",
    "homework_body",
    "make_output_folder",
    "publish",
    "select_lessons",
]


class Published(NamedTuple):
    """What `publish` did: the pages it wrote, and the lessons that failed.

    The index is the last page.
    """

    written: list[Path]
    failed: list[LessonFailed]


def find_lessons(folder: Path | str | None = None) -> Path:
    """Return the folder with the lessons.

    That is `folder` if given. Otherwise it is the nearest lessons/ in the working directory or
    above it, or the one of an editable install.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if folder is not None:
        if Path(folder).is_dir():
            return Path(folder).resolve()
        raise FileNotFoundError(
            f"{folder} is not a folder; give a folder with notebooks, e.g. --lessons lessons"
        )
    here = Path.cwd()
    for place in (here, *here.parents, Path(__file__).parents[2]):
        if (place / "lessons").is_dir() and (place / "parallel101").is_dir():
            return place / "lessons"
    raise FileNotFoundError(
        f"there is no lessons/ in {here} or above it; run this in a clone of parallel101, or give "
        "--lessons FOLDER"
    )


def select_lessons(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Return the notebooks of `folder` in order: all, or those in `names`.

    A name is 01, 01_collectives or 01_collectives.ipynb.

    Raises:
        ValueError: the folder has no notebooks, or a name matches no notebook or more than one.
    """
    notebooks = sorted(folder.glob("*.ipynb"))
    if not notebooks:
        raise ValueError(f"there is no notebook (*.ipynb) in {folder}")
    chosen = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        matches = [n for n in notebooks if n.stem == stem] or [
            n for n in notebooks if n.stem.startswith(stem)
        ]
        if len(matches) != 1:
            problem = "matches more than one lesson" if matches else "is not a lesson"
            raise ValueError(
                f"{name!r} {problem}; the lessons are: {', '.join(n.stem for n in notebooks)}"
            )
        chosen += matches
    return sorted(set(chosen)) or notebooks


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
        raise ValueError(
            f"cannot write pages to {out} ({error.strerror}); give a writable folder, e.g. --out "
            "site"
        ) from error


def publish(
    notebooks: Sequence[Path],
    out: Path,
    *,
    only: bool = False,
    timeout: float = 600.0,
    report: Callable[[str], None] = print,
) -> Published:
    """Run each notebook from top to bottom and write it as a page.

    If a lesson fails, the others still run.

    Args:
        notebooks: the lessons to run, all from one folder.
        out: the folder for the pages and index.html; it is created if it is missing. The old page
            of a lesson that fails is deleted.
        only: whether these lessons are the whole course. If not, the index also lists the folder's
            lessons that have a page in `out`.
        timeout: time limit for each cell, in seconds.
        report: called with one line of progress per lesson. Progress bars go to standard error if
            that is a terminal.

    Raises:
        ValueError: `out` cannot be created or is not writable.
        OSError: a page could not be written, for example because the disk is full. `.filename` is
            that page; its old content is kept.
    """
    make_output_folder(out)
    folder = notebooks[0].parent
    course = list(notebooks) if only else select_lessons(folder)
    homework = _write_homework(folder, out)
    terms, opening = read_terms(folder), read_opening(folder)
    if terms:
        _write(out / "glossary.html", glossary_page(terms))
    ran: dict[Path, tuple[str, float]] = {}
    failed = []
    try:
        for path in notebooks:
            began = time.perf_counter()
            try:
                notebook = run_notebook(path, timeout=timeout)
                seconds = time.perf_counter() - began
                ran[path] = lesson_body(notebook, path.parent, homework), seconds
            except (LessonFailed, ValueError) as error:
                failed.append(
                    error
                    if isinstance(error, LessonFailed)
                    else LessonFailed(path.stem, str(error))
                )
                (out / f"{path.stem}.html").unlink(missing_ok=True)
                report(f"✗ {path.stem} failed after {time.perf_counter() - began:.1f} s")
            else:
                _write_pages(course, out, {path: ran[path]}, homework, bool(terms), opening)
                report(f"✓ {path.stem} ran in {seconds:.1f} s")
    finally:  # also after Ctrl-C: links the finished pages to each other
        written = _write_pages(course, out, ran, homework, bool(terms), opening)
    return Published(written, failed)


def _write_pages(
    course: Sequence[Path],
    out: Path,
    ran: Mapping[Path, tuple[str, float]],
    homework: Mapping[int, Lesson],
    glossary: bool,
    opening: Opening,
) -> list[Path]:
    """Write the pages of the lessons that ran, and the index; return the paths.

    The index lists all lessons of the course that have a page.
    """
    lessons = {}
    for path in course:
        if path in ran or (out / f"{path.stem}.html").exists():
            # a notebook that did not run now and that has become unreadable
            with suppress(LessonFailed):
                lessons[path] = Lesson.of(path.stem, read_notebook(path))
    pages = {
        out / f"{path.stem}.html": lesson_page(lessons[path], *ran[path], [*lessons.values()])
        for path in ran
    }
    for page, html in pages.items():
        _write(page, html)
    shown = {path.stem: (out / f"{path.stem}.html").read_text(encoding="utf-8") for path in lessons}
    covers = {name: cover_of(page) for name, page in shown.items()}
    moving = moving_picture_of(shown.get(opening.picture, ""))
    index = index_page([*lessons.values()], covers, homework, glossary, opening, moving)
    _write(out / "index.html", index)
    return [*pages, out / "index.html"]


def _write_homework(folder: Path, out: Path) -> dict[int, Lesson]:
    """Write a page for each homework in the folder homework/ beside the lessons.

    Returns them by number.
    """
    written = {}
    for path in sorted((folder.parent / "homework").glob("hw*_*/hw*.ipynb")):
        notebook, name = read_notebook(path), path.parent.name
        if number := re.match(r"hw(\d+)_", name):
            homework = written[int(number[1])] = Lesson.of(name, notebook)
            _write(out / f"{name}.html", homework_page(homework, homework_body(path)))
    return written


def homework_body(path: Path) -> str:
    """Return the body of a homework's page: the notebook at `path`, with what help() shows."""
    return lesson_body(with_specifications(read_notebook(path), path.parent), path.parent)


def _write(page: Path, html: str) -> None:
    """Write the whole page or nothing: if the disk is full, the old page stays."""
    partial = page.with_suffix(".html.part")
    try:
        partial.write_text(html, encoding="utf-8")
        os.replace(partial, page)
    except OSError as error:
        # an error of write() itself does not name the file
        raise OSError(error.errno, error.strerror, str(page)) from error
    finally:
        partial.unlink(missing_ok=True)
