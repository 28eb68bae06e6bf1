"""No test id depends on the order of a set.

All processes must collect the same ids: where two pytest-xdist workers differ, pytest-xdist runs
no test at all. It compares them in each `make test`; ids with a memory address are refused by
tests/conftest.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

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
    given = [node for node in tree.body if isinstance(node, ast.Assign)]
    constants = {name.id: n.value for n in given for name in n.targets if hasattr(name, "id")}

    def found(node: ast.AST) -> list[str]:
        called = getattr(getattr(node, "func", None), "id", "")
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
        if getattr(getattr(node, "func", None), "attr", "") in ("parametrize", "fixture"):
            for value in [*node.args[1:], *(keyword.value for keyword in node.keywords)]:
                wrong += found(value)
    return wrong


def test_no_ids_are_made_of_a_set():
    sets = {path: sets_in_parameters(path.read_text()) for path in ROOT.glob("tests/**/*.py")}
    assert {path.name: wrong for path, wrong in sets.items() if wrong} == {}


def test_a_set_in_parameters_is_found():
    constants = "SIZES = [1, 2]\nNAMES = frozenset(SIZES) | {3}\n"
    for values, wrong in {
        "{'a', 'b'}": True,
        "[x for x in set(SIZES)]": True,
        "NAMES": True,
        "list(NAMES)": True,
        "sorted(NAMES)": False,
        "[1 in {1}, SIZES]": False,
    }.items():
        test = f"@pytest.mark.parametrize('x', {values}, ids=str)\ndef test(x): pass\n"
        assert bool(sets_in_parameters(constants + test)) == wrong, values
