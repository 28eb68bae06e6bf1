"""Says whether what a page is made from has changed since it was written.

    digest(files, facts) ──▶ the end of a page ──▶ the next `parallel101 lessons` compares it

A lesson depends on the whole package, on the notebook and on the other files beside it. A page
that plays depends on the modules that it imports.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from parallel101.laboratory import PACKAGE

ROOT = Path(PACKAGE)


def digest(files: Iterable[Path], *facts: object) -> str:
    """Return a digest of files, by name and content, and of what else a page depends on."""
    found = hashlib.sha256(repr(facts).encode())
    for path in sorted(set(files)):
        found.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


@cache
def digest_of_package() -> str:
    """Return the digest of this package's files, without those of the interpreter or a wheel."""
    other = {"__pycache__", "notebooks"}
    files = (path for path in ROOT.rglob("*") if not other & {*path.relative_to(ROOT).parts})
    return digest(path for path in files if path.is_file())


def files_of_module(name: str) -> set[Path]:
    """Return the files of a module and of all modules of this package that it imports.

    The files beside the module that aren't Python belong to them.
    """
    found: set[Path] = set()
    todo = [name]
    while todo:
        if (path := _file_of(todo.pop())) and path not in found:
            found.add(path)
            todo += _imported(path)
    start = _file_of(name)
    assert start is not None, f"{name} is not a module of this package"
    return found | {path for path in start.parent.iterdir() if path.suffix in (".js", ".css")}


def _file_of(name: str) -> Path | None:
    package, *inside = name.split(".")
    if package != ROOT.name:
        return None
    base = ROOT.joinpath(*inside)
    return next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)


@cache
def _imported(path: Path) -> set[str]:
    """Return the names that a file imports when it runs, also inside functions."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    names: set[str] = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def marked(html: str, made_from: str) -> str:
    """Return a page that says from what it was made."""
    return html.replace("</body>", f"<!-- made from {made_from} -->\n</body>")


def is_unchanged(page: Path, made_from: str) -> bool:
    """Return whether there is such a page, made from the same files."""
    if not page.exists():
        return False
    said = re.search(r"<!-- made from (\w+) -->\s*</body>", page.read_text(encoding="utf-8")[-200:])
    return said is not None and said[1] == made_from
