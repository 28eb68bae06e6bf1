"""The course's home page: an opening, the routes through the course, all lessons, and the rest.

    what it is, a picture that moves, routes      routes.json, or a teacher's syllabus
    lessons, homework                             the notebooks
    tools                                         tools/__init__.py
    errors explained, teach with it, cite         course_pages.py

lessons/routes.json holds what the lessons themselves don't say:

    {"opening": "why to start, as Markdown",
     "picture": "01_collectives",                     the lesson whose picture moves at the top
     "routes": [{"title": "A week", "text": "for whom it is",
                 "parts": [{"when": "Day 1", "lessons": ["00_ranks"], "homework": [1]}, …]}]}

A part with `"short": true` takes the short way through its lessons. A route with `"dates": true`
becomes a table with fields for dates, which the browser keeps (dates.js). Titles and minutes come
from the lessons. A route appears if all its lessons have a page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, Protocol

from parallel101.laboratory.publish.glossary import PAGE
from parallel101.laboratory.publish.page import (
    NONE,
    Lesson,
    numbered,
    offline_html,
    page_name,
    short_title,
    to_html,
)
from parallel101.laboratory.publish.repository import Repository
from parallel101.laboratory.publish.search_index import search_box
from parallel101.laboratory.publish.syllabus import Syllabus, syllabus_table

FILE = "routes.json"
DATES = files("parallel101.laboratory.publish").joinpath("dates.js").read_text(encoding="utf-8")


class CoursePart(NamedTuple):
    """One sitting of a route, such as a day or the lecture of a week."""

    lessons: tuple[str, ...]
    homework: tuple[int, ...] = ()
    when: str = ""
    short: bool = False  # the short way through these lessons


class CourseRoute(NamedTuple):
    """A way through the course."""

    title: str
    text: str  # for whom it is, in a sentence
    parts: tuple[CoursePart, ...]
    dates: bool = False  # a table with fields for dates


class Opening(NamedTuple):
    """What the index shows above the lessons."""

    text: str = ""  # Markdown
    picture: str = ""  # the lesson whose picture moves there
    routes: tuple[CourseRoute, ...] = ()


class Listed(Protocol):
    """A page that the index lists with a sentence: a tool, or one of course_pages.py."""

    @property
    def address(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...


class ListedPage(NamedTuple):
    """Such a page, without its body."""

    address: str
    title: str
    text: str


GLOSSARY = ListedPage(PAGE, "Glossary", "Every term of the lessons, in a sentence or two.")
REFERENCE = ListedPage(
    "reference/index.html", "Reference", "Every function and class, with examples and its source."
)
NO_OPENING = Opening()


def read_opening(folder: Path) -> Opening:
    """Return what the folder's routes.json says; an empty opening if there is no such file.

    Raises:
        ValueError: the file isn't JSON, or has an entry that routes don't have.
    """
    if not (folder / FILE).exists():
        return NO_OPENING
    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))
        routes = [
            CourseRoute(**{**route, "parts": tuple(_part(**part) for part in route["parts"])})
            for route in said["routes"]
        ]
        return Opening(said["opening"], said["picture"], tuple(routes))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / FILE} is not a list of routes ({error}); "
            "parallel101/laboratory/publish/index.py shows what it looks like"
        ) from error


def _part(lessons: Sequence[str], homework: Sequence[int] = (), **others) -> CoursePart:
    return CoursePart(tuple(lessons), tuple(homework), **others)


def minutes(part: CoursePart, lessons: Mapping[str, Lesson]) -> int:
    """Return how long the part's lessons take, as they say themselves."""
    taken = [lessons[name] for name in part.lessons]
    return sum(int((lesson.short if part.short else lesson.minutes) or "0") for lesson in taken)


def index_page(
    lessons: Sequence[Lesson],
    covers: Mapping[str, str] = NONE,
    homework: Mapping[int, Lesson] = NONE,
    glossary: bool = False,
    opening: Opening = NO_OPENING,
    moving: str = "",
    syllabus: Syllabus | None = None,
    tools: Sequence[Listed] = (),
    pages: Sequence[Listed] = (),
    repository: Repository | None = None,
    search: bool = False,
) -> str:
    """Return the page that opens the course and lists the lessons in order.

    Args:
        covers: by the lesson's name, its picture as an <img>.
        homework: by number, the homeworks that have a page.
        glossary: whether the glossary has a page.
        moving: the picture that moves at the top, as a <picture>.
        syllabus: a teacher's, which opens the page in place of `opening`.
        tools: the pages that play without Python.
        pages: those around the lessons.
        repository: the one with the code.
        search: whether the index of the search is beside the page.
    """
    rows = []
    for lesson in lessons:
        tasks = [homework[number] for number in lesson.homework if number in homework]
        facts = [f"{lesson.minutes} minutes"] if lesson.minutes else []
        facts += [_link(task, task.title) for task in tasks]
        picture = (
            f'<span class="cover">{covers[lesson.name]}</span>' if covers.get(lesson.name) else ""
        )
        rows.append(
            f'<li><a href="{page_name(lesson)}">{picture}<h2>{escape(numbered(lesson))}</h2></a>'
            f"<p>{escape(lesson.sentence)}</p><small>{' · '.join(facts)}</small></li>"
        )
    by_name = {lesson.name: lesson for lesson in lessons}
    title = "parallel101"
    if syllabus is not None:
        title, intro = syllabus.title, syllabus_table(syllabus, by_name, homework)
    elif opening.text:
        intro = f'<div class="opening">{to_html(opening.text)}</div>'
    else:
        intro = "<p>How neural networks are trained on many GPUs and machines.</p>"
    if moving:
        shown = by_name[opening.picture]
        intro += (
            f'<figure class="moving" aria-label="{escape(shown.title)}">{moving}<figcaption>'
            f"One run of lesson {_link(shown, short_title(shown))}, drawn from its messages."
            "</figcaption></figure>"
        )
    possible = [
        route
        for route in opening.routes
        if all(name in by_name for part in route.parts for name in part.lessons)
    ]
    routes = "".join(_route(route, by_name, homework) for route in possible)
    if routes:
        routes = f'<h2>Where to start</h2><div class="routes">{routes}</div>'
    if pages:  # the whole course
        routes += _run_yourself(repository)
    if routes or syllabus is not None:
        routes += "<h2>All lessons</h2>" if syllabus is None else "<h2>Lessons</h2>"
    listing = (
        f'<ol class="lessons" id="lessons">{"".join(rows)}</ol>'
        if lessons
        else "<p>No lesson has finished.</p>"
    )
    more = [*[GLOSSARY] * glossary, *pages]
    sections = {
        "Homework": _homework(homework) if syllabus is None else "",
        "Tools": _pages(tools),
        "More": _pages(more),
    }
    rest = "".join(
        f'<h2 id="{name.lower()}">{name}</h2><ul class="pages {name.lower()}">{entries}</ul>'
        for name, entries in sections.items()
        if entries
    )
    jumps = {"#lessons": "Lessons"} if lessons else {}
    jumps |= {f"#{name.lower()}": name for name in ("Homework", "Tools") if sections[name]}
    jumps |= {page.address: page.title for page in more}
    links = "".join(f'<a href="{to}">{escape(name)}</a>' for to, name in jumps.items())
    script = f"<script>{DATES}</script>" if any(route.dates for route in possible) else ""
    box = search_box() if search else ""
    return offline_html(
        title,
        f'<nav aria-label="Site">{links}</nav>'
        f"<main><h1>{escape(title)}</h1>{box}{intro}{routes}{listing}{rest}</main>"
        f"{_footer(repository)}{script}",
        scripts_beside=search,
    )


def _run_yourself(repository: Repository | None) -> str:
    """How to run the lessons, with the repository's address if it is known."""
    lines = ["make lab        # the lessons in JupyterLab", "make homework   # the homework"]
    colab = ""
    if repository is not None:
        folder = repository.name.partition("/")[2]
        lines.insert(0, f"git clone {repository.address} && cd {folder}")
        colab = " Or choose <i>Open in Colab</i> on a lesson's page, and install nothing."
    return (
        "<h2>Run the programs yourself</h2><p>You need Python 3.10 or newer, and make, which "
        f"installs the rest in a clone of the repository.{colab}</p>"
        f'<pre class="commands">{escape(chr(10).join(lines))}</pre>'
    )


def _homework(homework: Mapping[int, Lesson]) -> str:
    """The homework as entries of a list."""
    return "".join(
        f"<li>{_link(task, task.title)}<p>{escape(task.sentence)}</p></li>"
        for _, task in sorted(homework.items())
    )


def _pages(pages: Sequence[Listed]) -> str:
    """Pages as entries of a list."""
    return "".join(
        f'<li><a href="{page.address}">{escape(page.title)}</a><p>{escape(page.text)}</p></li>'
        for page in pages
    )


def _footer(repository: Repository | None) -> str:
    if repository is None:
        return ""
    return f'<footer><a href="{repository.address}">The code</a>, under the MIT license</footer>'


def _route(
    route: CourseRoute, lessons: Mapping[str, Lesson], homework: Mapping[int, Lesson]
) -> str:
    total = sum(minutes(part, lessons) for part in route.parts)
    kind = "route dated" if route.dates else "route"
    body = _table(route, lessons, homework) if route.dates else _list(route, lessons, homework)
    return (
        f'<section class="{kind}"><h3>{escape(route.title)} <small>{_time(total)}</small></h3>'
        f"<p>{escape(route.text)}</p>{body}</section>"
    )


def _list(route: CourseRoute, lessons: Mapping[str, Lesson], homework: Mapping[int, Lesson]) -> str:
    rows = []
    for part in route.parts:
        when = f"<b>{escape(part.when)}</b> " if part.when else ""
        if part.short:  # each lesson has a way of its own
            rows += [
                f"<li>{_link(lessons[name], short_title(lessons[name]))}, the short way: "
                f"{_time(int(lessons[name].short or 0))}</li>"
                for name in part.lessons
            ]
        else:
            named = [_link(lessons[name], short_title(lessons[name])) for name in part.lessons]
            facts = [_time(minutes(part, lessons)), *_tasks(part, homework)]
            rows.append(f"<li>{when}{', '.join(named)}: {' · '.join(facts)}</li>")
    return f"<ul>{''.join(rows)}</ul>"


def _table(
    route: CourseRoute, lessons: Mapping[str, Lesson], homework: Mapping[int, Lesson]
) -> str:
    rows = []
    for part in route.parts:
        named = [_link(lessons[name], short_title(lessons[name])) for name in part.lessons]
        due = _date(f"Week {part.when}, homework due")
        tasks = [f'<div class="due">{task} {due}</div>' for task in _tasks(part, homework)]
        rows.append(
            f"<tr><td>{escape(part.when)}</td>"
            f"<td>{'<br>'.join(named)}<br><small>{_time(minutes(part, lessons))}</small></td>"
            f"<td>{_date(f'Week {part.when}, lecture')}</td><td>{''.join(tasks)}</td></tr>"
        )
    heads = "".join(f"<th>{head}</th>" for head in ("Week", "Lecture", "Date", "Homework, due"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _date(label: str) -> str:
    return f'<input class="date" type="text" maxlength="24" aria-label="{escape(label)}">'


def _tasks(part: CoursePart, homework: Mapping[int, Lesson]) -> Iterator[str]:
    for number in part.homework:
        if number in homework:
            yield _link(homework[number], f"Homework {number}")


def _time(total: int) -> str:
    return f"{total}\u00a0minutes" if total <= 180 else f"{total / 60:.0f}\u00a0hours"


def _link(lesson: Lesson, text: str) -> str:
    return f'<a href="{page_name(lesson)}">{escape(text)}</a>'
