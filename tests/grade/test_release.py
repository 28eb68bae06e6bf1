"""A release gives no solutions away, and installs nothing under a name that isn't ours."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from parallel101 import cli
from parallel101.laboratory.grade.homework import find_sets
from parallel101.laboratory.grade.release import ADDRESS, filled_in, release

ROOT = Path(__file__).parents[2]
SETS = sorted((ROOT / "homework").glob("hw*_*"))
SOLUTIONS = ROOT / "tests" / "homework"


@pytest.fixture
def clone(tmp_path):
    """Makes a copy of a set."""

    def copy(folder: Path) -> Path:
        ignored = shutil.ignore_patterns(".progress.json", "pictures", "__pycache__")
        return Path(shutil.copytree(folder, tmp_path / "homework" / folder.name, ignore=ignored))

    return copy


def found(folder: Path) -> list[str]:
    return filled_in(find_sets(folder)[0])


@pytest.mark.parametrize("folder", SETS, ids=[folder.name for folder in SETS])
def test_the_sets_of_this_repository_are_stubs_and_a_solved_one_is_found_out(clone, folder):
    copy = clone(folder)
    assert found(copy) == []
    (homework,) = find_sets(copy)
    reference = SOLUTIONS / folder.name.partition("_")[0] / "reference.py"
    shutil.copy(reference, homework.code)
    text = "\n".join(filled_in(homework))
    for exercise in homework.exercises:
        assert re.search(rf"\b{exercise.function}\b.* is filled in", text), exercise.function
    homework.code.write_text("import torch\n")
    missing = {f"{homework.code.name} has no stub of {e.function}" for e in homework.exercises}
    assert missing <= {*filled_in(homework)}


def test_cells_that_were_added_to_a_notebook_are_named(clone, tmp_path, capsys):
    copy = clone(SETS[0])
    for cell, name in (("shift-check", "f0a1b2c3"), ("tree-check", "also-mine")):
        change_cell(copy / "hw1.ipynb", cell, id=name, source=f"print({name!r})")
    assert cli.main(["release", str(copy), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "cells that you added" in said and "print('f0a1b2c3')" in said and "mine" not in said


HIDDEN = {
    "a helper": ("def _pass_on(x):\n    return x\n", "_pass_on"),
    "another name for it": ("ring_shift = lambda x: x\n", "ring_shift"),
    "commented out": ("#     y = torch.empty_like(x)\n", "a comment is code"),
    "imported": ("from mine import *\n", "from mine import"),
    "defined again": ("def ring_shift(x):\n    return x\n", "ring_shift is filled in"),
    "a method": ("class Mine:\n    def forward(self, x):\n        return x\n", "Mine"),
    "at import": ("import os\nos.environ['x'] = '1'\n", "runs code"),
}


@pytest.mark.parametrize(("more", "named"), HIDDEN.values(), ids=HIDDEN)
def test_a_set_with_solutions_is_refused_with_their_places(clone, tmp_path, capsys, more, named):
    copy = clone(SETS[0])
    with (copy / "hw1.py").open("a") as code:
        code.write("\n\n" + more)
    with pytest.raises(SystemExit):
        cli.main(["release", str(copy), "--out", str(tmp_path / "out")])
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(named, said) and "git checkout" in said and "usage" not in said
    assert "flat_broadcast" not in said and not (tmp_path / "out").exists()


def change_cell(notebook: Path, name: str, **changes: object) -> None:
    content = json.loads(notebook.read_text())
    for cell in content["cells"]:
        if cell["id"] == name:
            cell.update(changes)
    notebook.write_text(json.dumps(content))


def test_answers_in_the_notebook_are_found_and_its_outputs_stay_at_home(clone, tmp_path):
    copy = clone(SETS[0])
    output = {"output_type": "stream", "name": "stdout", "text": "10 of 10 points"}
    change_cell(copy / "hw1.ipynb", "shift-check", outputs=[output], execution_count=3)
    (copy / "solution.py").write_text("def ring_shift(x):\n    return x\n")
    (copy / "notes.md").write_text("```\ndef gather(x, root):\n```\n")
    learners, _, github, _ = release(find_sets(copy)[0], tmp_path / "out")
    with zipfile.ZipFile(learners) as bundle:
        names = sorted(Path(name).name for name in bundle.namelist())
        assert "10 of 10" not in bundle.read("hw1_moving/hw1.ipynb").decode()
    assert names == ["hw1.ipynb", "hw1.py", "test_hw1.py"]
    assert sorted(file.name for file in (github / "hw1_moving").iterdir()) == names
    change_cell(copy / "hw1.ipynb", "shift-guess", source="predict(hw1.ring_shift, sent=4000)")
    assert found(copy) == ["hw1.ipynb, cell shift-guess, line 1: sent is answered"]
    change_cell(copy / "hw1.ipynb", "shift-check", source="#     y = torch.empty_like(x)\n1 + 1")
    assert any("shift-check, line 1: a comment is code" in place for place in found(copy))
    change_cell(copy / "hw1.ipynb", "shift-check", source="def gather(x, root):\n    return x")
    assert "hw1.ipynb, cell shift-check, line 1: gather is filled in" in found(copy)


def test_what_it_writes_installs_from_the_bundled_wheel(clone, tmp_path):
    homework = find_sets(clone(SETS[0]))[0]
    out = tmp_path / "out"
    kept = out / "github" / ".git" / "config"
    kept.parent.mkdir(parents=True)
    kept.write_text("the teacher's")
    _, gradescope, github, _ = release(homework, out)
    assert kept.read_text() == "the teacher's"  # a repository made of the folder stays one
    with zipfile.ZipFile(gradescope) as bundle:
        bundle.extractall(tmp_path / "source")
    setup = (tmp_path / "source" / "setup.sh").read_text()
    workflow = (github / ".github" / "workflows" / "grade.yml").read_text()
    steps = yaml.safe_load(workflow)["jobs"]["grade"]["steps"]
    lines = [line for line in setup.splitlines() if "pip install" in line]
    lines += [step["run"] for step in steps if "pip install" in step.get("run", "")]
    first, second = re.findall(r'"([^" ]*parallel101[^" ]*)"', "\n".join(lines))
    assert (tmp_path / "source" / first.removeprefix("/autograder/source/")).is_file()
    assert (github / second).is_file()
    (wheel,) = github.glob("*.whl")
    target = tmp_path / "target"
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    installed, here = (
        {file.relative_to(top) for file in top.glob("parallel101/**/*.*") if file.is_file()}
        for top in (target, ROOT)
    )
    assert installed == {file for file in here if "__pycache__" not in file.parts}
    with zipfile.ZipFile(wheel) as bundle:
        record = bundle.read(next(name for name in bundle.namelist() if name.endswith("/RECORD")))
        name, digest, size = record.decode().splitlines()[0].rsplit(",", 2)
        hashed = hashlib.sha256(bundle.read(name)).digest()
    assert digest == f"sha256={base64.urlsafe_b64encode(hashed).rstrip(b'=').decode()}"
    assert int(size) == (ROOT / name).stat().st_size


def test_it_installs_from_the_teachers_address(clone, tmp_path):
    homework, mine = find_sets(clone(SETS[0]))[0], "git+https://example.org/me/parallel101@v1"
    _, gradescope, github, _ = release(homework, tmp_path / "out", library=mine)
    workflow = (github / ".github" / "workflows" / "grade.yml").read_text()
    assert f'"{mine}"' in workflow and not list(github.glob("*.whl"))
    with zipfile.ZipFile(gradescope) as bundle:
        assert f'"{mine}"' in bundle.read("setup.sh").decode()
        assert not any(name.endswith(".whl") for name in bundle.namelist())
    for other in ("parallel101", "parallel101==0.1.0", 'https://a.org/"; rm -rf /', "http://a.org"):
        assert not ADDRESS.fullmatch(other)
        with pytest.raises(ValueError, match="expected an address"):
            release(homework, tmp_path / "out", library=other)
