"""No test id depends on the order of a set.

All processes must collect the same ids: where two pytest-xdist workers differ, pytest-xdist runs
no test at all. It compares them in each `make test`; ids with a memory address are refused by
tests/conftest.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# their result does not depend on the order
WITHOUT_ORDER = {"sorted", "len", "min", "max", "sum", "any", "all"}


def sets_in_parameters(source: str) -> list[str]:
    """The sets in the parameters of tests and fixtures that nothing sorts: written there, or in a
    constant of the file that stands there.

    Their order depends on the hash seed. Two processes have the same order of two strings half of
    the time, so xdist's comparison is not enough.
    """
    tree = ast.parse(source)
    constants = {
        name.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }

    def found(node: ast.AST) -> list[str]:
        called = (
            node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        )
        if called in WITHOUT_ORDER:
            return []
        if isinstance(node, ast.Compare):  # `x in {1, 2}`
            return found(node.left)
        if isinstance(node, ast.Set | ast.SetComp) or called in ("set", "frozenset"):
            return [f"line {node.lineno}: {ast.unparse(node)}"]
        if isinstance(node, ast.Name) and node.id in constants:
            return found(constants.pop(node.id))  # pop: once is enough
        return [one for child in ast.iter_child_nodes(node) for one in found(child)]

    wrong = []
    for node in ast.walk(tree):
        name = (
            node.func.attr
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            else ""
        )
        if isinstance(node, ast.Call) and name in ("parametrize", "fixture"):
            values = node.args[1:] + [keyword.value for keyword in node.keywords]
            wrong += [one for value in values for one in found(value)]
    return wrong


def test_no_ids_are_made_of_a_set():
    assert {
        path.name: sets
        for path in ROOT.glob("tests/**/*.py")
        if (sets := sets_in_parameters(path.read_text()))
    } == {}


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ("{'a', 'b'}", 1),
        ("[x for x in set(SIZES)]", 1),
        ("NAMES", 1),
        ("list(NAMES)", 1),
        ("sorted(NAMES)", 0),
        ("[1 in {1}, SIZES]", 0),
    ],
)
def test_a_set_in_parameters_is_found(values, wrong):
    source = (
        f"SIZES = [1, 2]\nNAMES = frozenset(SIZES) | {{3}}\n@pytest.mark.parametrize('x', "
        f"{values}, ids=str)\ndef test(x): pass\n"
    )
    assert bool(sets_in_parameters(source)) == wrong
