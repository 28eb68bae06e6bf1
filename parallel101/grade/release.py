"""`parallel101 release homework/hw1_moving --out DIR`: makes what a teacher needs for a set.

    DIR/hw1_moving.zip             for learners: the notebook, the file to fill in, the exercises;
                                   no solutions
    DIR/hw1_moving_gradescope.zip  for Gradescope: setup.sh, run_autograder, the exercises, this
                                   library, the secret seed
    DIR/github/                    for GitHub Classroom: the same folder as in the learners' zip,
                                   with a workflow that grades each push
    DIR/seed.txt                   the secret seed: it belongs to the teacher, and is in the
                                   Gradescope zip only

The cases are drawn from the seed. Learners see those of a public seed, and are graded on those of
the secret one.
"""

from __future__ import annotations

import secrets
import shutil
import stat
import zipfile
from pathlib import Path

import torch

from parallel101 import __version__
from parallel101.grade.homework import HomeworkSet

# of a homework folder; progress and pictures stay
HANDED_OUT = (".py", ".ipynb", ".md", ".png", ".svg")
# beside the package: what pip needs to install it
LIBRARY = ("pyproject.toml", "README.md", "LICENSE")

SETUP = """#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image. Everything is in /opt/grader, where
# any user can read Python and torch: when a submission is graded, each rank becomes a user of its
# own.
set -eu
apt-get update -qq
apt-get install -y -qq python3 python3-venv python3-pip
python3 -m venv /opt/grader
CPU=https://download.pytorch.org/whl/cpu
/opt/grader/bin/pip install --quiet --extra-index-url $CPU "torch=={torch}"
/opt/grader/bin/pip install --quiet {library}
chmod 700 /autograder/source
"""

RUN = """#!/usr/bin/env bash
# Gradescope runs this for each submission, as root. Results are written after each exercise, so a
# time limit costs only the exercises that are left.
set -u
base=${{AUTOGRADER:-/autograder}}
source=$base/source results=$base/results submission=$base/submission
mkdir -p "$results"
chmod 700 "$source" "$results"
exec "${{GRADER:-/opt/grader/bin/parallel101}}" grade "$source/{name}" --submission "$submission" \\
  --gradescope "$results/results.json" --seed-file "$source/seed.txt"
"""

WORKFLOW = """# GitHub Classroom: grades each push, on the public cases.
# Points and verdicts are in the log and in results.json.
name: grade
on: [push, workflow_dispatch]
jobs:
  grade:
    runs-on: ubuntu-latest
    timeout-minutes: 15
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: >-
          pip install --extra-index-url https://download.pytorch.org/whl/cpu
          "torch=={torch}" "parallel101=={version}"
      - run: parallel101 grade {name} --submission {name} --json results.json
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: results
          path: results.json
"""


def release(homework: HomeworkSet, out: Path, seed: str | None = None) -> list[Path]:
    """Write the bundles of one homework set. Returns the files and folders that were written.

    Args:
        homework: the set.
        out: the folder for the bundles; it is made. A seed.txt in it is used again.
        seed: the secret seed; None: that of an earlier release into `out`, or a new one.
    """
    out.mkdir(parents=True, exist_ok=True)
    seed_file = out / "seed.txt"
    if seed is None:
        seed = seed_file.read_text().strip() if seed_file.exists() else secrets.token_hex(16)
    seed_file.write_text(seed + "\n")
    seed_file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    name = homework.folder.name
    learners, gradescope, github = (
        out / f"{name}.zip",
        out / f"{name}_gradescope.zip",
        out / "github",
    )
    files = handed_out(homework)
    with zipfile.ZipFile(learners, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in files:
            bundle.write(file, f"{name}/{file.name}")
    _write_gradescope(gradescope, homework, seed)
    shutil.rmtree(github, ignore_errors=True)
    (github / name).mkdir(parents=True)
    for file in files:
        shutil.copy(file, github / name / file.name)
    workflow = github / ".github" / "workflows" / "grade.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text(WORKFLOW.format(name=name, torch=_torch_version(), version=__version__))
    return [learners, gradescope, github, seed_file]


def handed_out(homework: HomeworkSet) -> list[Path]:
    """The files of a set that learners get. The solutions are elsewhere, in tests/homework/."""
    own = [
        file
        for file in sorted(homework.folder.iterdir())
        if file.is_file() and file.suffix in HANDED_OUT and file.name[0] != "."
    ]
    for_all = homework.folder.parent / "conftest.py"  # with it, pytest shows verdicts
    return (
        [*own, for_all]
        if for_all.is_file() and not (homework.folder / "conftest.py").exists()
        else own
    )


def _write_gradescope(path: Path, homework: HomeworkSet, seed: str) -> None:
    name, root = homework.folder.name, Path(__file__).parents[2]
    from_source = all((root / file).is_file() for file in LIBRARY)
    library = "/autograder/source/library" if from_source else f'"parallel101=={__version__}"'
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        _add(bundle, "setup.sh", SETUP.format(torch=_torch_version(), library=library), 0o755)
        _add(bundle, "run_autograder", RUN.format(name=name), 0o755)
        _add(bundle, "seed.txt", seed + "\n", 0o600)
        for declared in (*homework.tests, homework.code):
            _add(bundle, f"{name}/{declared.name}", declared.read_text(encoding="utf-8"), 0o600)
        if from_source:
            for file in LIBRARY:
                bundle.write(root / file, f"library/{file}")
            for source in sorted((root / "parallel101").rglob("*")):
                if source.is_file() and "__pycache__" not in source.parts:
                    bundle.write(source, f"library/{source.relative_to(root)}")


def _add(bundle: zipfile.ZipFile, name: str, text: str, mode: int) -> None:
    entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
    entry.external_attr = (stat.S_IFREG | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    bundle.writestr(entry, text)


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]
