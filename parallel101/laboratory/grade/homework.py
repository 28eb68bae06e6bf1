"""Finds homework on disk, and keeps a learner's progress beside it.

homework/hw1_moving/    hw1.py           what the learner writes
                        test_hw1.py      the exercises; a larger set has one file for each, such as
                                         test_hw2_reduce.py
                        hw1.ipynb        the notebook that asks
                        .progress.json   hints taken, predictions               ┐ written here
                        pictures/        the latest picture of each exercise    ┘
"""

from __future__ import annotations

import json
import string
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel101.laboratory import PACKAGE
from parallel101.laboratory.grade.exercise import Exercise, load_exercises
from parallel101.laboratory.grade.plain_text import write_whole


@dataclass(frozen=True)
class HomeworkSet:
    """One folder of exercises, such as homework/hw1_moving."""

    code: Path  # the file that the learner writes, hw1.py
    # the files that declare the exercises: test_hw1.py, or test_hw2_reduce.py and others
    tests: tuple[Path, ...]
    exercises: tuple[Exercise, ...] = field(repr=False)  # by number

    @property
    def folder(self) -> Path:
        return self.code.parent

    @property
    def notebook(self) -> Path:
        return self.code.with_suffix(".ipynb")


def find_sets(path: Path) -> list[HomeworkSet]:
    """Return the sets in a folder, or the one that a file belongs to.

    Args:
        path: homework/, homework/hw1_moving, or a file in it: hw1.py, test_hw1.py or hw1.ipynb.

    Raises:
        FileNotFoundError: there is no homework in `path`.
    """
    folder = path if path.is_dir() else path.parent
    tests = sorted(folder.glob("test_hw*.py")) or sorted(folder.glob("*/test_hw*.py"))
    if path.is_file():
        tests = [file for file in tests if set_name(file) == set_name(path)]
    if not tests:
        raise FileNotFoundError(
            f"there is no homework in {path}: expected a folder with test_hw*.py, such as "
            "homework/hw1_moving (parallel101 notebooks copies homework/ to this folder)"
        )
    by_code: dict[Path, list[Path]] = {}
    for file in tests:
        by_code.setdefault(file.with_name(f"{set_name(file)}.py"), []).append(file)
    sets = []
    for code, files in by_code.items():
        exercises = [exercise for file in files for exercise in load_exercises(file)]
        exercises.sort(key=lambda exercise: in_order(exercise.number))
        sets.append(HomeworkSet(code, tuple(files), tuple(exercises)))
    return sets


def set_name(file: Path) -> str:
    """Return the name of the set that a file belongs to: hw2 for hw2.py and test_hw2_reduce.py."""
    return file.stem.removeprefix("test_").partition("_")[0]


def in_order(number: str) -> tuple[int, str]:
    """Return the key that sorts the numbers of exercises: 8b comes before 10."""
    return int("0" + number.rstrip(string.ascii_lowercase)), number


def find_homework() -> Path:
    """Return the nearest folder homework/ in the working directory or above it.

    If there is none, it is the one of an editable install.

    Raises:
        FileNotFoundError: there is none.
    """
    here = Path.cwd()
    for place in (here, *here.parents, Path(PACKAGE).parent):
        if any((place / "homework").glob("hw*/test_hw*.py")):
            return place / "homework"
    raise FileNotFoundError(
        f"there is no homework/ in {here} or above it; give the folder's path, or to copy the "
        "lessons and the homework to this folder, run: parallel101 notebooks"
    )


# ---- progress ----


class Progress:
    """The learner's work on one set, by function: hints, predictions, and checks that failed.

    It is kept in .progress.json.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / ".progress.json"
        self.of: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError):  # none yet, or not readable: begin again
            read = json.loads(self.path.read_text(encoding="utf-8"))
            entries = read.items() if isinstance(read, dict) else ()
            self.of = {name: entry for name, entry in entries if isinstance(entry, dict)}

    def get(self, function: str, name: str, default: Any) -> Any:
        """Return one entry, or `default` if there is none of that kind."""
        value = self.of.get(function, {}).get(name, default)
        return value if isinstance(value, type(default)) else default

    def note(self, function: str, **entries: Any) -> None:
        """Write entries to the file.

        If the folder can't be written to, nothing is kept, and that isn't an error.
        """
        self.of.setdefault(function, {}).update(entries)
        with suppress(OSError):
            write_whole(self.path, json.dumps(self.of, indent=1, ensure_ascii=False) + "\n")
