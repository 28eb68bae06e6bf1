"""Read a lesson for a test: its notebook, its definitions without running it, and the outputs
of its cells after a run.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

LESSONS = Path(__file__).parents[2] / "lessons"
INSTALL = "install"  # the cell with %pip, which isn't Python


def read(name: str) -> NotebookNode:
    """The notebook as it is committed."""
    return nbformat.read(LESSONS / f"{name}.ipynb", as_version=4)


def prose(name: str) -> str:
    """The text of a lesson: all its Markdown cells."""
    return "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")


def source(name: str, cell_id: str) -> str:
    """The source of a cell."""
    return next(cell.source for cell in read(name).cells if cell.id == cell_id)


def definitions(name: str, *values: str) -> dict[str, Any]:
    """A lesson's imports, functions and classes, and the constants named in `values`.

    Nothing else of it runs.
    """
    names: dict[str, Any] = {"__name__": name}
    for cell in read(name).cells:
        if cell.cell_type == "code" and cell.id != INSTALL:
            body = [node for node in ast.parse(cell.source).body if _wanted(node, values)]
            exec(compile(ast.Module(body, []), cell.id, "exec"), names)
    return names


def _wanted(node: ast.stmt, values: tuple[str, ...]) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id in values for target in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


def answer_text(name: str, cell_id: str) -> str:
    """The code in the answer to something that the lesson lets the reader write."""
    (code,) = re.findall(r"```python\n(.*?)```", source(name, cell_id), re.DOTALL)
    return code


def answer(name: str, cell_id: str, names: dict[str, Any]) -> Any:
    """The function in the answer to something that the lesson lets the reader write.

    `names`: what it can use.
    """
    code = answer_text(name, cell_id)
    found = dict(names)
    exec(compile(code, cell_id, "exec"), found)
    return found[
        next(node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef))
    ]


def printed(cell: NotebookNode) -> str:
    """The text that a cell shows after a run."""
    return "".join(
        o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs
    )


def pictures(cell: NotebookNode) -> list[str]:
    """The pictures that a cell shows after a run, as HTML."""
    html = [o.get("data", {}).get("text/html", "") for o in cell.outputs]
    return [text for text in html if "<figure" in text]
