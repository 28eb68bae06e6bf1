"""The wheel has the lessons and the homework, and its commands find them without a clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.test_package import ROOT, tracked

NOTEBOOKS = ("lessons", "homework")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder with the package, as the wheel puts it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", folder, "build", "-b", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stderr
    return folder / "lib"


def test_the_wheel_has_all_files_of_the_package_and_all_notebooks(installed):
    found = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    expected = {path.relative_to(ROOT) for path in tracked("parallel101/*")}
    for pattern in ("lessons/*", "homework/*", "docs/*.md", "CITATION.cff"):
        expected |= {
            Path("parallel101/notebooks") / path.relative_to(ROOT) for path in tracked(pattern)
        }
    assert {path.as_posix() for path in expected - found} <= {
        "parallel101/laboratory/planner/published_tables/README.md"
    }
    others = {path for path in found - expected if "__pycache__" not in path.parts}
    assert others == set(), "a learner's file, or one that git doesn't track"


PROGRAM = """
import contextlib
from parallel101 import cli
from parallel101.laboratory.publish.find import find_lessons
try:
    find_lessons(to_edit=True)
except FileNotFoundError as error:
    print(error)
for _ in range(2):
    with contextlib.suppress(SystemExit):
        cli.main(["notebooks"])
print(find_lessons(to_edit=True))
"""


def test_from_the_wheel_notebooks_are_copied_and_what_needs_them_says_so(installed, tmp_path):
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(installed)}, "timeout": 100}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, capture_output=True, text=True, **how)
    missing, copied, *_ = ran.stdout.splitlines()
    assert missing.endswith("run: parallel101 notebooks"), ran.stderr
    assert copied == "Wrote lessons and homework"
    assert ran.stdout.splitlines()[-1] == str(tmp_path / "lessons")
    assert "nothing was copied" in ran.stderr.splitlines()[-1]
    for name in NOTEBOOKS:
        copied = {path.relative_to(tmp_path) for path in (tmp_path / name).rglob("*.ipynb")}
        assert copied == {path.relative_to(ROOT) for path in tracked(f"{name}/*.ipynb")}
