"""Finds the notebooks, the lessons of a folder and the homework beside it, and their repository.

A wheel brings both in parallel101/notebooks/. From there lessons can be read and run; to change
them or to write homework, `copy_notebooks` copies them to a folder of one's own.

`parallel101 lessons --repository owner/name` names the repository that a site belongs to. Where
GitHub builds the site, GitHub names it: GITHUB_REPOSITORY. Without either, pages have no links that
need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import NamedTuple
from urllib.parse import quote

from parallel101.laboratory import PACKAGE

CLONE = Path(PACKAGE).parent
IN_WHEEL = Path(PACKAGE, "notebooks")
COLAB = "https://colab.research.google.com/github"


def find_lessons(folder: Path | str | None = None, to_edit: bool = False) -> Path:
    """Return the folder with the lessons.

    That is `folder` if given. Otherwise it is the nearest lessons/ in the working directory or
    above it, or the one of an editable install, or unless `to_edit`, the one in the wheel.

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
    for place in (here, *here.parents, CLONE):
        known = place / "parallel101", place / "lessons" / "glossary.md"
        if (place / "lessons").is_dir() and any(file.exists() for file in known):
            return place / "lessons"
    if IN_WHEEL.is_dir() and not to_edit:
        return IN_WHEEL / "lessons"
    raise FileNotFoundError(
        f"there is no lessons/ in {here} or above it; to copy the lessons and the homework to this "
        "folder, run: parallel101 notebooks"
    )


def found_or_copied(find: Callable[[], Path]) -> Path:
    """Return the folder that `find` finds; with a wheel, after a copy of the notebooks to here.

    Raises:
        FileNotFoundError: there are no such notebooks, here or in a wheel.
        ValueError: they can't be copied.
    """
    try:
        return find()
    except FileNotFoundError:
        if not IN_WHEEL.is_dir():
            raise
        lessons, homework = copy_notebooks(Path())
        print(f"Copied the lessons and the homework to {lessons} and {homework}.")
        return find()


def copy_notebooks(out: Path) -> list[Path]:
    """Copy lessons/ and homework/ into the folder `out`, and return the two copies.

    They come from the wheel, or from the clone of an editable install.

    Raises:
        ValueError: `out` has a folder of that name already, or can't be written to.
    """
    source = IN_WHEEL if IN_WHEEL.is_dir() else CLONE
    copies = [out / "lessons", out / "homework"]
    for copy in copies:
        if copy.exists():
            other = "name another folder, e.g. parallel101 notebooks course"
            raise ValueError(f"{copy} exists already, and nothing was copied; {other}")
    for copy in copies:
        try:
            copytree(source / copy.name, copy, ignore=ignore_patterns(".*", "__pycache__"))
        except OSError as error:
            raise ValueError(f"cannot copy the notebooks to {out}: {error}") from error
    return copies


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
            known = ", ".join(n.stem for n in notebooks)
            raise ValueError(f"{name!r} {problem}; the lessons are: {known}")
        chosen += matches
    return sorted(set(chosen)) or notebooks


def homework_notebooks(folder: Path) -> dict[int, Path]:
    """Return the notebooks in the folder homework/ beside the lessons, by number."""
    found = {}
    for path in sorted((folder.parent / "homework").glob("hw*_*/hw*.ipynb")):
        if number := re.match(r"hw(\d+)_", path.parent.name):
            found[int(number[1])] = path
    return dict(sorted(found.items()))


class Repository(NamedTuple):
    """A repository on GitHub, at a branch or a tag."""

    name: str  # "owner/name"
    ref: str = "main"

    @classmethod
    def of(cls, text: str) -> Repository:
        """Return the repository that a user names.

        Args:
            text: owner/name, or owner/name@ref for a branch or tag other than main.

        Raises ValueError for any other text.
        """
        name, _, ref = text.partition("@")
        if not re.fullmatch(r"[\w-]+/[\w.-]+", name) or ("@" in text and not ref):
            raise ValueError(
                f"{text!r} is not a repository; expected OWNER/NAME, or OWNER/NAME@REF for a "
                "branch or tag other than main"
            )
        return cls(name, ref or "main")

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Repository | None:
        """Return the repository of the workflow that runs, or None without one on github.com."""
        server = environment.get("GITHUB_SERVER_URL", "https://github.com")
        name = environment.get("GITHUB_REPOSITORY")
        if not name or server != "https://github.com":
            return None
        return cls(name, environment.get("GITHUB_REF_NAME") or "main")

    @property
    def address(self) -> str:
        return f"https://github.com/{self.name}"

    def file(self, path: str) -> str:
        """Return the address of a file's page."""
        return f"{self.address}/blob/{quote(self.ref)}/{quote(path)}"

    def in_colab(self, notebook: str) -> str:
        """Return the address at which Colab opens a notebook of the repository."""
        return f"{COLAB}/{self.name}/blob/{quote(self.ref)}/{quote(notebook)}"
