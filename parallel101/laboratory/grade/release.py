"""`parallel101 release homework/hw1_moving --out DIR`: makes what a teacher needs for a set.

    DIR/hw1_moving.zip             for learners: the notebook, the file to fill in, the exercises;
                                   no solutions
    DIR/hw1_moving_gradescope.zip  for Gradescope: setup.sh, run_autograder, the exercises, this
                                   library as a wheel, the secret seed
    DIR/github/                    for GitHub Classroom: the same folder as in the learners' zip,
                                   with a workflow that grades each push, and the same wheel
    DIR/seed.txt                   the secret seed: it belongs to the teacher, and is in the
                                   Gradescope zip only

The cases are drawn from the seed. Learners see those of a public seed, and are graded on those of
the secret one.

A set that is filled in is refused: its files are read, and nothing is run.

hw1.py          each function that an exercise asks for is a stub: a docstring and
                raise NotImplementedError(…); so is each method of a class
                beside them there are imports, names for types, and functions whose docstring says
                "(this is given)"
hw1.ipynb       predict(…) has a question mark for each answer

Autograders install this library from the wheel, or
from the address that the teacher gives with --library, and never from an index, where somebody else
may own its name.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import tokenize
import zipfile
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO

import torch

from parallel101.laboratory import PACKAGE
from parallel101.laboratory.grade.handed_in import (
    DEFINED,
    GIVEN,
    code_cells,
    is_given,
    is_stub,
    parsed,
)
from parallel101.laboratory.grade.homework import HomeworkSet

# what the text of a set may need beside its own files
FIGURES = (".png", ".svg")
# where a teacher may keep this library
ADDRESS = re.compile(r"(git\+https|git\+ssh|https)://[\w.:/@%+~#=&?-]+")

UNANSWERED = ("?", None, ...)
CODE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Call, ast.Return, ast.For, ast.If, ast.With)

# of the package, in its wheel
LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", "notebooks")  # graders need no notebooks
TIME = (2026, 1, 1, 0, 0, 0)  # of all entries, so that the same files give the same wheel
KIND = "Wheel-Version: 1.0\nGenerator: parallel101\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

TEMPLATES = Path(__file__).with_name("templates")
SETUP, RUN, WORKFLOW = (
    (TEMPLATES / name).read_text() for name in ("setup.sh", "run_autograder.sh", "grade.yml")
)


def release(
    homework: HomeworkSet, out: Path, seed: str | None = None, library: str | None = None
) -> list[Path]:
    """Write the bundles of one homework set. Returns the files and folders that were written.

    Args:
        homework: the set.
        out: the folder for the bundles; it is made. A seed.txt in it is used again.
        seed: the secret seed; None: that of an earlier release into `out`, or a new one.
        library: the address from which autograders install this library, such as
            git+https://github.com/me/parallel101@v1; None: from a wheel in the bundle.

    Raises:
        ValueError: the set has solutions, or `library` is not an address. Nothing is written.
    """
    if found := filled_in(homework):
        folder, places = os.path.relpath(homework.folder), "".join(f"\n  {one}" for one in found)
        raise ValueError(
            f"{folder} is not released, because learners would get what is filled in:{places}\n"
            "Release it from a clone in which nothing is filled in, or copy your solution "
            f"elsewhere and get the stubs back: git checkout -- {folder}"
        )
    if library is not None and not ADDRESS.fullmatch(library):
        raise ValueError(
            f"--library {library!r}: expected an address, such as "
            "git+https://github.com/me/parallel101@v1 or https://example.org/parallel101.whl. The "
            "name parallel101 may be somebody else's on an index"
        )
    wheel, packed = (None, b"") if library is not None else library_wheel()
    out.mkdir(parents=True, exist_ok=True)
    seed_file = out / "seed.txt"
    if seed is None:
        seed = seed_file.read_text().strip() if seed_file.exists() else secrets.token_hex(16)
    seed_file.write_text(seed + "\n")
    seed_file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    name = homework.folder.name
    learners, gradescope, github = (
        out / path for path in (f"{name}.zip", f"{name}_gradescope.zip", "github")
    )
    files = {f"{name}/{file.name}": file.read_bytes() for file in handed_out(homework)}
    notebook = f"{name}/{homework.notebook.name}"
    if notebook in files:
        files[notebook] = without_outputs(files[notebook].decode()).encode()
    _write_zip(learners, files, 0o644)
    own = {"name": name, "torch": torch.__version__.partition("+")[0]}
    setup = _filled(SETUP, own | {"library": library or f"/autograder/source/{wheel}"})
    graders = {f"{name}/{file.name}" for file in (*homework.tests, homework.code)}
    wheels = {wheel: packed} if wheel else {}
    scripts = {"setup.sh": setup, "run_autograder": _filled(RUN, own)}
    graded = {file: content for file, content in files.items() if file in graders}
    secret = {"seed.txt": f"{seed}\n".encode()}
    _write_zip(gradescope, scripts | secret | graded | wheels, 0o600, executable=scripts)

    # only what a release writes: a teacher may have made a repository of this folder
    shutil.rmtree(github / name, ignore_errors=True)
    for old in github.glob("parallel101-*.whl"):
        old.unlink()
    workflow = _filled(WORKFLOW, own | {"library": library or f"./{wheel}"})
    written = files | wheels | {".github/workflows/grade.yml": workflow}
    for file, content in written.items():
        (github / file).parent.mkdir(parents=True, exist_ok=True)
        (github / file).write_bytes(content)
    return [learners, gradescope, github, seed_file]


def _filled(template: str, values: Mapping[str, str]) -> bytes:
    """Return a template with a value in place of each name in braces."""
    return re.sub(r"\{(name|torch|library)\}", lambda found: values[found[1]], template).encode()


def handed_out(homework: HomeworkSet) -> list[Path]:
    """Return the files of a set that learners get: stubs, exercises, notebook and its figures.

    Anything else in the folder, such as a solution.py or notes, stays with the teacher.
    """
    folder = homework.folder
    figures = [file for file in sorted(folder.iterdir()) if file.suffix in FIGURES]
    files = [homework.code, *homework.tests, homework.notebook, *figures]
    # with it, pytest shows verdicts
    conftest = (folder / "conftest.py", folder.parent / "conftest.py")
    files += [file for file in conftest if file.is_file()][:1]
    return [file for file in files if file.is_file() and file.name[0] != "."]


# ---- what is filled in ----


def filled_in(homework: HomeworkSet) -> list[str]:
    """Return a sentence for each place in a set's files that is, or may be, a solution."""
    functions = {exercise.function for exercise in homework.exercises}
    name = homework.code.name
    parts = [(name, homework.code.read_text(encoding="utf-8-sig"))]
    try:
        nodes = ast.parse(parts[0][1]).body
        cells = enumerate(_cells_of(homework), 1)
        parts += [(f"{homework.notebook.name}, cell {id or i}", text) for i, (id, text) in cells]
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        return [f"{homework.folder.name} has a file that can't be read: {error!r}"]
    found = []
    for place, source in parts:
        text, statements = parsed(source)
        said = [(line, f"a comment is code: {code}") for line, code in _code_in_comments(text)]
        for node in (part for top in statements or () for part in ast.walk(top)):
            if isinstance(node, DEFINED) and node.name in functions and not is_stub(node):
                said.append((node.lineno, f"{node.name} is filled in"))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "predict":
                answers = [(one.arg, getattr(one.value, "value", 0)) for one in node.keywords]
                given = [arg for arg, value in answers if value not in UNANSWERED]
                said += [(node.lineno, f"{arg} is answered") for arg in given]
        found += [f"{place}, line {line}: {what}" for line, what in said]
    names = {node.name for node in nodes if isinstance(node, DEFINED)}
    for node in nodes:
        what = ""
        if isinstance(node, DEFINED):
            if node.name not in functions and not is_given(node):
                what = f"no exercise asks for {node.name}, and its docstring doesn't say ({GIVEN})"
        elif not _is_plain(node, functions):
            what = f"runs code: {ast.unparse(node).splitlines()[0]}"
        found += [f"{name}, line {node.lineno}: {what}"] if what else []
    return found + [f"{name} has no stub of {function}" for function in sorted(functions - names)]


def _cells_of(homework: HomeworkSet) -> list[tuple[str, str]]:
    if not homework.notebook.is_file():
        return []
    return code_cells(homework.notebook.read_text(encoding="utf-8"))


def scratch_cells(homework: HomeworkSet) -> list[str]:
    """Return the cells of code that were added in Jupyter, which gives them such ids."""
    return [
        source.strip().partition("\n")[0]
        for name, source in _cells_of(homework)
        if re.fullmatch(r"[0-9a-f]{8}[0-9a-f-]*", name or "00000000") and source.strip()
    ]


def without_outputs(notebook: str) -> str:
    """Return a notebook's text without what its cells printed and drew."""
    content = json.loads(notebook)
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _code_in_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments that are Python, such as a solution that is commented out; not # hint(…)."""
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            text = token.string.lstrip("# ")
            if token.type == tokenize.COMMENT and not text.startswith("hint("):
                with suppress(SyntaxError, ValueError):
                    if any(isinstance(node, CODE) for node in ast.walk(ast.parse(text))):
                        yield token.start[0], token.string


def _is_plain(node: ast.stmt, functions: set[str]) -> bool:
    """Return whether it is an import, a docstring, or a name for a type or a number."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return all(name.name != "*" for name in node.names)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    runs = any(isinstance(part, ast.Call | ast.Lambda) for part in ast.walk(node))
    to_names = all(isinstance(target, ast.Name) for target in targets)
    return to_names and not runs and not names & functions


# ---- this library as a wheel ----


def library_wheel() -> tuple[str, bytes]:
    """Return the file name and the content of a wheel of this library, for pip to install.

    It is the package as it runs here, with its metadata as it was installed here. The format is
    that of the Python packaging specifications, "Binary distribution format". Nothing is built, so
    no network is needed, and the installed package is enough.

    Raises ValueError if the library was never installed here, and so has no metadata.
    """
    try:
        installed = distribution("parallel101")
    except PackageNotFoundError:
        raise ValueError(
            "parallel101 is not installed here, so there is no metadata for its wheel: run "
            "pip install -e . in its folder, or give its address with --library"
        ) from None
    named = f"parallel101-{installed.version}"
    files = {
        f"parallel101/{file.relative_to(PACKAGE).as_posix()}": file.read_bytes()
        for file in sorted(Path(PACKAGE).rglob("*"))
        if file.is_file() and not set(LEFT_OUT) & set(file.parts) and file.name[0] != "."
    }
    texts = {
        "METADATA": installed.read_text("METADATA") or installed.read_text("PKG-INFO") or "",
        "WHEEL": KIND,
        "entry_points.txt": installed.read_text("entry_points.txt") or "",
        "licenses/LICENSE": installed.read_text("licenses/LICENSE") or "",
    }
    files |= {f"{named}.dist-info/{name}": text.encode() for name, text in texts.items()}
    record = f"{named}.dist-info/RECORD"
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    packed = io.BytesIO()
    _write_zip(packed, files, 0o644)
    return f"{named}-py3-none-any.whl", packed.getvalue()


def _write_zip(
    file: Path | IO[bytes], files: dict[str, bytes], mode: int, executable: Container[str] = ()
) -> None:
    """Write a zip of files with this mode, or 0o755. All have the same time."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, TIME)
            entry.external_attr = (stat.S_IFREG | (0o755 if name in executable else mode)) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
