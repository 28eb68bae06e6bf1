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
import types
from collections.abc import Sequence
from contextlib import suppress

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
    """Return the names that functions and classes use, and the names that those are made of."""
    codes: list[types.CodeType] = []
    for cell in cells:
        defined: list[ast.stmt] = [node for node in cell.nodes if isinstance(node, DEFINED)]
        with suppress(*UNREADABLE):
            codes.append(compile(ast.Module(defined, []), "cell", "exec"))
    new: set[str] = set()
    for code in codes:  # the codes in it are added meanwhile
        new.update(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    named = [node for cell in cells for node in cell.nodes if isinstance(node, NAMED)]
    used: set[str] = set()
    while new:
        used |= new
        new = {name for node in named if _targets(node) & new for name in _names(node)} - used
    return used


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
