"""What the Makefile's set-up does where a machine or a checkout is not as it should be. A few lines of shell stand in for Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")

# Makes a venv whose Python is a copy of itself, and whose pip writes down what it is asked; `broken` has no ensurepip.
PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
  --version) echo "$0 3.11" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" && [ "${0%broken}" = "$0" ] && touch "$3/bin/pip" ;;
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
    """A clone as far as `make setup` can tell, and a Python beside it."""
    folder = tmp_path / "clone"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    write_python(tmp_path / "python3")
    return folder


def make(folder: Path, *words: str, python: str = "../python3", **kwargs) -> subprocess.CompletedProcess[str]:
    command = ["make", "setup", f"PYTHON={python}", *words]
    alone = {"PATH": os.environ["PATH"]}  # without the variables of a `make test` that runs this
    return subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=60, **kwargs)


def installed(folder: Path) -> int:
    """How often pip has installed here."""
    return (folder / "installed").read_text().count("\n") if (folder / "installed").exists() else 0


def test_set_up_is_done_once(clone):
    for _ in range(2):
        assert make(clone).returncode == 0
    assert installed(clone) == 1


def test_a_venv_that_was_interrupted_before_it_had_pip_is_completed(clone):
    write_python(clone / ".venv/bin/python")
    made = make(clone)
    assert (made.returncode, installed(clone)) == (0, 1), made.stderr


@pytest.mark.parametrize("there", [True, False])
def test_a_venv_that_fails_leaves_what_was_there_before_and_nothing_else(clone, there):
    if there:
        (clone / "mine").mkdir()
        (clone / "mine/thesis.txt").touch()
    write_python(clone.parent / "broken")
    made = make(clone, "VENV=mine", python="../broken")
    assert made.returncode != 0
    assert "python3-venv" in made.stderr
    assert (clone / "mine/thesis.txt").exists() == (clone / "mine").exists() == there
    assert make(clone, "VENV=mine").returncode == 0


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_a_copied_or_moved_clone_makes_its_own_venv_and_no_other_one(clone, how):
    assert make(clone).returncode == 0
    there = clone.parent / "my other clone"
    how(clone, there)
    (there / ".venv/old").touch()
    made = make(there)
    assert f"Making .venv anew: it was made in {clone}\n" in made.stdout, made.stderr
    assert (installed(there), (there / ".venv/old").exists()) == (2, False)
    assert "Making" not in make(there).stdout
    assert installed(there) == 2


def test_a_venv_whose_python_is_gone_is_made_anew(clone):
    assert make(clone).returncode == 0
    (clone / ".venv/bin/python").unlink()
    (clone / ".venv/bin/python").symlink_to("/nowhere/python3")
    assert "Making .venv anew: its Python is gone" in make(clone).stdout
    assert installed(clone) == 2


def test_a_venv_that_clones_share_is_installed_into_and_kept(clone):
    other = shutil.copytree(clone, clone.parent / "other")
    for folder in (clone, other, clone):
        assert make(folder, "VENV=../shared").returncode == 0
        (clone.parent / "shared/mine").touch()
    assert (installed(clone), installed(other), (clone.parent / "shared/mine").exists()) == (2, 1, True)


def test_a_python_may_lie_on_a_path_with_spaces(clone):
    write_python(clone.parent / "my programs/python3")
    assert (make(clone, python="../my programs/python3").returncode, installed(clone)) == (0, 1)


def test_of_several_pythons_the_first_that_is_there_is_taken(clone):
    assert "Creating .venv with ../python3 " in make(clone, python="../nowhere ../python3 ../broken").stdout
    told = make(clone, "VENV=.other", python="../nowhere ../neither").stderr
    assert "none of these is: ../nowhere ../neither." in told


def test_a_folder_that_is_not_ours_to_write_to_is_said_to_be_that(clone):
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which only its owner may enter
        there = shutil.copytree(clone, Path(folder) / "clone")
        Path(folder).chmod(0o755)
        there.chmod(0o555)
        try:
            made = make(there, user=65534 if os.geteuid() == 0 else None)  # root may write anywhere
        except OSError as error:
            pytest.skip(f"root may not run a program as nobody here ({error})")
        finally:
            there.chmod(0o755)
    assert made.returncode != 0
    assert "can't be written to" in made.stderr
    assert "apt" not in made.stderr


def test_lab_hands_its_options_on(clone):
    assert "parallel101 lab --allow-root --no-browser" in make(clone, "-n", "lab", "LAB=--allow-root --no-browser").stdout
