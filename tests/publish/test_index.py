"""The index: its routes name lessons and homework that exist, with the minutes of the lessons."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from bs4 import BeautifulSoup

from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.index import (
    PART,
    ROUTE,
    Opening,
    index_page,
    minutes,
    read_opening,
)
from parallel101.laboratory.publish.page import Cover, Lesson
from tests.lessons.lesson import LESSONS, read

OPENING = read_opening(LESSONS)
TITLES = [route["title"] for route in OPENING.routes]


@cache
def course() -> dict[str, Lesson]:
    paths = sorted(LESSONS.glob("*.ipynb"))
    return {path.stem: Lesson.of(path.stem, read(path.stem)) for path in paths}


@cache
def homework() -> dict[int, Lesson]:
    paths = sorted((LESSONS.parent / "homework").glob("hw*_*/hw*.ipynb"))
    return {int(path.stem[2:]): Lesson.of(path.parent.name, read_notebook(path)) for path in paths}


@pytest.mark.parametrize("route", OPENING.routes, ids=TITLES)
def test_the_lessons_and_homework_of_a_route_exist_and_come_in_order(route):
    named = [name for part in route["parts"] for name in part["lessons"]]
    assert named == sorted(set(named)) and set(named) <= set(course())
    assert all(minutes(part, course()) > 0 for part in route["parts"])
    taken: list[str] = []
    for part in route["parts"]:
        taken += part["lessons"]
        for number in part["homework"]:
            # a later lesson may ask for one more exercise of it
            first, *_ = (name for name, lesson in course().items() if number in lesson.homework)
            assert number in homework() and first in taken, f"{number} comes before {first}"


def test_a_lecture_takes_75_minutes_and_a_term_has_everything():
    lecture, _, term = (route["parts"] for route in OPENING.routes)
    assert sum(minutes(part, course()) for part in lecture) == 75
    assert all(minutes(part, course()) <= 75 for part in term)
    assert [name for part in term for name in part["lessons"]] == list(course())
    assert [number for part in term for number in part["homework"]] == list(homework())
    assert OPENING.picture in course()


def test_the_short_way_of_a_lesson_names_its_sections():
    names = [name for name, lesson in course().items() if lesson.short]
    assert names
    for name in names:
        cells = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
        prose = "\n".join(["", *cells])
        (short,) = re.findall(r"short way takes \d+ minutes: (.*?[.])\s", prose, re.DOTALL)
        sections = re.findall(r"\*([^*]+)\*", short)
        assert sections and all(f"\n## {section}" in prose for section in sections), name


def shown(lessons, opening=OPENING, **options) -> BeautifulSoup:
    return BeautifulSoup(
        index_page(lessons, homework=homework(), opening=opening, **options), "html.parser"
    )


def test_the_index_opens_with_a_moving_picture_and_three_routes():
    page = shown([*course().values()], moving=Cover("data:still", "data:moving", "a ring"))
    assert page.find("h1").find_next("a")["href"].startswith("https://arxiv.org")
    image = page.select_one("figure.moving img")
    assert (image["alt"], image["src"]) == ("a ring", "data:moving")
    assert page.select_one("figure.moving source")["srcset"] == "data:still"
    assert page.select_one("figcaption a").get_text() == "01 Collectives"
    assert [h.get_text() for h in page.select(".route h3")] == [
        "One lecture 75\u00a0minutes",
        "A week 9\u00a0hours",
        "A term 15\u00a0hours",
    ]
    lecture, week, term = page.select(".route")
    assert "00 Ranks, the short way: 30\u00a0minutes" in lecture.get_text()
    assert "Day 1 00 Ranks, 01 Collectives: 130\u00a0minutes · Homework 1" in week.get_text()
    rows = term.select("tbody tr")
    assert len(rows) == len(course())
    assert [i["aria-label"] for i in rows[1].select("input")] == [
        "Week 2, lecture",
        "Week 2, homework due",
    ]
    assert len(rows[0].select("input")) == 1, "no homework in week 1"
    assert [a["href"] for a in rows[1].select("a")] == ["01_collectives.html", "hw1_moving.html"]


def test_a_route_appears_only_if_all_its_lessons_have_a_page():
    first, second, *_ = course().values()
    page = shown([first, second])
    assert [h.contents[0].strip() for h in page.select(".route h3")] == ["One lecture"]
    assert not page.select("script")
    assert not shown([first]).select(".routes")


def test_a_folder_without_routes_has_a_plain_index(tmp_path):
    assert read_opening(tmp_path) == Opening()
    assert not shown([*course().values()], Opening()).select(".routes, .moving, .opening")


@pytest.mark.parametrize(
    "wrong",
    [
        "{",
        '{"routes": []}',
        json.dumps({"opening": "", "picture": "", "routes": [{"title": "A day"}]}),
        json.dumps(
            {
                "opening": "",
                "picture": "",
                "routes": [{"title": "", "text": "", "parts": [{"lessons": [], "hour": 1}]}],
            }
        ),
    ],
    ids=["no JSON", "no opening", "no parts", "an unknown entry"],
)
def test_a_file_that_is_no_list_of_routes_is_refused(wrong, tmp_path):
    (tmp_path / "routes.json").write_text(wrong)
    with pytest.raises(ValueError, match=r"routes\.json is not a list of routes .*index\.py"):
        read_opening(tmp_path)


def test_titles_are_escaped():
    lesson = Lesson("00_a", "A & <b>: c", "", minutes="5")
    part = {**PART, "lessons": ["00_a"], "when": "Day <1>"}
    route = {**ROUTE, "title": "R & D", "text": "x < y", "parts": [part]}
    page = shown([lesson], Opening("text", "", (route,)))
    assert page.select_one(".route h3").get_text().startswith("R & D")
    assert "Day <1> 00 A & <b>: 5\u00a0minutes" in page.select_one(".route li").get_text()
