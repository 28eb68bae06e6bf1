"""Each homework's notebook runs to its end: with the stubs every check says "not written yet",
with the reference solutions all pass.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

from parallel101.laboratory.grade.homework import HomeworkSet, find_sets

HERE = Path(__file__).parent
NOTEBOOKS = sorted((HERE.parents[1] / "homework").glob("hw*/hw*.ipynb"))
CHECK = re.compile(r"^check\((\w+)\.(\w+)\)$", re.M)


def code_cells(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def homework(request, tmp_path, monkeypatch) -> HomeworkSet:
    """A copy of a set, in the working directory, from which its file can be imported."""
    folder = tmp_path / request.param.parent.name
    shutil.copytree(
        request.param.parent,
        folder,
        ignore=shutil.ignore_patterns(".progress.json", "pictures", "__pycache__"),
    )
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, request.param.stem, raising=False)
    yield find_sets(folder)[0]
    sys.modules.pop(request.param.stem, None)


def run(homework: HomeworkSet, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Run all code cells. Returns what the check of each exercise said, by function."""
    said, names = {}, {"__name__": "__main__"}
    for cell in code_cells(homework.notebook):
        exec(compile(cell.source, cell.id, "exec"), names)
        text = capsys.readouterr().out
        assert "Traceback" not in text, (cell.id, text)
        said |= {function: text for _, function in CHECK.findall(cell.source)}
    return said


def test_with_the_stubs_every_check_says_that_nothing_is_written_yet(homework, capsys):
    said = run(homework, capsys)
    assert list(said) == [exercise.function for exercise in homework.exercises]
    for function, text in said.items():
        assert f"{function} is not written yet" in text, text


def test_with_the_reference_solutions_all_pass(homework, capsys):
    shutil.copy(HERE / homework.folder.name.partition("_")[0] / "reference.py", homework.code)
    for function, text in run(homework, capsys).items():
        assert "Everything holds: " in text, (function, text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_is_committed_with_ids_short_cells_questions_and_hints(path):
    notebook = nbformat.read(path, as_version=4)
    (homework,) = find_sets(path)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith(
        "# Homework "
    )
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-z][a-z0-9-]*", i) for i in ids)
    for cell in code_cells(path):
        assert (
            len(cell.source.splitlines()) <= 18
            and not cell.outputs
            and cell.execution_count is None
        ), cell.id
    source = "\n".join(cell.source for cell in notebook.cells)
    for exercise in homework.exercises:
        name = f"{path.stem}.{exercise.function}"
        assert f"# hint({name})" in source
        for question in exercise.questions:
            # sent, received or total: of bytes it must be clear whose they are
            assert question.name != "bytes", name
            assert re.search(rf'predict\({re.escape(name)}, .*\b{question.name}="\?"', source), (
                name,
                question.name,
            )
