"""A lesson that hasn't changed isn't run again, and a page that plays isn't made again."""

from __future__ import annotations

import pytest

from parallel101.laboratory.publish import publish, select_lessons, write_site
from parallel101.laboratory.publish.unchanged import ROOT, files_of_module
from tests.publish.test_publish import notebook

ATLAS = "parallel101.laboratory.publish.tools.collectives_atlas_page"


@pytest.fixture
def lessons(tmp_path, monkeypatch):
    """A folder with two lessons, and a function that publishes them and says which ones ran."""
    folder = tmp_path / "lessons"
    folder.mkdir()
    for name in ("00_first", "01_second"):
        notebook(folder, name, f"md:# {name}", "1")
    ran: list[str] = []

    def run(path, **_):
        ran.append(path.stem)
        return write_site.read_notebook(path)

    monkeypatch.setattr(write_site, "run_notebook", run)
    monkeypatch.setattr(write_site, "TOOL_PAGES", ())

    def published(names=(), **options) -> list[str]:
        ran.clear()
        done = publish(select_lessons(folder, names), tmp_path / "site", **options)
        assert all(page.exists() for page in done.written) and not done.failed
        return [*ran]

    return folder, published


def test_only_what_has_changed_runs_again(lessons):
    folder, published = lessons
    both = ["00_first", "01_second"]
    assert published() == both
    first = (folder.parent / "site" / "00_first.html").read_text(encoding="utf-8")
    assert published() == []
    notebook(folder, "01_second", "md:# Other words", "2")
    assert published() == ["01_second"]
    again = (folder.parent / "site" / "00_first.html").read_text(encoding="utf-8")
    assert again == first.replace("01_second →", "Other words →")  # the link to the next lesson
    (folder / "glossary.md").write_text("# Glossary\n\n## words\nWhat is read.\n")
    assert published() == both
    assert published() == []
    assert published(["01"], again=True) == ["01_second"]
    (folder.parent / "site" / "00_first.html").unlink()
    assert published() == ["00_first"]


def test_the_atlas_depends_on_what_it_imports_and_on_nothing_else():
    files = {path.relative_to(ROOT).as_posix() for path in files_of_module(ATLAS)}
    assert {
        "collectives/all_reduce.py",
        "laboratory/sim/network.py",
        "laboratory/viz/scene.py",
        "laboratory/publish/tools/collectives_atlas.js",
    } <= files
    assert not any(file.startswith(("trainers", "laboratory/planner")) for file in files)
