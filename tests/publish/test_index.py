"""The index: the routes of the course can be taken, and it shows what there is."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from bs4 import BeautifulSoup

from parallel101.laboratory.publish.find import homework_notebooks
from parallel101.laboratory.publish.index import PART, index_page, read_opening
from parallel101.laboratory.publish.page import Cover, Lesson
from tests.lessons.lesson import LESSONS, prose

OPENING = read_opening(LESSONS)
ROUTES = {route["title"]: route for route in OPENING["routes"]}


COURSE = {path.stem: Lesson.read(path, path.stem) for path in sorted(LESSONS.glob("*.ipynb"))}
HOMEWORK = {n: Lesson.read(p, p.parent.name) for n, p in homework_notebooks(LESSONS).items()}


def minutes(part: dict) -> int:
    lessons = [COURSE[name] for name in part["lessons"]]
    return sum(lesson.short if part["short"] else lesson.minutes for lesson in lessons)


@pytest.mark.parametrize("title", ROUTES)
def test_the_lessons_and_homework_of_a_route_exist_and_come_in_order(title):
    parts, taken = ROUTES[title]["parts"], list[str]()
    named = [name for part in parts for name in part["lessons"]]
    assert named == sorted({*named}) and {*named} <= {*COURSE} and all(map(minutes, parts))
    for part in parts:
        taken += part["lessons"]
        for number in part["homework"]:
            # a later lesson may ask for one more exercise of it
            first = next(name for name, lesson in COURSE.items() if number in lesson.homework)
            assert number in HOMEWORK and first in taken, f"{number} comes before {first}"


def test_a_lecture_takes_75_minutes_and_a_term_has_everything():
    lecture, _, term = (route["parts"] for route in ROUTES.values())
    assert sum(map(minutes, lecture)) == 75 and max(map(minutes, term)) <= 75
    assert [name for part in term for name in part["lessons"]] == [*COURSE]
    assert [number for part in term for number in part["homework"]] == [*HOMEWORK]


def test_the_short_way_of_a_lesson_names_its_sections():
    names = [name for name, lesson in COURSE.items() if lesson.short]
    assert names
    for name in names:
        text = f"\n{prose(name)}"
        (short,) = re.findall(r"short way takes \d+ minutes: (.*?[.])\s", text, re.DOTALL)
        sections = re.findall(r"\*([^*]+)\*", short)
        assert sections and all(f"\n## {section}" in text for section in sections), name


def shown(lessons: Sequence[Lesson], opening=OPENING, **options) -> BeautifulSoup:
    html = index_page(lessons, homework=HOMEWORK, opening=opening, **options)
    return BeautifulSoup(html, "html.parser")


def test_the_index_opens_with_a_moving_picture_and_three_routes():
    cover = Cover("data:still", "data:moving", "a ring")
    page = shown([*COURSE.values()], covers={"01_collectives": cover})
    assert page.find("h1").find_next("a")["href"].startswith("https://arxiv.org")
    image = page.select_one("figure.moving img")
    assert (image["alt"], image["src"]) == ("a ring", "data:moving")
    assert page.select_one("figure.moving source")["srcset"] == "data:still"
    assert page.select_one("figcaption a").get_text() == "01 Collectives"
    assert [image["src"] for image in page.select(".lessons img")] == ["data:still"]
    titles = [heading.get_text().replace("\u00a0", " ") for heading in page.select(".route h3")]
    assert titles == ["One lecture 75 minutes", "A week 9 hours", "A term 15 hours"]
    lecture, week, term = page.select(".route")
    assert "00 Ranks, the short way: 30\u00a0minutes" in lecture.get_text()
    assert "Day 1 00 Ranks, 01 Collectives: 130\u00a0minutes · Homework 1" in week.get_text()
    first, second, *_ = rows = term.select("tbody tr")
    assert len(rows) == len(COURSE)
    assert len(first.select("input")) == 1, "no homework in week 1"
    labels = [field["aria-label"] for field in second.select("input")]
    assert labels == ["Week 2, lecture", "Week 2, homework due"]
    assert [a["href"] for a in second.select("a")] == ["01_collectives.html", "hw1_moving.html"]


def test_a_route_appears_only_if_all_its_lessons_have_a_page(tmp_path):
    first, second, *_ = COURSE.values()
    page = shown([first, second])
    assert [h.contents[0].strip() for h in page.select(".route h3")] == ["One lecture"]
    assert not page.select("script") and not shown([first]).select(".routes")
    assert read_opening(tmp_path) == {}, "a folder of other lessons has no routes"
    assert not shown([*COURSE.values()], {}).select(".routes, .moving, .opening")


def test_titles_are_escaped_and_an_address_is_quoted():
    lesson = Lesson("00_a", "A & <b>: c", "", minutes=5)
    part = PART | {"lessons": ["00_a"], "when": "Day <1>"}
    route = {"title": "R & D", "text": "x < y", "dates": False, "parts": [part]}
    page = shown([lesson], {"opening": "text", "picture": "", "routes": [route]})
    assert page.select_one(".route h3").get_text().startswith("R & D")
    assert "Day <1> 00 A & <b>: 5\u00a0minutes" in page.select_one(".route li").get_text()
    assert shown([Lesson("exercise #2", "Two", "")]).find(href="exercise%20%232.html")
