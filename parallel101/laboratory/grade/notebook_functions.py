"""The program in a notebook that was handed in: its imports, its functions and what they use.

import torch                      kept
def ring_shift(x): …              kept, with its decorators
from hw1 import ring_shift        left out: the program takes the place of hw1
SCALE = 2                         kept if a function uses SCALE
ring_shift?     %timeit …         not Python: left out, like cells of another language
check(ring_shift)                 left out, as are all other calls
"""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterator, Sequence

from parallel101.laboratory.grade.cells import UNREADABLE, Cell, code_cells, parsed
from parallel101.laboratory.grade.homework import HomeworkSet
from parallel101.laboratory.grade.stubs import given_in, is_stub

DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
NAMED = (ast.Assign, ast.AnnAssign)


class NoSubmission(ValueError):
    """Nothing that was handed in can be graded. The message says what was expected.

    `reason` says in a few words why there are no points.
    """

    def __init__(self, message: str, reason: str = "not readable"):
        super().__init__(message)
        self.reason = reason


def functions_in_notebook(name: str, text: str, homework: HomeworkSet) -> str:
    """Return the imports, functions and constants of a notebook's cells, below what its set gives.

    Raises NoSubmission if it is no notebook, or defines none of the functions of the set.
    """
    wanted = [exercise.function for exercise in homework.exercises]
    try:
        read = [parsed(source) for _, source in code_cells(text)]
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise NoSubmission(f"{name} is not a notebook that can be read: {error!r}") from None
    found = {
        node.name
        for cell in read
        if isinstance(cell, Cell)
        for node in cell.nodes
        if isinstance(node, DEFINED)
    }
    used = _used([cell for cell in read if isinstance(cell, Cell)])
    parts: list[str] = []
    for cell in read:
        if isinstance(cell, Cell):
            kept = (node for node in cell.nodes if _belongs(node, used, homework.code.stem))
            parts += map(ast.unparse, kept)
        elif re.search(rf"^\s*def\s+({'|'.join(wanted)})\b", cell, re.MULTILINE):
            parts.append(cell)  # a mistake in one of the functions: the learner is shown where
            found |= set(wanted)
    if not found & set(wanted):
        raise NoSubmission(
            f"{name} defines none of {', '.join(wanted)}. The functions are in the .py file beside "
            "the notebook: hand in that file"
        )
    given = given_in(homework.code)
    return "\n\n".join(part for part in (given, *parts) if part.strip()) + "\n"


def bound(text: str, wanted: Sequence[str]) -> set[str]:
    """Return which of the names `wanted` a program defines or imports, except for stubs.

    A program that can't be parsed has those that it seems to define.
    """
    try:
        nodes = ast.parse(text).body
    except UNREADABLE:
        return {name for name in wanted if re.search(rf"^\s*def\s+{name}\b", text, re.MULTILINE)}
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, DEFINED):
            names |= {node.name} if not is_stub(node) else set()
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, NAMED):
            names |= _targets(node)
    return set(wanted) if "*" in names else names & set(wanted)


def _used(cells: Sequence[Cell]) -> set[str]:
    """Return the names of the module that functions and classes use, and what those are made of."""
    makes: dict[str, set[str]] = {}  # what the value of each name is made of
    left: list[str] = []
    for cell in cells:
        left += _global_names(cell.source)
        for node in cell.nodes:
            if isinstance(node, NAMED):
                for target in _targets(node):
                    makes.setdefault(target, set()).update(_names(node))
            elif isinstance(node, DEFINED):
                left += (name for part in _evaluated(node) for name in _names(part))
    used: set[str] = set()
    while left:
        name = left.pop()
        if name not in used:
            used.add(name)
            left += makes.get(name, ())
    return used


def _global_names(source: str) -> Iterator[str]:
    """Yield the names that the bodies of a cell's functions and classes take from the module."""
    try:
        tables = symtable.symtable(source, "cell", "exec").get_children()
    except UNREADABLE:
        return
    while tables:
        table = tables.pop()
        yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
        tables += table.get_children()


def _evaluated(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.AST]:
    """Return the nodes that are evaluated when a function or class is defined."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    return [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name for target in targets for name in _names(target)}


def _belongs(node: ast.stmt, used: set[str], module: str) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        from_itself = isinstance(node, ast.ImportFrom) and node.module == module
        return "parallel101" not in ast.unparse(node) and not from_itself
    if isinstance(node, NAMED):
        return bool(_targets(node) & used)
    return isinstance(node, DEFINED)
