"""The output of `help(hw1.ring_shift)` on a homework's page, where no cell has run.

The specification of an exercise is the docstring of its stub. It's read from the file beside the
notebook, which doesn't run.
"""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_output

HELP = re.compile(r"^help\((\w+)\.(\w+)\)\s*$")


def with_specifications(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Return a copy in which each cell `help(hwN.f)` has the signature and docstring of f.

    Raises ValueError if the file beside the notebook has no such function.
    """
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code" and (asked := HELP.match(cell.source)):
            text = specification(folder / f"{asked[1]}.py", asked[2])
            cell.outputs = [new_output("stream", name="stdout", text=text)]
    return notebook


def specification(path: Path, name: str) -> str:
    """Return what help() says of a function in the file at `path`: its signature and docstring."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            head = name
            if isinstance(node, ast.FunctionDef):
                returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                head += f"({ast.unparse(node.args)}){returns}"
            lines = (ast.get_docstring(node) or "").splitlines()
            return "\n".join([head, *(f"    {line}".rstrip() for line in lines)]) + "\n"
    raise ValueError(f"{path} has no function {name}, which the notebook beside it asks help() for")
