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
becomes a folded table with fields for dates, which the browser keeps (dates.js). Titles and
minutes come from the lessons. A route appears if all its lessons have a page. A folder of other
lessons may have a routes.json of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.laboratory.publish.course_pages import CoursePage
from parallel101.laboratory.publish.find import Repository
from parallel101.laboratory.publish.glossary import PAGE
from parallel101.laboratory.publish.page import (
    NONE,
    Cover,
    Lesson,
    numbered,
    offline_html,
    page_name,
    short_title,
)
from parallel101.laboratory.publish.syllabus import Syllabus
from parallel101.laboratory.publish.templates import render
from parallel101.laboratory.publish.tools import ToolPage

FILE = "routes.json"


# the entries of a route and of a part, and what they are where they are left out; None: they can't
Route = dict[str, Any]
ROUTE: Route = {"title": None, "text": None, "parts": None, "dates": False}
PART: Route = {"lessons": None, "homework": [], "when": "", "short": False}


class Opening(NamedTuple):
    """The opening that the index shows above the lessons."""

    text: str = ""  # Markdown
    picture: str = ""  # the lesson whose picture moves there
    routes: tuple[Route, ...] = ()  # as routes.json has them, with all of their entries


class ListedPage(NamedTuple):
    """A page that the index lists, without its body."""

    address: str
    title: str
    text: str


GLOSSARY = ListedPage(PAGE, "Glossary", "Every term of the lessons, in a sentence or two.")
REFERENCE = ListedPage(
    "reference/index.html", "Reference", "Every function and class, with examples and its source."
)
NO_OPENING = Opening()


def read_opening(folder: Path) -> Opening:
    """Return what the folder's own routes.json says, or that of the course.

    If the folder has neither the file nor the course's lessons, the opening is empty.

    Raises:
        ValueError: the file isn't JSON, or has an entry that routes don't have.
    """
    own = folder / FILE
    file = own if own.exists() else Path(__file__).with_name(FILE)
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        routes = [
            _whole(ROUTE, route, parts=[_whole(PART, part) for part in route["parts"]])
            for route in said["routes"]
        ]
        opening = Opening(said["opening"], said["picture"], tuple(routes))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is not a list of routes ({error}); "
            "parallel101/laboratory/publish/index.py shows what it looks like"
        ) from error
    there = (folder / f"{opening.picture}.ipynb").exists()
    return opening if own.exists() or there else NO_OPENING


def _whole(entries: Route, given: Route, **others: Any) -> Route:
    """Return these entries with those that are left out.

    Raises KeyError for an entry that is unknown or missing.
    """
    whole = {**entries, **given, **others}
    if wrong := [name for name in whole if name not in entries or whole[name] is None]:
        raise KeyError(wrong[0])
    return whole


def minutes(part: Route, lessons: Mapping[str, Lesson]) -> int:
    """Return how long the lessons of a route's part take, as they say themselves."""
    taken = [lessons[name] for name in part["lessons"] if name in lessons]
    return sum(int((lesson.short if part["short"] else lesson.minutes) or "0") for lesson in taken)


def index_page(
    lessons: Sequence[Lesson],
    covers: Mapping[str, Cover | None] = NONE,
    homework: Mapping[int, Lesson] = NONE,
    glossary: bool = False,
    opening: Opening = NO_OPENING,
    moving: Cover | None = None,
    syllabus: Syllabus | None = None,
    tools: Sequence[ToolPage] = (),
    pages: Sequence[ListedPage | CoursePage] = (),
    repository: Repository | None = None,
    search: bool = False,
) -> str:
    """Return the page that opens the course and lists the lessons in order.

    Args:
        covers: by the lesson's name, its picture.
        homework: by number, the homeworks that have a page.
        glossary: whether the glossary has a page.
        moving: the picture that moves at the top.
        syllabus: a teacher's, which opens the page in place of `opening`.
        tools: the pages that play without Python.
        pages: those around the lessons.
        repository: the one with the code.
        search: whether the index of the search is beside the page.
    """
    by_name = {lesson.name: lesson for lesson in lessons}
    possible = [
        route
        for route in opening.routes
        if all(name in by_name for part in route["parts"] for name in part["lessons"])
    ]
    invitations = [(tool.address, tool.invitation) for tool in tools if tool.invitation]
    if invitations and lessons:
        first = lessons[0]
        invitations.insert(1, (page_name(first), f"Begin with lesson {short_title(first)}"))
    title = syllabus.title if syllabus is not None else "parallel101"
    body = render(
        "index",
        title=title,
        lessons=by_name,
        covers=covers,
        homework=homework,
        tasks_listed=[
            ListedPage(page_name(task), task.title, task.sentence)
            for _, task in sorted(homework.items())
            if syllabus is None
        ],
        opening=opening,
        moving=moving,
        invitations=invitations,
        routes=possible,
        syllabus=syllabus,
        tools=tools,
        pages=pages,
        more=[*[GLOSSARY] * glossary, *pages],
        repository=repository,
        search=search,
        page_name=page_name,
        short_title=short_title,
        numbered=numbered,
        minutes=minutes,
        total=lambda route: sum(minutes(part, by_name) for part in route["parts"]),
        week_minutes=lambda week: minutes({**PART, "lessons": week.lessons}, by_name),
        time=_time,
    )
    return offline_html(title, body, scripts_beside=search)


def _time(total: int) -> str:
    return f"{total}\u00a0minutes" if total <= 180 else f"{total / 60:.0f}\u00a0hours"
