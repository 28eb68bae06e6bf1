"""Puts the notebooks into the wheel. Everything else is in pyproject.toml.

    lessons/, homework/           ──▶  parallel101/notebooks/
    docs/*.md, CITATION.cff            and what the site's pages around the lessons are made from

So `pip install "parallel101[lessons]"` brings the lessons, without a clone. An editable install
uses those of the clone.
"""

from pathlib import Path
from shutil import copy, copytree, ignore_patterns, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py

OF_A_LEARNER = ignore_patterns(".*", "__pycache__", "pictures")


class BuildWithNotebooks(build_py):
    """Builds the package, and copies the notebooks into it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            notebooks = Path(self.build_lib, "parallel101", "notebooks")
            rmtree(notebooks, ignore_errors=True)  # of an earlier build
            for name in ("lessons", "homework"):
                copytree(name, notebooks / name, ignore=OF_A_LEARNER)
            for file in (*Path("docs").glob("*.md"), Path("CITATION.cff")):
                (notebooks / file.parent).mkdir(exist_ok=True)
                copy(file, notebooks / file)


setup(cmdclass={"build_py": BuildWithNotebooks})
