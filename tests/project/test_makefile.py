"""The Makefile sets up a venv also after an interruption, in a copied clone or with a broken
Python. A shell script replaces Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")

# Its venv contains a copy of itself, and its pip adds a line to the file `installed`. If its name
# is `broken`, venv fails.
PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
  --version) echo "$0 3.11" ;;
  "-m venv "*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" &&
    [ "${0%broken}" = "$0" ] && touch "$3/bin/pip" ;;
  "-m pip install "*) [ -e "$here/pip" ] && echo "$PWD" >>installed ;;
  "-m pip "*) [ -e "$here/pip" ] ;;
esac
"""


def write_python(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path):
    """The files of a clone that `make setup` needs, and a Python beside it."""
    folder = tmp_path / "clone"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    write_python(tmp_path / "python3")
    return folder


def make(
    folder: Path, *words: str, python: str = "../python3", **kwargs
) -> subprocess.CompletedProcess[str]:
    command = ["make", "setup", f"PYTHON={python}", *words]
    environment = {"PATH": os.environ["PATH"]}  # without the variables that `make test` sets
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, **kwargs
    )


def installed(folder: Path) -> int:
    """How many times pip has installed something in this clone."""
    return (folder / "installed").read_text().count("\n") if (folder / "installed").exists() else 0


def test_set_up_runs_once_and_completes_a_venv_that_was_interrupted(clone):
    write_python(clone / ".venv/bin/python")  # without pip
    for _ in range(2):
        made = make(clone)
        assert (made.returncode, installed(clone)) == (0, 1), made.stderr


@pytest.mark.parametrize("existed", [True, False])
def test_a_venv_that_cannot_be_created_is_deleted_but_not_what_was_there_before(clone, existed):
    if existed:
        (clone / "mine").mkdir()
        (clone / "mine/thesis.txt").touch()
    write_python(clone.parent / "broken")
    made = make(clone, "VENV=mine", python="../broken")
    assert made.returncode != 0 and "python3-venv" in made.stderr
    assert (clone / "mine/thesis.txt").exists() == (clone / "mine").exists() == existed
    assert make(clone, "VENV=mine").returncode == 0


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_a_copied_or_moved_clone_makes_its_own_venv(clone, how):
    assert make(clone).returncode == 0
    there = clone.parent / "my other clone"
    how(clone, there)
    (there / ".venv/old").touch()
    made = make(there)
    assert f"Creating .venv again: it was made for {clone}\n" in made.stdout, made.stderr
    assert (installed(there), (there / ".venv/old").exists()) == (2, False)
    assert "Creating" not in make(there).stdout and installed(there) == 2
    (there / ".venv/bin/python").unlink()
    (there / ".venv/bin/python").symlink_to("/nowhere/python3")
    assert "Creating .venv again: its Python is gone" in make(there).stdout
    assert installed(there) == 3


def test_a_venv_that_several_clones_share_is_never_deleted(clone):
    other = shutil.copytree(clone, clone.parent / "other")
    for folder in (clone, other, clone):
        assert make(folder, "VENV=../shared").returncode == 0
        (clone.parent / "shared/mine").touch()
    assert (installed(clone), installed(other)) == (2, 1)
    assert (clone.parent / "shared/mine").exists()


def test_the_first_of_several_pythons_that_exists_is_used_and_its_path_may_contain_spaces(clone):
    made = make(clone, "VENV=.other", python="../nowhere ../neither")
    assert "none was found under these names: ../nowhere ../neither." in made.stderr
    made = make(clone, python="../nowhere ../python3 ../broken")
    assert "Creating .venv with ../python3 " in made.stdout
    write_python(clone.parent / "my programs/python3")
    made = make(clone, "VENV=.other", python="../my programs/python3")
    assert (made.returncode, installed(clone)) == (0, 2)
    lab = "parallel101 lab --allow-root --no-browser"  # its options are passed on
    assert lab in make(clone, "-n", "lab", "LAB=--allow-root --no-browser").stdout


def test_a_folder_without_write_permission_is_named(clone):
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: other users may not enter it
        there = shutil.copytree(clone, Path(folder) / "clone")
        Path(folder).chmod(0o755)
        there.chmod(0o555)
        try:
            # root may write everywhere
            made = make(there, user=65534 if os.geteuid() == 0 else None)
        except OSError as error:
            pytest.skip(f"root may not run programs as another user here ({error})")
        finally:
            there.chmod(0o755)
    assert made.returncode != 0 and "apt" not in made.stderr
    assert f"you may not write to {there}" in made.stderr
