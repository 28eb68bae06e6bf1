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


def parallel101(installed: Path, where: Path, *arguments: str) -> str:
    """What the command prints, run in the folder `where` with the package of the wheel."""
    ran = subprocess.run(
        [sys.executable, "-m", "parallel101", *arguments],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ran.stdout + ran.stderr


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


def test_from_the_wheel_notebooks_are_copied_and_what_needs_them_says_so(installed, tmp_path):
    asked = parallel101(installed, tmp_path, "grade").splitlines()[-1]
    assert "run: parallel101 notebooks" in asked
    assert "Wrote lessons and homework" in parallel101(installed, tmp_path, "notebooks")
    for name in NOTEBOOKS:
        copied = {path.relative_to(tmp_path) for path in (tmp_path / name).rglob("*.ipynb")}
        assert copied == {path.relative_to(ROOT) for path in tracked(f"{name}/*.ipynb")}
    assert "nothing was copied" in parallel101(installed, tmp_path, "notebooks")
    code = (
        "from parallel101.laboratory.publish import find_lessons; print(find_lessons(to_edit=True))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.stdout.strip() == str(tmp_path / "lessons"), ran.stderr
