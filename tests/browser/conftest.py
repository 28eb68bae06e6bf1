"""The browser, a JupyterLab, the pages of a site, and screenshots of what the tests see.

The screenshots, which take longer than the tests, are kept if SCREENSHOTS names a folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from parallel101.laboratory.publish import course_pages as course_pages_module
from parallel101.laboratory.publish.course_pages import course_pages
from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.find import Repository, homework_notebooks
from parallel101.laboratory.publish.glossary import read_terms
from parallel101.laboratory.publish.index import index_page, read_opening
from parallel101.laboratory.publish.offline_page import offline_html
from parallel101.laboratory.publish.page import (
    Lesson,
    course_page,
    cover_of,
    lesson_body,
    lesson_page,
)
from parallel101.laboratory.publish.reference import make_reference
from parallel101.laboratory.publish.search_index import FILE, search_index
from parallel101.laboratory.publish.tools import (
    TOOL_PAGES,
    collectives_atlas_page,
    memory_page,
    schedule_builder_page,
)
from parallel101.laboratory.publish.tools.in_notebook import explore_memory
from parallel101.laboratory.publish.tools.recorded_collectives import Choice
from parallel101.laboratory.publish.write_site import search_entries
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.explore import explore_collective
from parallel101.laboratory.viz.plots import sweep
from parallel101.laboratory.viz.timeline import timeline_scene
from tests.browser.browser import Browser
from tests.browser.lab import ROOT, jupyterlab
from tests.lessons.lesson import LESSONS, read
from tests.publish.test_course_pages import CFF
from tests.viz.programs import recorded, ring_all_reduce

FOLDER = os.environ.get("SCREENSHOTS", "")


@pytest.fixture(scope="session")
def tab(chromium: str) -> Iterator[Browser]:
    with Browser(chromium) as browser:
        yield browser


@pytest.fixture
def browser(tab: Browser) -> Iterator[Browser]:
    """An empty page in a window of the usual size; at the end, no script may have failed."""
    tab.errors.clear()
    tab.emulate()
    tab.resize(1000, 800)
    tab.open("about:blank")
    yield tab
    assert tab.errors == []


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab with copies of the lessons, part.ipynb and homework 1."""
    scratch = tmp_path_factory.mktemp("lab")
    leave_out = shutil.ignore_patterns(".*", "pictures", "__pycache__")
    shutil.copytree(ROOT / "lessons", scratch / "root", ignore=leave_out)
    shutil.copytree(ROOT / "homework" / "hw1_moving", scratch / "root" / "hw1", ignore=leave_out)
    part = read("01_collectives")
    wanted = ("imports", "flat-broadcast-watch", "explorer-run")
    part.cells = [cell for cell in part.cells if cell.id in wanted]
    nbformat.write(part, scratch / "root" / "part.ipynb")
    with jupyterlab(scratch / "root", scratch) as address:
        yield address


@pytest.fixture(scope="session")
def keep() -> Callable[..., None]:
    """keep(browser, "page-dark") writes page-dark.png; with whole=True also what lies below the
    window.
    """

    def keep(browser: Browser, name: str, whole: bool = False) -> None:
        if FOLDER:
            Path(FOLDER).mkdir(parents=True, exist_ok=True)
            Path(FOLDER, f"{name}.png").write_bytes(browser.picture(whole))

    return keep


RUNS = {  # of the atlas: operation and algorithm → ranks and network
    ("all_reduce", "ring"): [(4, "switch"), (5, "switch"), (8, "switch"), (8, "torus")],
    ("all_reduce", "recursive_doubling"): [
        *((ranks, "switch") for ranks in (4, 5, 8, 64)),
        (8, "torus"),
    ],
    ("all_reduce", "torus"): [(8, "switch"), (8, "torus")],
    ("broadcast", "flat"): [(5, "two_nodes"), (8, "switch")],
    ("all_gather", "bruck"): [(8, "ring"), (8, "switch")],
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site, to which the fixtures below add their pages."""
    return tmp_path_factory.mktemp("site")


def written(folder: Path, name: str, html: str) -> str:
    """Write a page, and return its address."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(html, encoding="utf-8")
    return (folder / name).as_uri()


def shown(value: object) -> v4.NotebookNode:
    """The output of a cell with this value."""
    if hasattr(value, "_repr_mimebundle_"):
        return v4.new_output("display_data", value._repr_mimebundle_()[0])
    return v4.new_output("display_data", {"text/html": value._repr_html_()})


@pytest.fixture(scope="session")
def lesson(folder: Path) -> str:
    """The address of a lesson's page with everything that pages contain."""
    trace, results = recorded(ring_all_reduce, 4, 8)
    times = {"ring": {2.0**k: 1e-4 + 2.0**k / 1e9 for k in range(6, 27, 4)}}
    plot = sweep(times, times, title="Time against size", subtitle="one message")
    many = "".join(f"[rank 0] line {i}\n" for i in range(2_000))
    lines = v4.new_output("stream", name="stdout", text=many)
    raised = ["\x1b[0;31mValueError\x1b[0m: " + "no, " * 60]
    error = v4.new_output("error", ename="ValueError", evalue="no", traceback=raised)
    long_line = f'seen = p101.watch(lambda x: x, backend="sim")  # {"the same ring as above " * 4}'
    rows = ["the heading of column | " * 7, "---|" * 7, "1.25 GB/s | " * 7]
    write, code = v4.new_markdown_cell, v4.new_code_cell
    cells = [
        write("# A lesson\n\nIts first words, and a formula: $$T = \\alpha + \\frac{m}{\\beta}$$"),
        code("%pip install", metadata={"tags": ["install"]}),
        write("## A run\n\nBefore the question.\n\n> **Predict.** What happens?"),
        code("run.animate()", outputs=[shown(collective_scene(trace, results))]),
        write("The end of the answer."),
        write(
            "> **Write it.** A question about the answer.\n\n"
            "<details><summary>Answer</summary>\n\nA worked answer.\n\n</details>"
        ),
        write("Only for the lecturer.", metadata={"tags": ["notes"]}),
        write("## After it\n\nMore words.\n\n" + "\n".join(f"| {row}" for row in rows)),
        code(long_line, outputs=[shown(timeline_scene(trace)), lines]),
        code("plot", outputs=[shown(plot)]),
        code("explore_memory()", outputs=[shown(explore_memory()), error]),
        write("## An explorer"),
        code("explore()", outputs=[shown(explore_collective(world="sim"))]),
    ]
    about = Lesson("00_a", "A lesson", "")
    body = lesson_body(v4.new_notebook(cells=cells), Path())
    html = lesson_page(about, body, 1.0, [about], Repository("owner/name"))
    return written(folder, "00_a.html", html)


@pytest.fixture(scope="session")
def atlas(folder: Path) -> str:
    """The address of an atlas of these runs."""
    of = collectives_atlas_page
    runs = [Choice(*name, *run) for name, runs in RUNS.items() for run in runs]
    body, records = of.collectives_atlas(runs)
    for path, script in records.items():
        written(folder, path, script)
    return written(folder, of.ADDRESS, offline_html(of.TITLE, body, scripts_beside=True))


@pytest.fixture(scope="session")
def builder(folder: Path) -> str:
    of = schedule_builder_page
    return written(folder, of.ADDRESS, offline_html(of.TITLE, of.schedule_builder_page()))


@pytest.fixture(scope="session")
def memory(folder: Path) -> str:
    of = memory_page
    return written(folder, of.ADDRESS, offline_html(of.TITLE, of.memory_page()))


@pytest.fixture(scope="session")
def index(folder: Path) -> str:
    """The address of the course's index, with the same picture for each lesson.

    The pages around the lessons are beside it, with one message in place of those that programs
    raise.
    """
    root = folder / "root"
    shutil.copytree(LESSONS.parent / "docs", root / "docs")
    shutil.copytree(LESSONS, root / "lessons")
    (root / "CITATION.cff").write_text(CFF)
    with pytest.MonkeyPatch.context() as patch:
        message = "Error: " + "rank 0 waits, " * 20
        patch.setattr(course_pages_module, "raised", lambda program: message)
        around = course_pages(root)
    for page in around:
        written(folder, page.address, course_page(page.title, page.body))
    cell = v4.new_code_cell(
        "x", outputs=[shown(collective_scene(*recorded(ring_all_reduce, 4, 8)))]
    )
    cover = cover_of(lesson_body(v4.new_notebook(cells=[cell]), Path()))
    lessons = [Lesson.of(path.stem, read(path.stem)) for path in sorted(LESSONS.glob("*.ipynb"))]
    tasks = homework_notebooks(LESSONS).items()
    html = index_page(
        lessons,
        {lesson.name: cover for lesson in lessons},
        {number: Lesson.of(path.parent.name, read_notebook(path)) for number, path in tasks},
        glossary=True,
        opening=read_opening(LESSONS),
        moving=cover,
        tools=TOOL_PAGES,
        pages=around,
        repository=Repository("owner/name"),
    )
    return written(folder, "index.html", html)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index, its search and the reference, without the lessons' pages."""
    out = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        # tests/publish/test_course_pages.py runs the programs; other modules look the same
        patch.setattr(course_pages_module, "raised", lambda program: "Error: a message")
        patch.setattr("parallel101.laboratory.publish.reference.MODULES", ("cost", "sharding"))
        lessons = sorted(LESSONS.glob("*.ipynb"))
        entries = search_entries(lessons, [*homework_notebooks(LESSONS).values()], LESSONS)
        reference = make_reference()
    for page, html in reference.pages.items():
        written(out, page, html)
    written(out, FILE, search_index([*entries, *reference.names], read_terms(LESSONS)))
    written(out, "index.html", index_page([], search=True))
    return out
