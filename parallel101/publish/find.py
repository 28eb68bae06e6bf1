"""Finds the notebooks: the lessons of a folder, and the homework beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def find_lessons(folder: Path | str | None = None) -> Path:
    """Return the folder with the lessons.

    That is `folder` if given. Otherwise it is the nearest lessons/ in the working directory or
    above it, or the one of an editable install.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if folder is not None:
        if Path(folder).is_dir():
            return Path(folder).resolve()
        raise FileNotFoundError(
            f"{folder} is not a folder; give a folder with notebooks, e.g. --lessons lessons"
        )
    here = Path.cwd()
    for place in (here, *here.parents, Path(__file__).parents[2]):
        if (place / "lessons").is_dir() and (place / "parallel101").is_dir():
            return place / "lessons"
    raise FileNotFoundError(
        f"there is no lessons/ in {here} or above it; run this in a clone of parallel101, or give "
        "--lessons FOLDER"
    )


def select_lessons(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Return the notebooks of `folder` in order: all, or those in `names`.

    A name is 01, 01_collectives or 01_collectives.ipynb.

    Raises:
        ValueError: the folder has no notebooks, or a name matches no notebook or more than one.
    """
    notebooks = sorted(folder.glob("*.ipynb"))
    if not notebooks:
        raise ValueError(f"there is no notebook (*.ipynb) in {folder}")
    chosen = []
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        matches = [n for n in notebooks if n.stem == stem] or [
            n for n in notebooks if n.stem.startswith(stem)
        ]
        if len(matches) != 1:
            problem = "matches more than one lesson" if matches else "is not a lesson"
            raise ValueError(
                f"{name!r} {problem}; the lessons are: {', '.join(n.stem for n in notebooks)}"
            )
        chosen += matches
    return sorted(set(chosen)) or notebooks


def homework_notebooks(folder: Path) -> dict[int, Path]:
    """Return the notebooks in the folder homework/ beside the lessons, by number."""
    found = {}
    for path in sorted((folder.parent / "homework").glob("hw*_*/hw*.ipynb")):
        if number := re.match(r"hw(\d+)_", path.parent.name):
            found[int(number[1])] = path
    return found
