"""Puts the notebooks into the wheel. Everything else is in pyproject.toml.

    lessons/, homework/  ──▶  parallel101/notebooks/

So `pip install "parallel101[lessons]"` brings the lessons, without a clone. An editable install
uses those of the clone.
"""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

OF_A_LEARNER = ignore_patterns(".*", "__pycache__", "pictures")


class BuildWithNotebooks(build_py):
    """Builds the package, and copies the notebooks into it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("lessons", "homework"):
                copied = Path(self.build_lib, "parallel101", "notebooks", name)
                copytree(name, copied, ignore=OF_A_LEARNER, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithNotebooks})
