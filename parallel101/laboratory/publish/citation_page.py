"""The page that says how to cite parallel101, made from CITATION.cff.

The file's format is described at https://citation-file-format.github.io. GitHub reads it, too.
"""

from __future__ import annotations

from typing import Any

import yaml

from parallel101.laboratory.publish.repository import Repository


def citation(text: str, repository: Repository | None = None) -> str:
    """Return the page as Markdown: a sentence for a text, BibTeX, and the file itself.

    Args:
        text: of CITATION.cff.
        repository: the one with the code, for a file that names none.
    """
    said: dict[str, Any] = yaml.safe_load(text)
    authors = said["authors"]
    year = str(said.get("date-released", ""))[:4]
    address = said.get("repository-code") or said.get("url") or ""
    if repository is not None:
        address = address or repository.address
    fields = {
        "author": " and ".join(_name_in_bibtex(author) for author in authors),
        "title": f"{{{said['title']}}}",
        "version": said.get("version"),
        "year": year,
        "url": address,
    }
    lines = [f"  {field:7} = {{{value}}}," for field, value in fields.items() if value]
    bibtex = "\n".join(["@software{parallel101,", *lines, "}"])
    version = f", version {said['version']}" if said.get("version") else ""
    parts = [", ".join(map(_name, authors)), f"*{said['title']}*{version}", year, address]
    return (
        f"# Cite\n\n{said.get('message', '')}\n\n"
        f"## In a text\n\n{'. '.join(part for part in parts if part)}.\n\n"
        f"## BibTeX\n\n```\n{bibtex}\n```\n\n"
        f"## CITATION.cff\n\n```\n{text.strip()}\n```\n"
    )


def _name(author: dict[str, str]) -> str:
    """Return a person's or a group's name."""
    parts = ("given-names", "family-names", "name")
    return " ".join(author[part] for part in parts if part in author)


def _name_in_bibtex(author: dict[str, str]) -> str:
    if "name" in author:
        return f"{{{author['name']}}}"
    return ", ".join(author[part] for part in ("family-names", "given-names") if part in author)
