"""A small course whose notebooks aren't run. Its atlas of collectives has one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat import v4, write

from parallel101 import cli
from parallel101.laboratory.publish import write_site
from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.tools import collectives_atlas_page
from parallel101.laboratory.publish.tools.recorded_collectives import Choice

LESSONS = {
    "00_ranks": "# Ranks\n\nA rank is a process. It takes about 40 minutes.\n\n"
    "Go on with [sharding](05_sharding.ipynb) or [costs](01_costs.ipynb). "
    "**Homework 1, exercise 1** asks for it. So does **Homework 2, exercise 4**.",
    "01_costs": "# Costs\n\nA message takes time. It takes about 60 minutes.\n\n"
    "**Homework 2, exercise 4**.",
    "05_sharding": "# Sharding\n\nA shard is a part.\n\n**Homework 5, exercise 13**.",
}
GLOSSARY = "## rank\nA process.\n\n## shard\nA part of a [tensor](#x).\n"


@pytest.fixture(autouse=True, scope="package")
def one_recorded_run() -> Iterator[None]:
    choice = Choice("broadcast", "flat", 8, "switch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives_atlas_page, "START", choice)
        patch.setattr(collectives_atlas_page, "all_choices", lambda: [choice])
        yield


def notebook(path: Path, *cells: str, tags: tuple[str, ...] = ()) -> Path:
    """Write a notebook. A cell whose text begins with "#" is Markdown, the others are code."""
    code = {"tags": [*tags]}
    made = [
        v4.new_markdown_cell(c) if c.startswith("#") else v4.new_code_cell(c, metadata=code)
        for c in cells
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write(v4.new_notebook(cells=made), path)
    return path


def read(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


class Course:
    """Three lessons, three sets of homework and a glossary, and the lessons that have run."""

    def __init__(self, folder: Path):
        self.lessons, self.out, self.ran = folder / "lessons", folder / "site", list[str]()
        for name, text in LESSONS.items():
            notebook(self.lessons / f"{name}.ipynb", text)
        for number in (1, 2, 5):
            name = f"hw{number}_topic/hw{number}.ipynb"
            notebook(folder / "homework" / name, f"# Homework {number}: a topic")
        (self.lessons / "glossary.md").write_text(GLOSSARY)

    def page(self, name: str) -> BeautifulSoup:
        return read(self.out / f"{name}.html")

    def build(self, *options: str) -> set[str]:
        """Publish it; return the names of all pages. Their links must lead to a page."""
        self.ran.clear()
        command = ["lessons", "--lessons", str(self.lessons), "--out", str(self.out), *options]
        assert cli.main(command) == 0
        pages = {file.stem for file in self.out.glob("*.html")}
        for name in pages:
            links = [str(a["href"]) for a in self.page(name).select("a[href]")]
            inside = {a.partition("#")[0] for a in links if "://" not in a} - {""}
            assert {Path(address).stem for address in inside} <= pages, name
        return pages


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    made = Course(tmp_path / "pictures")  # a name of a folder that is left out inside a course

    def run(path: Path, **_: object) -> v4.NotebookNode:
        made.ran.append(path.stem)
        return read_notebook(path)

    monkeypatch.setattr(write_site, "run_notebook", run)
    return made


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(write_site, "TOOLS", ())
