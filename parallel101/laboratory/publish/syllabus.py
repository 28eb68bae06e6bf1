"""A teacher's syllabus: it chooses the lessons of a course, and is the index of its pages.

parallel101 lessons --syllabus course.toml

    title = "Training on many GPUs, spring 2027"
    text = "Tuesdays, 10:15, room H2."              # as Markdown

    [[weeks]]
    date = 2027-03-02                               # or a text, such as "Week 1"
    lessons = ["00"]
    goals = ["Start processes that send each other tensors", "Say why a program hangs"]

    [[weeks]]
    date = 2027-03-09
    lessons = ["01"]
    homework = [1]
    due = 2027-03-15

    [[weeks]]
    date = 2027-03-16
    title = "No lecture: spring break"

Only `title` and `weeks` are needed. Titles and minutes of lessons come from the lessons.
"""

from __future__ import annotations

import sys
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.laboratory.publish.find import homework_notebooks, select_lessons

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

When = date | str | None
KINDS = {  # of an entry's values, and what is expected
    "lessons": (str, 'a list, such as ["00"]'),
    "goals": (str, 'a list, such as ["…"]'),
    "homework": (int, "a list, such as [1]"),
}


class Week(NamedTuple):
    """A week of the course."""

    date: When = None
    title: str = ""  # Markdown
    lessons: tuple[str, ...] = ()  # the names of the notebooks, without .ipynb
    goals: tuple[str, ...] = ()  # Markdown
    homework: tuple[int, ...] = ()
    due: When = None


class Syllabus(NamedTuple):
    """A teacher's description of a course."""

    title: str
    text: str  # Markdown
    weeks: tuple[Week, ...]

    @property
    def lessons(self) -> set[str]:
        return {name for week in self.weeks for name in week.lessons}

    @property
    def homework(self) -> set[int]:
        return {number for week in self.weeks for number in week.homework}


def read_syllabus(path: Path, folder: Path) -> Syllabus:
    """Return the syllabus in a file.

    Args:
        path: the teacher's file.
        folder: that of the lessons.

    Raises:
        ValueError: the file isn't TOML, or names what isn't there. The message says in which week.
    """
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    weeks = said.get("weeks")
    if not isinstance(weeks, list) or not weeks or not isinstance(said.get("title"), str):
        raise ValueError(
            f"{path}: expected a title, and weeks, each under [[weeks]]; "
            "parallel101/laboratory/publish/syllabus.py shows an example"
        )
    read, latest = [], None
    for number, entries in enumerate(weeks, 1):
        try:
            week = _week(entries, folder)
            if isinstance(week.date, date):
                if latest is not None and week.date < latest:
                    raise ValueError(f"its date is {week.date}; expected one after {latest}")
                latest = week.date
        except ValueError as error:
            raise ValueError(f"{path}, week {number}: {error}") from error
        read.append(week)
    return Syllabus(said["title"], str(said.get("text", "")), tuple(read))


def _week(entries: Any, folder: Path) -> Week:
    """Return one week of the file, with its lessons by their whole names."""
    try:
        week = Week(**entries)
    except TypeError as error:
        raise ValueError(f"{error}; the entries of a week are {', '.join(Week._fields)}") from error
    for name, (kind, expected) in KINDS.items():
        values = getattr(week, name)
        several = isinstance(values, list | tuple)
        if not several or not all(isinstance(value, kind) for value in values):
            raise ValueError(f"{name} is {values!r}; expected {expected}")
    days: dict[str, Any] = {"date": week.date, "due": week.due}
    for name, day in days.items():
        if not isinstance(day, date | str | None):
            raise ValueError(f"{name} is {day!r}; expected a date or a text")
        days[name] = day.date() if isinstance(day, datetime) else day
    week = week._replace(**days)
    there = homework_notebooks(folder)
    for number in week.homework:
        if number not in there:
            known = ", ".join(map(str, there)) or "none"
            raise ValueError(f"there is no homework {number}; there are {known}")
    if isinstance(week.date, date) and isinstance(week.due, date) and week.due < week.date:
        raise ValueError(f"its homework is due {week.due}, before the lecture of {week.date}")
    lessons = [select_lessons(folder, [name])[0].stem for name in week.lessons]
    return week._replace(lessons=tuple(lessons), title=str(week.title))
