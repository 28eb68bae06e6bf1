"""Runs the lessons and writes them as web pages that work offline.

    lessons/*.ipynb ── execute.py: run in a fresh kernel ──▶ outputs
                    ── page.py ──▶ site/*.html
    tools/          ── pages of JavaScript, fed with what Python computes ──▶ site/*.html
    docs/teaching.md, errors.md, CITATION.cff ── course_pages.py ──▶ site/*.html
    docstrings      ── reference.py ──▶ site/reference/
    all of them     ── search_index.py ──▶ site/search_index.js
    routes.json     ── index.py ─▶ site/index.html
    course.toml     ── syllabus.py: a teacher's course, in place of routes.json

`parallel101 lessons` and `make lessons` call `publish`, which is in write_site.py. The page of a
run (run_page.py) and the frame of all pages (offline_page.py) need no packages of notebooks, so
nothing is imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from parallel101.extras import needs_extra

if TYPE_CHECKING:
    from parallel101.laboratory.publish.execute import LessonFailed
    from parallel101.laboratory.publish.find import find_lessons, select_lessons
    from parallel101.laboratory.publish.page import homework_body
    from parallel101.laboratory.publish.syllabus import read_syllabus
    from parallel101.laboratory.publish.write_site import (
        Published,
        make_output_folder,
        publish,
    )

_MODULES = {
    "LessonFailed": "execute",
    "Published": "write_site",
    "find_lessons": "find",
    "homework_body": "page",
    "make_output_folder": "write_site",
    "publish": "write_site",
    "read_syllabus": "syllabus",
    "select_lessons": "find",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, or say which extra it needs."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_extra(f"parallel101.laboratory.publish.{name}"):
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
