"""The examples in docstrings are true: each runs, and prints what it says.

Examples begin with the three imports below, as the reference says.
"""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101

PACKAGE = Path(__file__).parents[2] / "parallel101"
NAMES = {"torch": torch, "dist": dist, "p101": p101}


def examples() -> list[doctest.DocTest]:
    """The docstrings with examples, as tests with their place in the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ">>> " in text else ():
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                name = f"{path.relative_to(PACKAGE)}:{getattr(node, 'name', '')}"
                docstring = ast.get_docstring(node) or ""
                made = doctest.DocTestParser().get_doctest(docstring, NAMES, name, str(path), 0)
                found += [made] if made.examples else []
    return found


@pytest.mark.parametrize("example", [pytest.param(test, id=test.name) for test in examples()])
def test_an_example_prints_what_its_docstring_says(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some save a picture
    said: list[str] = []
    doctest.DocTestRunner().run(example, out=said.append)
    assert not said, "".join(said)


def test_what_is_used_most_has_an_example():
    with_example = {test.name.partition(":")[2] for test in examples()}
    collectives = "broadcast reduce scatter gather all_gather reduce_scatter all_reduce all_to_all"
    trainers = "DataParallel Sharded TensorParallel Pipeline Hybrid"
    used = {*collectives.split(), *(f"{name}Trainer" for name in trainers.split())}
    used |= {"launch", "animate", "Schedule", "schedule", "plan", "closed_form", "model_states"}
    assert used <= with_example
