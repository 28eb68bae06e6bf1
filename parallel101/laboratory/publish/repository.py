"""The repository that a site belongs to, where it is known.

`parallel101 lessons --repository owner/name` names it. Where GitHub builds the site, GitHub names
it: GITHUB_REPOSITORY. Without either, pages have no links that need it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote

COLAB = "https://colab.research.google.com/github"


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
