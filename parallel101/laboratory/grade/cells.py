"""The cells of a notebook as Python, without the lines that are for IPython."""

from __future__ import annotations

import ast
import json
import re
from typing import NamedTuple

# what a text that was handed in may raise when it is parsed: it is no program, has a null byte, or
# is nested too deeply
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
# of IPython's %% magics, those with Python below them
PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%writefile", "%%prun")
# a line for IPython: %timeit f(), !ls, f?, ?f, files = !ls
FOR_IPYTHON = re.compile(r"\s*([%!?]|[\w, ]+=\s*[%!]|[^#'\"]*\?\s*$)")


class Cell(NamedTuple):
    """A cell of code that is Python."""

    source: str
    nodes: list[ast.stmt]


def code_cells(notebook: str) -> list[tuple[str, str]]:
    """Return the id and the text of each cell of code.

    Raises ValueError, KeyError or TypeError for a text that is no notebook.
    """
    return [
        (cell.get("id", ""), "".join(cell["source"]))
        for cell in json.loads(notebook)["cells"]
        if cell["cell_type"] == "code"
    ]


def parsed(source: str) -> Cell | str:
    """Return a cell as Python, without IPython's syntax; its text if that's not Python."""
    first = source.lstrip().partition("\n")[0]
    if first.startswith("%%"):
        if not first.startswith(PYTHON_CELLS):
            return ""
        source = source.replace(first, "", 1)
    plain = "\n".join(
        re.match(r"\s*", line)[0] + "pass" if FOR_IPYTHON.match(line) else line  # type: ignore[index]
        for line in source.split("\n")
    )
    for text in (source, plain):  # a line of a docstring may look as if it were for IPython
        try:
            return Cell(text, ast.parse(text).body)
        except UNREADABLE:
            continue
    return plain
