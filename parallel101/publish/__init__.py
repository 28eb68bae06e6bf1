"""From notebooks to pages: runs every lesson for real and writes HTML that plays offline.

    lessons/*.ipynb ──run in a fresh kernel──▶ outputs ──page──▶ site/*.html, site/index.html

`publish` is what `parallel101 lessons` and `make lessons` call. Nothing in a page comes from the network.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from parallel101.publish.execute import LessonFailed, read_notebook, run_notebook
from parallel101.publish.page import Lesson, index_page, lesson_body, lesson_page

__all__ = ["LessonFailed", "Published", "find_lessons", "make_folder", "publish", "select"]


class Published(NamedTuple):
    """What `publish` did: the pages it wrote, the index among them, and the lessons that failed."""

    written: list[Path]
    failed: list[LessonFailed]


def find_lessons(folder: Path | str | None = None) -> Path:
    """The folder with the lessons: `folder`, or the nearest `lessons/` here or above, or the one beside an editable install.

    Raises:
        FileNotFoundError: there is none; the message says where it was looked for.
    """
    if folder is not None:
        if Path(folder).is_dir():
            return Path(folder).resolve()
        raise FileNotFoundError(f"{folder} is not a folder; give one that holds notebooks, e.g. --lessons lessons")
    here = Path.cwd()
    for place in (here, *here.parents, Path(__file__).parents[2]):
        if (place / "lessons").is_dir() and (place / "parallel101").is_dir():
            return place / "lessons"
    raise FileNotFoundError(f"no lessons/ in {here} or above it; run this in a clone of parallel101, or give --lessons FOLDER")


def select(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The notebooks in `folder` in their order: all of them, or those named (`01`, `01_collectives` and `01_collectives.ipynb` all do).

    Raises:
        ValueError: a name that no notebook, or more than one, begins with; or a folder without notebooks.
    """
    notebooks = sorted(folder.glob("*.ipynb"))
    if not notebooks:
        raise ValueError(f"there is no notebook (*.ipynb) in {folder}")
    chosen = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        matches = [n for n in notebooks if n.stem == stem] or [n for n in notebooks if n.stem.startswith(stem)]
        if len(matches) != 1:
            what = "is the name of more than one lesson" if matches else "is not a lesson"
            raise ValueError(f"{name!r} {what}; there are: {', '.join(n.stem for n in notebooks)}")
        chosen += matches
    return sorted(set(chosen)) or notebooks


def make_folder(out: Path) -> None:
    """Make `out` where it is missing, and see that it can be written to, before any lesson runs.

    Raises:
        ValueError: it cannot; the message says why.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"pages can't be written to {out} ({error.strerror}); give a folder, e.g. --out site") from error


def publish(notebooks: Sequence[Path], out: Path, *, timeout: float = 600.0, say: Callable[[str], None] = print) -> Published:
    """Run each notebook from top to bottom and write it as a page; a lesson that fails is told and does not stop the others.

    Args:
        notebooks: what to run; all in one folder. The index and the links between pages also know that folder's lessons which ran before.
        out: the folder for the pages and `index.html`; made when missing. A failed lesson's old page is removed.
        timeout: seconds for one cell.
        say: where a line of progress goes; bars go to standard error when that is a terminal.

    Raises:
        ValueError: `out` is no folder that can be written to.
        OSError: a page could not be written (a full disk, say): its `.filename`. What was there before is there still.
    """
    make_folder(out)
    ran: dict[Path, tuple[str, float]] = {}
    failed = []
    try:
        for path in notebooks:
            began = time.perf_counter()
            try:
                notebook = run_notebook(path, timeout=timeout)
                seconds = time.perf_counter() - began
                ran[path] = lesson_body(notebook, path.parent), seconds
            except (LessonFailed, ValueError) as error:
                failed.append(error if isinstance(error, LessonFailed) else LessonFailed(path.stem, str(error)))
                (out / f"{path.stem}.html").unlink(missing_ok=True)
                say(f"✗ {path.stem} failed after {time.perf_counter() - began:.1f} s")
            else:
                _write_pages(path.parent, out, {path: ran[path]})
                say(f"✓ {path.stem} ran in {seconds:.1f} s")
    finally:  #  when it is stopped too, the pages that are ready lead to each other
        written = _write_pages(notebooks[0].parent, out, ran)
    return Published(written, failed)


def _write_pages(folder: Path, out: Path, ran: Mapping[Path, tuple[str, float]]) -> list[Path]:
    """Write the pages of lessons that ran, and the index of all that have a page by now. Returns the paths."""
    lessons = {}
    for path in select(folder):
        if path in ran or (out / f"{path.stem}.html").exists():
            with suppress(LessonFailed):  #  a notebook that is broken by now, and was not to be run
                lessons[path] = Lesson.of(path.stem, read_notebook(path))
    pages = {out / f"{path.stem}.html": lesson_page(lessons[path], *ran[path], [*lessons.values()]) for path in ran}
    pages[out / "index.html"] = index_page([*lessons.values()])
    for page, html in pages.items():
        _write(page, html)
    return [*pages]


def _write(page: Path, html: str) -> None:
    """Write the whole page or nothing: on a full disk the old one stays."""
    begun = page.with_suffix(".html.part")
    try:
        begun.write_text(html, encoding="utf-8")
        os.replace(begun, page)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(page)) from error  #  writing to an open file, the system doesn't say which
    finally:
        begun.unlink(missing_ok=True)
