"""A course of some lessons: only its pages are written, and a syllabus is their index."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat import v4, write

from parallel101 import cli
from parallel101.laboratory.publish import write_site
from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.reference import ADDRESS, Reference
from parallel101.laboratory.publish.search_index import SearchEntry
from parallel101.laboratory.publish.syllabus import read_syllabus
from parallel101.laboratory.publish.tools import TOOL_PAGES

ROOT = Path(__file__).parents[2]
LESSONS = {
    "00_ranks": "# Ranks\n\nA rank is a process. It takes about 40 minutes.\n\n"
    "Go on with [sharding](05_sharding.ipynb) or [costs](01_costs.ipynb). "
    "**Homework 1, exercise 1** asks for it. So does **Homework 2, exercise 4**.",
    "01_costs": "# Costs\n\nA message takes time. It takes about 60 minutes.\n\n"
    "**Homework 2, exercise 4**.",
    "05_sharding": "# Sharding\n\nA shard is a part.\n\n**Homework 5, exercise 13**.",
}
GLOSSARY = "## rank\nA process.\n\n## shard\nA part of a [tensor](#x).\n"


@pytest.fixture
def lessons(tmp_path, monkeypatch) -> Path:
    """Three lessons, three sets of homework and a glossary. Nothing is run."""
    monkeypatch.setattr(write_site, "run_notebook", lambda path, timeout: read_notebook(path))
    folder = tmp_path / "lessons"
    folder.mkdir()
    for name, text in LESSONS.items():
        write(v4.new_notebook(cells=[v4.new_markdown_cell(text)]), folder / f"{name}.ipynb")
    for number in (1, 2, 5):
        homework = tmp_path / "homework" / f"hw{number}_topic"
        homework.mkdir(parents=True)
        cells = [v4.new_markdown_cell(f"# Homework {number}: a topic")]
        write(v4.new_notebook(cells=cells), homework / f"hw{number}.ipynb")
    (folder / "glossary.md").write_text(GLOSSARY)
    return folder


def built(lessons: Path, *options: str) -> tuple[set[str], BeautifulSoup]:
    """The pages that were written, and the index."""
    out = lessons.parent / "site"
    assert cli.main(["lessons", "--lessons", str(lessons), "--out", str(out), *options]) == 0
    pages = {file.stem for file in out.glob("*.html")}
    for page in out.glob("*.html"):
        links = BeautifulSoup(page.read_text(), "html.parser").select("a[href]")
        inside = {a["href"].partition("#")[0] for a in links if "://" not in a["href"]} - {""}
        assert {Path(address).stem for address in inside} <= pages, page.name
    return pages, BeautifulSoup((out / "index.html").read_text(), "html.parser")


def test_only_what_was_asked_for_is_written(lessons):
    pages, index = built(lessons, "--only", "01")
    assert pages == {"index", "01_costs", "hw2_topic"}
    assert [h2.get_text() for h2 in index.select(".lessons h2")] == ["01 Costs"]


def test_links_out_of_the_course_are_text_and_the_glossary_has_its_terms(lessons):
    pages, _ = built(lessons, "--only", "00,01")
    assert pages == {"index", "00_ranks", "01_costs", "hw1_topic", "hw2_topic", "glossary"}
    first = BeautifulSoup((lessons.parent / "site" / "00_ranks.html").read_text(), "html.parser")
    assert "Go on with sharding or costs." in " ".join(first.main.get_text().split())
    terms = BeautifulSoup((lessons.parent / "site" / "glossary.html").read_text(), "html.parser")
    assert [dt.get_text() for dt in terms.select("dt")] == ["rank"]


def test_without_only_everything_is_written(lessons):
    everything = {"index", "glossary", "hw1_topic", "hw2_topic", "hw5_topic", *LESSONS}
    pages, index = built(lessons)
    assert pages == everything | {tool.address.removesuffix(".html") for tool in TOOL_PAGES}
    tools = [link["href"] for link in index.select(".tools a")]
    assert tools == [tool.address for tool in TOOL_PAGES]
    records = [*(lessons.parent / "site").glob("atlas/*.js")]
    assert [path.name for path in records] == ["broadcast.flat.js"]
    atlas = lessons.parent / "site" / "atlas_of_collectives.html"
    atlas.write_text("kept")
    homework = lessons.parent / "site" / "hw1_topic.html"
    written = homework.stat().st_mtime_ns
    built(lessons, "00")  # one lesson of it again
    assert atlas.read_text() == "kept" and homework.stat().st_mtime_ns == written


def test_a_course_with_an_opening_has_a_reference_and_a_search(lessons, monkeypatch):
    name = SearchEntry("Reference", "launch", f"{ADDRESS}#launch", "Run a function.")
    made = Reference({ADDRESS: "<h1>Reference</h1><p id='launch'>"}, [name])
    monkeypatch.setattr("parallel101.laboratory.publish.reference.make_reference", lambda: made)
    opening = {"opening": "Why to start.", "picture": "", "routes": []}
    (lessons / "routes.json").write_text(json.dumps(opening))
    out = lessons.parent / "site"
    assert cli.main(["lessons", "--lessons", str(lessons), "--out", str(out)]) == 0
    assert "launch" in (out / ADDRESS).read_text()
    index = BeautifulSoup((out / "index.html").read_text(), "html.parser")
    assert index.select_one(f'.more a[href="{ADDRESS}"]')
    assert index.select_one("form.search")["data-index"] == "search_index.js"
    found = json.loads((out / "search_index.js").read_text().partition("= ")[2].rstrip(";\n"))
    addresses = [entry[3] for entry in found["entries"]]
    assert {"00_ranks.html", "hw2_topic.html", "glossary.html#shard"} <= {*addresses}
    assert f"{ADDRESS}#launch" in addresses
    for address in addresses:
        assert (out / address.partition("#")[0]).exists()


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


def test_a_syllabus_is_the_index_of_its_course(lessons, tmp_path):
    file = tmp_path / "course.toml"
    file.write_text(SYLLABUS)
    pages, index = built(lessons, "--syllabus", str(file))
    # homework that a lesson names and the syllabus doesn't is not a part of the course
    assert pages == {"index", "00_ranks", "05_sharding", "hw5_topic", "glossary"}
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
    # one lesson of it again
    assert built(lessons, "05", "--syllabus", str(file))[0] == pages


WRONG = {
    "no TOML": ("title = ", "is not TOML"),
    "no weeks": ("title = 'A'", "weeks"),
    "an unknown entry": ("title = 'A'\n[[weeks]]\nhour = 1", "week 1.*'hour'.*date, title"),
    "no such lesson": ("title = 'A'\n[[weeks]]\nlessons = ['07']", "week 1.*'07' is not a lesson"),
    "no homework": ("title = 'A'\n[[weeks]]\nhomework = [9]", "week 1.*no homework 9.*1, 2, 5"),
    "text for a list": ("title = 'A'\n[[weeks]]\ngoals = 'x'", "week 1.*goals.*list"),
    "due before": (
        "title = 'A'\n[[weeks]]\ndate = 2027-03-09\nhomework = [1]\ndue = 2027-03-02",
        "week 1.*due 2027-03-02.*before",
    ),
    "weeks in disorder": (
        "title = 'A'\n[[weeks]]\ndate = 2027-03-09\n[[weeks]]\ndate = 2027-03-02",
        "week 2.*2027-03-02.*after 2027-03-09",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_syllabus_that_cannot_be_followed_says_where(lessons, tmp_path, text, message):
    (tmp_path / "course.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"course\.toml.*{message}"):
        read_syllabus(tmp_path / "course.toml", lessons)


def test_the_syllabus_for_teachers_can_be_followed(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/teaching.md").read_text(), re.DOTALL)
    (tmp_path / "course.toml").write_text(text)
    syllabus = read_syllabus(tmp_path / "course.toml", ROOT / "lessons")
    assert [week.lessons for week in syllabus.weeks] == [("00_ranks",), ("01_collectives",), ()]
    assert syllabus.homework == {1}


def test_options_that_contradict_the_syllabus_are_refused(lessons, tmp_path, capsys):
    file = tmp_path / "course.toml"
    file.write_text(SYLLABUS)
    for options, said in (
        (["--only", "00", "--syllabus", str(file)], "names the lessons"),
        (["01", "--syllabus", str(file)], "01_costs is not in"),
        (["--syllabus", str(tmp_path / "none.toml")], "none.toml"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["lessons", "--lessons", str(lessons), *options])
        assert said in " ".join(capsys.readouterr().err.split())
