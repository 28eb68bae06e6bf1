"""Which pages a site has, of all lessons, of some, or of a syllabus, and what is written anew."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from parallel101 import cli
from parallel101.laboratory.publish import course_pages, write_site
from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.find import Repository, select_lessons
from parallel101.laboratory.publish.reference import ADDRESS
from parallel101.laboratory.publish.search_index import SearchEntry
from parallel101.laboratory.publish.syllabus import read_syllabus
from parallel101.laboratory.publish.tools import TOOLS
from parallel101.laboratory.publish.write_site import ATLAS, ROOT, publish
from tests.lessons.lesson import LESSONS
from tests.project.test_arrows import MODULES, parsed
from tests.publish.conftest import notebook, read

TOOL_PAGES = [tool.PAGE.address for tool in TOOLS]
NAMES = ["00_ranks", "01_costs", "05_sharding"]
HOMEWORK = {"hw1_topic", "hw2_topic", "hw5_topic"}


def test_a_whole_course_has_everything_and_an_atlas_that_has_not_changed_is_kept(course):
    everything = {"index", "glossary", *HOMEWORK, *NAMES}
    assert course.build() == everything | {page.removesuffix(".html") for page in TOOL_PAGES}
    assert [link["href"] for link in course.page("index").select(".tools a")] == TOOL_PAGES
    assert [path.name for path in course.out.glob("atlas/*.js")] == ["broadcast.flat.js"]
    (course.out / TOOL_PAGES[0]).write_text("kept")
    course.build("00")  # one lesson of it again
    assert (course.out / TOOL_PAGES[0]).read_text() == "kept" and course.ran == NAMES[:1]


def test_only_what_was_asked_for_is_written(course, no_tools):
    assert course.build("--only", "01") == {"index", "01_costs", "hw2_topic"}
    assert [h2.get_text() for h2 in course.page("index").select(".lessons h2")] == ["01 Costs"]
    pages = course.build("--only", "00,01")
    assert pages == {"index", "00_ranks", "01_costs", "hw1_topic", "hw2_topic", "glossary"}
    links = [a["href"].removesuffix(".html") for a in course.page("index").main.find_all("a")]
    assert links == ["00_ranks", "hw1_topic", "hw2_topic", "01_costs", "hw2_topic",
                     "hw1_topic", "hw2_topic", "glossary"]  # fmt: skip
    # a link out of the course is text, and the glossary has the terms that are used
    assert "Go on with sharding or costs." in " ".join(course.page("00_ranks").main.text.split())
    assert course.page("00_ranks").find("a", rel="next")["href"] == "01_costs.html"
    assert [dt.get_text() for dt in course.page("glossary").select("dt")] == ["rank"]
    assert "make homework" in course.page("hw1_topic").get_text()
    # without --only, the index also has the pages of earlier runs
    (course.out / "05_sharding.html").write_text("of an earlier run")
    publish(select_lessons(course.lessons, ["01"]), course.out, report=lambda _: None)
    assert len(course.page("index").select(".lessons li")) == 3


def test_the_lessons_site_has_pages_around_them_a_reference_and_a_search(
    tmp_path, no_tools, monkeypatch
):
    monkeypatch.setattr(write_site, "run_notebook", lambda path, **_: read_notebook(path))
    monkeypatch.setattr(course_pages, "raised", lambda program: "an error")
    monkeypatch.setattr(write_site, "homework_body", lambda path: "")
    names = [SearchEntry("Reference", "launch", f"{ADDRESS}#launch", "Run a function.")]
    made = {ADDRESS: "<h1>Reference</h1><p id='launch'>"}, names
    monkeypatch.setattr(f"{write_site.__package__}.reference.make_reference", lambda: made)
    repository = Repository("owner/name")
    publish(select_lessons(LESSONS, ["00"]), tmp_path, repository=repository, report=lambda _: None)
    assert (tmp_path / ADDRESS).read_text() == made[0][ADDRESS]
    index = read(tmp_path / "index.html")
    listed = {a["href"] for a in index.select(".pages a")}
    there = {"glossary", "errors_explained", "teach_with_it", "cite", "hw9_thousand_gpus"}
    assert {f"{page}.html" for page in there} | {ADDRESS} <= listed
    jumps = [a["href"] for a in index.select("nav a[href^='#']")]
    assert jumps == ["#lessons", "#homework"] and all(map(index.select_one, jumps))
    assert index.footer.a["href"] == repository.address
    colab = read(tmp_path / "00_ranks.html").find("a", string="Open in Colab")["href"]
    assert colab == repository.in_colab("lessons/00_ranks.ipynb")
    assert index.select_one("form.search")["data-index"] == "search_index.js"
    script = (tmp_path / "search_index.js").read_text(encoding="utf-8")
    addresses = {e[3] for e in json.loads(script.partition("= ")[2].rstrip(";\n"))["entries"]}
    found = {"00_ranks.html", "hw2_reducing.html", "glossary.html#rank", f"{ADDRESS}#launch"}
    assert found | {"errors_explained.html"} <= addresses
    pages = {address.partition("#")[0] for address in addresses} | listed
    assert [page for page in pages if not (tmp_path / page).exists()] == []


def test_only_what_has_changed_runs_again(course, no_tools):
    course.build()
    assert course.ran == NAMES
    first = (course.out / "00_ranks.html").read_text(encoding="utf-8")
    course.build()
    assert course.ran == []
    notebook(course.lessons / "01_costs.ipynb", "# Other words", "2")
    course.build()
    assert course.ran == ["01_costs"]
    again = (course.out / "00_ranks.html").read_text(encoding="utf-8")
    assert again == first.replace("Costs →", "Other words →")  # the link to the next lesson
    (course.lessons / "glossary.md").write_text("# Glossary\n\n## words\nWhat is read.\n")
    course.build()
    assert course.ran == NAMES
    course.build("01")
    assert course.ran == ["01_costs"]  # what is named runs in any case
    (course.out / "00_ranks.html").unlink()  # it is made again from the run that is kept
    assert "00_ranks" in course.build() and course.ran == []


def test_the_atlas_depends_on_what_it_imports_and_not_on_trainers():
    todo, found = ["publish.tools.collectives_atlas_page"], set()
    while todo:
        if (name := todo.pop()) not in found and name in MODULES:
            found.add(name)
            todo += parsed(MODULES[name]).at_once | parsed(MODULES[name]).when_called
    files = {MODULES[name].relative_to(ROOT).as_posix() for name in found}
    assert {"collectives/all_reduce.py", "laboratory/sim/network.py"} <= files
    others = {file for file in files if not file.startswith(ATLAS)}
    assert others <= {"extras.py", "laboratory/__init__.py"}  # no run depends on these
    assert not any("trainers" in part or "planner" in part for part in ATLAS)


def test_on_a_full_disk_the_page_is_named_and_its_old_content_is_kept(
    tmp_path, monkeypatch, capsys
):
    page = tmp_path / "site" / "index.html"
    page.parent.mkdir()
    page.write_text("a page of an earlier run")
    (tmp_path / "00_torn.ipynb").write_text("no notebook")

    def half(self, content):
        with self.open("wb") as file:
            file.write(content[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    assert cli.main(["lessons", "--lessons", str(tmp_path), "--out", str(page.parent)]) == 1
    assert capsys.readouterr().err == f"parallel101: cannot write {page}: No space left on device\n"
    assert [*page.parent.iterdir()] == [page] and page.read_text() == "a page of an earlier run"


SYLLABUS = """
title = "Parallel training & more"
text = "Tuesdays, *10:15*, room H2."

[[weeks]]
date = 2027-03-02
lessons = ["00"]
goals = ["Start processes", "Say why `recv` waits"]

[[weeks]]
date = 2027-03-09
title = "No lecture"

[[weeks]]
date = "Week 11"
lessons = ["05", "00"]
homework = [5]
due = 2027-03-22
"""


def test_a_syllabus_is_the_index_of_its_course(course, tmp_path):
    (syllabus := tmp_path / "course.toml").write_text(SYLLABUS)
    pages = course.build("--syllabus", str(syllabus))
    # homework that a lesson names and the syllabus doesn't is not a part of the course
    assert pages == {"index", "00_ranks", "05_sharding", "hw5_topic", "glossary"}
    index = course.page("index")
    assert index.title.get_text() == index.h1.get_text() == "Parallel training & more"
    assert index.find("em").get_text() == "10:15"
    rows = [[cell.get_text(" ", strip=True) for cell in row("td")] for row in index("tr")[1:]]
    goals = "Start processes Say why recv waits"
    assert rows == [
        ["Tue 2 March 2027", "00 Ranks 40\u00a0minutes", goals, ""],
        ["Tue 9 March 2027", "No lecture", "", ""],
        ["Week 11", "05 Sharding 00 Ranks 40\u00a0minutes", "", "Homework 5 due Mon 22 March 2027"],
    ]
    links = ["05_sharding.html", "00_ranks.html", "hw5_topic.html"]
    assert [a["href"] for a in index("tr")[3]("a")] == links
    assert course.build("05", "--syllabus", str(syllabus)) == pages  # one lesson of it again


WRONG = {  # a syllabus → what is said of it
    "title = ": "is not TOML",
    "title = 'A'": "weeks",
    "[[weeks]]\nhour = 1": "week 1.*'hour'.*date, title",
    "[[weeks]]\nlessons = ['07']": "week 1.*'07' is not a lesson",
    "[[weeks]]\nhomework = [9]": "week 1.*no homework 9.*1, 2, 5",
    "[[weeks]]\ngoals = 'x'": "week 1.*goals.*list",
    "[[weeks]]\ndate = 2027-03-09\nhomework = [1]\ndue = 2027-03-02": "week 1.*due 2027-03-02",
    "[[weeks]]\ndate = 2027-03-09\n[[weeks]]\ndate = 2027-03-02": "week 2.*-02.*after 2027-03-09",
}


def test_a_syllabus_that_cannot_be_followed_says_where(course, tmp_path, capsys):
    syllabus = tmp_path / "course.toml"
    for text, message in WRONG.items():
        syllabus.write_text(("title = 'A'\n" if text.startswith("[") else "") + text)
        with pytest.raises(ValueError, match=rf"course\.toml.*{message}"):
            read_syllabus(syllabus, course.lessons)
    syllabus.write_text(SYLLABUS)
    for options, said in (
        (["--only", "00", "--syllabus", str(syllabus)], "names the lessons"),
        (["01", "--syllabus", str(syllabus)], "01_costs is not in"),
        (["--syllabus", "none.toml"], "none.toml"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["lessons", "--lessons", str(course.lessons), *options])
        assert said in " ".join(capsys.readouterr().err.split())
    # the one for teachers can be followed
    teaching = (LESSONS.parent / "docs/teaching.md").read_text(encoding="utf-8")
    syllabus.write_text(*re.findall(r"```toml\n(.*?)```", teaching, re.DOTALL))
    taught = read_syllabus(syllabus, LESSONS)
    assert [week.lessons for week in taught.weeks] == [("00_ranks",), ("01_collectives",), ()]
    assert taught.homework == {1}
