"""The course's home page: an opening, the routes through the course, all lessons, and the rest.

    what it is, a picture that moves, routes      routes.json, or a teacher's syllabus
    tools, and buttons below the picture          tools/__init__.py
    lessons, homework                             the notebooks
    errors explained, teach with it, cite         course_pages.py

routes.json holds what the lessons themselves don't say:

    {"opening": "why to start, as Markdown",
     "picture": "01_collectives",                     the lesson whose picture moves at the top
     "routes": [{"title": "A week", "text": "for whom it is",
                 "parts": [{"when": "Day 1", "lessons": ["00_ranks"], "homework": [1]}, …]}]}

A part with `"short": true` takes the short way through its lessons. A route with `"dates": true`
becomes a folded table with fields for dates, which the browser keeps (kept_fields.js). Titles and
minutes come from the lessons. A route appears if all its lessons have a page. A folder of other
lessons has no routes; a teacher writes a syllabus.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel101.laboratory.publish.find import Repository
from parallel101.laboratory.publish.glossary import PAGE
from parallel101.laboratory.publish.offline_page import Page, file_text, offline_html
from parallel101.laboratory.publish.page import NONE, Cover, Lesson
from parallel101.laboratory.publish.syllabus import Syllabus
from parallel101.laboratory.publish.templates import render

GLOSSARY = Page(PAGE, "Glossary", "Every term of the lessons, in a sentence or two.")
REFERENCE = Page(
    "reference/index.html", "Reference", "Every function and class, with examples and its source."
)
Opening = Mapping[str, Any]  # what routes.json says, or nothing
PART = {"when": "", "short": False, "homework": ()}  # of a route, where it doesn't say


def read_opening(folder: Path) -> Opening:
    """Return what routes.json says; nothing for a folder without the course's lessons."""
    said: Opening = json.loads(file_text("routes.json"))
    for route in said["routes"]:
        route.setdefault("dates", False)
        route["parts"] = [PART | part for part in route["parts"]]
    return said if (folder / f"{said['picture']}.ipynb").exists() else NONE


def index_page(
    lessons: Sequence[Lesson],
    covers: Mapping[str, Cover | None] = NONE,
    homework: Mapping[int, Lesson] = NONE,
    opening: Opening = NONE,
    syllabus: Syllabus | None = None,
    tools: Sequence[Page] = (),
    more: Sequence[Page] = (),
    repository: Repository | None = None,
    search: bool = False,
) -> str:
    """Return the page that opens the course and lists the lessons in order.

    Args:
        covers: by the lesson's name, its picture.
        homework: by number, the homeworks that have a page.
        syllabus: a teacher's, which opens the page in place of `opening`.
        tools: the pages that play without Python.
        more: the other pages.
        repository: the one with the code.
        search: whether the index of the search is beside the page.
    """
    by_name = {lesson.name: lesson for lesson in lessons}

    def minutes(names: Sequence[str], short: bool = False) -> int:
        taken = [by_name[name] for name in names if name in by_name]
        return sum(lesson.short if short else lesson.minutes for lesson in taken)

    invitations = [(tool.address, tool.invitation) for tool in tools if tool.invitation]
    if invitations and lessons:
        begin = f"Begin with lesson {lessons[0].short_title}"
        invitations.insert(1, (lessons[0].address, begin))
    title = "parallel101" if syllabus is None else syllabus.title
    body = render(
        "index",
        title=title,
        lessons=by_name,
        covers=covers,
        homework=homework,
        opening=opening,
        invitations=invitations,
        routes=[
            route
            for route in opening.get("routes", ())
            if all(name in by_name for part in route["parts"] for name in part["lessons"])
        ],
        syllabus=syllabus,
        tools=tools,
        more=more,
        repository=repository,
        search=search,
        minutes=minutes,
        total=lambda route: sum(minutes(p["lessons"], p["short"]) for p in route["parts"]),
        time=_time,
    )
    return offline_html(title, body, scripts_beside=search)


def _time(total: int) -> str:
    return f"{total}\u00a0minutes" if total <= 180 else f"{total / 60:.0f}\u00a0hours"
