"""Every process collects the same test ids.

Where two pytest-xdist workers differ, pytest-xdist runs no test at all.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# their result does not depend on the order
WITHOUT_ORDER = {"sorted", "len", "min", "max", "sum", "any", "all"}

# Collects tests with a clock that runs ahead.
COLLECT = """
import sys, time, pytest
ahead, seconds, nanoseconds = float(sys.argv[1]), time.time, time.time_ns
time.time = lambda: seconds() + ahead
time.time_ns = lambda: nanoseconds() + int(ahead * 1e9)
sys.exit(pytest.main(["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", sys.argv[2]]))
"""


def collect(folder: Path, ahead: str, zone: str, seed: str) -> list[str]:
    """Collect the tests of `folder` in a process with this clock (seconds ahead), time zone and
    hash seed. Returns the ids.
    """
    environment = {**os.environ, "TZ": zone, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", COLLECT, ahead, str(folder)]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [line for line in ran.stdout.splitlines() if "::" in line]


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_every_process_collects_the_same_ids(request):
    """This process and another one, in which much is different."""
    here = [item.nodeid for item in request.session.items]
    there = collect(ROOT / "tests", "3723.4", "There-1:02:03", "2")
    assert len(there) > 1000
    assert set(here) <= set(there)
    assert here == there or len(here) < len(there), "the same in another order"


def test_ids_made_of_the_time_or_a_hash_are_found(tmp_path):
    made_of = [
        "time.time()",
        "time.localtime().tm_sec",
        "gzip.compress(b'')[4:8].hex()",
        "hash('a')",
    ]
    (tmp_path / "test_ids.py").write_text(
        "import gzip, time, pytest\n"
        f"@pytest.mark.parametrize('x', [{', '.join(f'str({value})' for value in made_of)}])\n"
        "def test_something(x): pass\n"
    )
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            collect, [tmp_path] * 2, ["0", "3723.4"], ["UTC0", "There-1:02:03"], ["1", "2"]
        )
    assert len(first) == len(made_of)
    assert not set(first) & set(second)


def sets_in_parameters(source: str) -> list[str]:
    """The sets in the parameters of tests and fixtures that nothing sorts: written there, or in a
    constant of the file that stands there.

    Their order depends on the hash seed. Two processes have the same order of two strings half of
    the time, so comparing ids is not enough.
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
