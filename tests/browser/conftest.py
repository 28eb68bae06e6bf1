"""The browser and a site for it: all pages of the course, with few runs, and a lesson that contains
everything that pages contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat import v4

from parallel101.laboratory.publish import course_pages, reference, write_site
from parallel101.laboratory.publish.execute import read_notebook
from parallel101.laboratory.publish.find import Repository, select_lessons
from parallel101.laboratory.publish.page import Lesson, lesson_body, lesson_page
from parallel101.laboratory.publish.tools import collectives_atlas_page
from parallel101.laboratory.publish.tools.in_notebook import explore_memory
from parallel101.laboratory.publish.tools.recorded_collectives import Choice
from parallel101.laboratory.publish.write_site import publish
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.explore import explore_collective
from parallel101.laboratory.viz.plots import sweep
from parallel101.laboratory.viz.timeline import timeline_scene
from tests.browser.browser import Browser
from tests.lessons.lesson import LESSONS
from tests.viz.programs import recorded, ring_all_reduce


@pytest.fixture(scope="session")
def tab(chromium: str) -> Iterator[Browser]:
    with Browser(chromium) as browser:
        yield browser


@pytest.fixture
def browser(tab: Browser) -> Iterator[Browser]:
    """An empty page in a window of the usual size; at the end, no script may have failed."""
    tab.errors.clear()
    tab.view("about:blank", 1000, 800)
    tab.emulate()
    yield tab
    assert tab.errors == []


RUNS = [  # of the atlas
    Choice(operation, algorithm, int(ranks), network)
    for operation, algorithm, *places in (
        ("all_reduce", "ring", "4 switch", "5 switch", "8 switch", "8 torus"),
        ("all_reduce", "recursive_doubling", "4 switch", "5 switch", "8 switch", "64 switch"),
        ("all_reduce", "recursive_doubling", "8 torus"),
        ("all_reduce", "torus", "8 switch", "8 torus"),
        ("broadcast", "flat", "5 two_nodes", "8 switch"),
        ("all_gather", "bruck", "8 ring", "8 switch"),
    )
    for ranks, network in map(str.split, places)
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a folder with the site. Each lesson and homework is one picture, and programs
    raise one message.
    """
    folder = tmp_path_factory.mktemp("site")
    picture = collective_scene(*recorded(ring_all_reduce, 4, 8))
    cell = v4.new_code_cell("x", outputs=[shown(picture)])
    body = lesson_body(v4.new_notebook(cells=[cell]), Path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_site, "run_notebook", lambda path, **_: read_notebook(path))
        patch.setattr(write_site, "lesson_body", lambda *_: body)
        patch.setattr(write_site, "homework_body", lambda _: body)
        message = "Error: " + "rank 0 waits, " * 20
        patch.setattr(course_pages, "raised", lambda program: message)
        patch.setattr(reference, "MODULES", ("cost", "sharding"))
        patch.setattr(collectives_atlas_page, "all_choices", lambda: RUNS)
        repository = Repository("owner/name")
        publish(select_lessons(LESSONS), folder, repository=repository, report=lambda _: None)
    about = Lesson("everything", "A lesson", "")
    html = lesson_page(about, lesson_body(everything(), Path()), 1.0, [about], repository)
    (folder / "everything.html").write_text(html, encoding="utf-8")
    return folder.as_uri()


def shown(value: object) -> v4.NotebookNode:
    """The output of a cell with this value."""
    if hasattr(value, "_repr_mimebundle_"):
        return v4.new_output("display_data", value._repr_mimebundle_()[0])
    return v4.new_output("display_data", {"text/html": value._repr_html_()})


def everything() -> v4.NotebookNode:
    """A lesson with everything that pages contain."""
    trace, results = recorded(ring_all_reduce, 4, 8)
    times = {"ring": {2.0**k: 1e-4 + 2.0**k / 1e9 for k in range(6, 27, 4)}}
    plot = sweep(times, times, title="Time against size", subtitle="one message")
    many = "".join(f"[rank 0] line {i}\n" for i in range(2_000))
    lines = v4.new_output("stream", name="stdout", text=many)
    raised = ["\x1b[0;31mValueError\x1b[0m: " + "no, " * 60]
    error = v4.new_output("error", ename="ValueError", evalue="no", traceback=raised)
    long_line = f'seen = p101.watch(lambda x: x, backend="sim")  # {"the same ring as above " * 4}'
    rows = ["the heading of column | " * 7, "---|" * 7, "1.25 GB/s | " * 7]
    formula = "$$T = \\alpha + \\frac{m}{\\beta} \\qquad " + "x + " * 60 + "y$$"
    write, code = v4.new_markdown_cell, v4.new_code_cell
    cells = [
        write(f"# A lesson\n\nIts first words, and a formula: {formula}"),
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
    return v4.new_notebook(cells=cells)
