"""pyproject.toml, constraints.txt, Makefile, environment.yml and doctor agree with each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from parallel101.laboratory.doctor import OLDEST_PYTHON, OLDEST_TORCH, TESTED_TORCH
from tests.project.test_arrows import SUBJECT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest installs it there

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(r)
    for r in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    if "parallel101" not in r
]
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def tracked(pattern: str) -> list[Path]:
    """The project's own files: all that git tracks, or would track after `git add`."""
    command = ["git", "ls-files", "-co", "--exclude-standard", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def pins(python: str, platform: str) -> dict[str, Version]:
    """The versions that constraints.txt pins for one Python on one platform, by package."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": platform,
        "os_name": "nt" if platform == "win32" else "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found: dict[str, Version] = {}
    for requirement in map(Requirement, (line for line in lines if line and line[0] != "#")):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in found, f"two pins of {requirement.name}: {environment}"
            (only,) = requirement.specifier
            assert only.operator == "=="
            found[requirement.name.lower()] = Version(only.version)
    return found


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_constraints_pin_every_requirement_to_an_allowed_version(platform):
    for python in PYTHONS:
        pinned = pins(python, platform)
        for requirement in REQUIREMENTS:
            marker = requirement.marker
            if marker is None or marker.evaluate({"python_version": python}):
                pin = pinned.get(requirement.name.lower())
                assert pin in requirement.specifier, f"{requirement}: run `make constraints`"
        assert str(pinned["torch"]) == TESTED_TORCH


def test_doctor_makefile_and_conda_need_the_same_versions_as_pyproject():
    makefile = (ROOT / "Makefile").read_text()
    assert PROJECT["requires-python"] == f">={'.'.join(map(str, OLDEST_PYTHON))}"
    assert f"torch>={OLDEST_TORCH}" in PROJECT["dependencies"]
    assert f"sys.version_info < {OLDEST_PYTHON}" in makefile
    assert f"torch=={TESTED_TORCH}" in makefile
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    (python,) = (d for d in environment["dependencies"] if str(d).startswith("python="))
    allowed = Requirement(f"x{PROJECT['requires-python']}").specifier
    assert Version(python.removeprefix("python=")) in allowed
    (by_pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    (command,) = re.findall(r"-m pip install (-c .*)", makefile)
    assert " ".join(by_pip) == command.replace("'", "")
    (extra,) = re.findall(r"\[(.+)\]", by_pip[-1])
    assert extra in PROJECT["optional-dependencies"]


def test_notebooks_are_committed_without_outputs():
    for path in tracked("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        kept = [c for c in cells if c.get("outputs") or c.get("execution_count")]
        assert not kept, f"run `jupyter nbconvert --clear-output --inplace {path}`"


PARALLEL = ("data", "tensor", "pipeline", "context", "expert")
IDEAS = {*(f"{axis}_parallel.py" for axis in PARALLEL), "zero_1_2_3.py", "step.py"}


def test_every_file_begins_with_a_docstring_and_those_of_the_subject_are_short():
    """A lecture shows an idea, in one file of the trainers; what is behind it does not need it, or
    test_arrows.py would find a cycle.
    """
    ideas = set()
    for path in tracked("parallel101/*.py"):
        text, inside = path.read_text(), path.relative_to(ROOT / "parallel101")
        ideas |= {path.name} & IDEAS if inside.parts[0] == "trainers" else set()
        if inside.parts[0].removesuffix(".py") in SUBJECT:
            most = 250 if path.name in IDEAS else 600
            assert text.count("\n") <= most, f"{path} has more than {most} lines: two ideas?"
        if path.name != "__init__.py" or text.strip():
            assert text.startswith('"""'), f"{path} does not begin with a docstring"
    assert ideas == IDEAS


WRITTEN = (".py", ".md", ".ipynb", ".toml", ".yml", ".txt", ".js", ".css", "")


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    homes = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt|media)/\w")
    for path in tracked("*"):
        if path.suffix in WRITTEN and path != Path(__file__):
            found = homes.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path.relative_to(ROOT)} names {found[0]}…"
