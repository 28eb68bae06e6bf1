"""A lesson as tests see it: its cells by their ids, its definitions without its runs, its outputs once it has run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

LESSONS = Path(__file__).parents[2] / "lessons"


def read(name: str) -> NotebookNode:
    """The notebook as it is committed."""
    return nbformat.read(LESSONS / f"{name}.ipynb", as_version=4)


def definitions(name: str, *values: str) -> dict[str, Any]:
    """What a lesson imports and defines, and the named constants; nothing is run."""
    names: dict[str, Any] = {"__name__": name}
    for cell in read(name).cells:
        if cell.cell_type == "code" and cell.id != "install":  # whose %pip is no Python
            body = [node for node in ast.parse(cell.source).body if _wanted(node, values)]
            exec(compile(ast.Module(body, []), cell.id, "exec"), names)
    return names


def _wanted(node: ast.stmt, values: tuple[str, ...]) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id in values for target in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


def printed(cell: NotebookNode) -> str:
    """What a cell that has run shows as text."""
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def pictures(cell: NotebookNode) -> list[str]:
    """The pictures that a cell that has run shows, as HTML."""
    html = [o.get("data", {}).get("text/html", "") for o in cell.outputs]
    return [text for text in html if "<figure" in text]
