"""Finds and reads what a learner handed in: a Python file or a notebook, or a folder with one.

Also here: which functions stand in the text of a program or of a notebook's cells, and which of
them are untouched stubs. The texts are parsed, and never run.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from parallel101.laboratory.grade.homework import HomeworkSet
from parallel101.laboratory.grade.plain_text import plain, plain_name
from parallel101.laboratory.grade.remote import Submission

MOST_SOURCE = 1 << 20  # bytes of a file that is handed in
MOST_NOTEBOOK = 1 << 25  # of a notebook, which may have pictures
MOST_FILES = 20  # that are read
TESTS = ("test_", "conftest")
SUFFIXES = (".py", ".ipynb")
GIVEN = "this is given"  # in the docstring of a function that learners need and don't write
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
NAMED = (ast.Assign, ast.AnnAssign)
# what a text that was handed in may raise when it is parsed: it is no program, has a null byte, or
# is nested too deeply
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
# of IPython's %% magics, those with Python below them
PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%writefile", "%%prun")
# a line for IPython: %timeit f(), !ls, f?, ?f, files = !ls
FOR_IPYTHON = re.compile(r"\s*([%!?]|[\w, ]+=\s*[%!]|[^#'\"]*\?\s*$)")


class NoSubmission(ValueError):
    """Nothing that was handed in can be graded. The message says what was expected.

    `reason` says in a few words why there are no points.
    """

    def __init__(self, message: str, reason: str = "not readable"):
        super().__init__(message)
        self.reason = reason


def read(path: Path, homework: HomeworkSet) -> Submission:
    """Return what was handed in: a Python file or a notebook, or a folder with one.

    In a folder it is the first file that has one of the functions written: hw1.py, then hw1*.py,
    hw1*.ipynb, and then any other. Messages call it by its file name, and quote its lines.

    Raises NoSubmission, with what was expected.
    """
    try:
        return _read(path, homework)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        why = getattr(error, "strerror", None) or str(error)
        raise NoSubmission(f"{plain_name(path)} can't be read: {plain(why)}") from None


def _read(path: Path, homework: HomeworkSet) -> Submission:
    _refuse_links(path, path)
    wanted = [exercise.function for exercise in homework.exercises]
    files = _files_in(path, homework.code)
    programs = {}
    for file in files:
        with suppress(NoSubmission, OSError, RuntimeError):  # the chosen file raises it below
            programs[file] = _program(file, path, homework)
    written = {file: bound(program, wanted) for file, program in programs.items()}
    chosen = next((file for file in programs if written[file]), files[0])
    name, text = plain_name(chosen), programs.get(chosen) or _program(chosen, path, homework)
    if not written[chosen] and len(files) > 1 and not name.startswith(homework.code.stem):
        raise NoSubmission(
            f"there is no {homework.code.name}, and none of {', '.join(map(plain_name, files))} "
            f"defines one of {', '.join(wanted)}",
            "wrong file name",
        )
    # a file with another name may be among other learners' files
    own_folder = path.is_dir() or chosen.name == homework.code.name
    note = "" if chosen == files[0] else f"{plain_name(files[0])} has none of the functions. "
    for other in programs:
        if more := written[other] - written[chosen]:
            note += f"{plain_name(other)} has {', '.join(sorted(more))}, which isn't graded. "
    beside = dict(_neighbours(chosen, path)) if own_folder else {}
    note = note and f"{name} is graded. {note.strip()}"
    submission = Submission(Path(name), text, beside, homework.code.stem, note)
    for named, source in submission.sources.items():  # None: not read from disk again
        linecache.cache[named] = (len(source), None, source.splitlines(keepends=True), named)
    return submission


def _program(file: Path, path: Path, homework: HomeworkSet) -> str:
    """Return the text of a Python file, or the program in a notebook."""
    name = plain_name(file)
    _refuse_links(file, path)
    most = MOST_SOURCE if file.suffix == ".py" else MOST_NOTEBOOK
    if (size := file.stat().st_size) > most:
        raise NoSubmission(f"{name} has {size:,} bytes; expected a program of at most {most:,}")
    try:
        text = file.read_text(encoding="utf-8-sig")  # line endings of Windows become \n
    except UnicodeDecodeError as error:
        raise NoSubmission(
            f"{name} is not text in UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from None
    return functions_in_notebook(name, text, homework) if file.suffix == ".ipynb" else text


def _refuse_links(file: Path, path: Path) -> None:
    """Raise an error for a link that was handed in.

    It could show the learner a file that only the grader may read, such as the secret seed.
    """
    handed_in = path.parent.resolve() / path.name
    if not file.resolve().is_relative_to(handed_in):
        raise NoSubmission(f"{plain_name(file)} is a link to another file; hand in the file itself")


def _files_in(path: Path, code: Path) -> list[Path]:
    """Return the files that may be the submission, the likeliest first.

    Raises NoSubmission if there is none.
    """
    name = code.name
    if path.is_dir():
        found = [
            file
            for file in path.rglob("*")
            if file.suffix in SUFFIXES
            and file.is_file()
            and not any(part[0] == "." for part in file.relative_to(path).parts)
            and not file.name.startswith(TESTS)
        ]
        if found:

            def unlikely(file: Path) -> tuple:
                ours = file.name.startswith(code.stem)
                return file.name != name, not ours, file.suffix == ".ipynb", len(file.parts), file

            return sorted(found, key=unlikely)[:MOST_FILES]
        there = ", ".join(sorted(plain_name(file) for file in path.iterdir())[:8]) or "nothing"
        what = f"there is no {name} in what was handed in; there is {there}"
    elif path.exists():
        if path.suffix in SUFFIXES and path.is_file():
            return [path]
        raise NoSubmission(f"{plain_name(path)} is not a Python file; expected {name}")
    else:
        what = f"{plain(str(path))} does not exist; expected {name}, or a folder with it"
    raise NoSubmission(what, "not handed in")


def _neighbours(file: Path, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, source) for other Python files beside the file, which it may import."""
    left = MOST_SOURCE  # bytes of all of them
    for other in sorted(file.parent.glob("*.py"))[:50]:
        with suppress(OSError, RuntimeError, UnicodeDecodeError, NoSubmission):
            _refuse_links(other, path if path.is_dir() else other)
            # not a folder, nor a pipe, of which nobody would write the end
            readable = other.is_file() and other.stat().st_size <= left
            if readable and other != file and not other.name.startswith(TESTS):
                source = other.read_text(encoding="utf-8-sig")
                left -= len(source)
                yield other.stem, source


def student(path: Path) -> str:
    """Return the learner's name: the name of the file or folder."""
    return plain_name(path.stem if path.is_file() else path.name)


def submissions_in(path: Path, homework: HomeworkSet) -> list[Path] | None:
    """Return the submissions in a folder: Python files, notebooks and folders.

    None if `path` is one submission itself.
    """
    if path.is_file() or not path.is_dir() or (path / homework.code.name).is_file():
        return None
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    return [entry for entry in entries if entry.suffix in SUFFIXES or entry.is_dir()]


# ---- the text of a program ----


def functions_in_notebook(name: str, text: str, homework: HomeworkSet) -> str:
    """Return the imports, functions and constants of a notebook's cells, below what its set gives.

    import torch                      kept
    def ring_shift(x): …              kept, with its decorators
    from hw1 import ring_shift        left out: the program takes the place of hw1
    SCALE = 2                         kept if a function uses SCALE
    ring_shift?     %timeit …         not Python: left out, like cells of another language
    check(ring_shift)                 left out, as are all other calls

    Raises NoSubmission if it is no notebook, or defines none of the functions of the set.
    """
    wanted = [exercise.function for exercise in homework.exercises]
    try:
        cells = [parsed(source) for _, source in code_cells(text)]
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise NoSubmission(f"{name} is not a notebook that can be read: {error!r}") from None
    own = ast.parse(homework.code.read_text(encoding="utf-8-sig")).body
    nodes = [node for node in own if not isinstance(node, DEFINED) or is_given(node)]
    nodes += [node for _, statements in cells for node in statements or ()]
    used = _used(nodes)
    parts = [ast.unparse(node) for node in nodes if _belongs(node, used, homework.code.stem)]
    # a mistake in one of the functions: the learner is shown where
    parts += [text for text, known in cells if known is None and _defined_in_text(text, wanted)]
    program = "\n\n".join(parts) + "\n"
    if not _defined_in_text(program, wanted):
        raise NoSubmission(
            f"{name} defines none of {', '.join(wanted)}. The functions are in the .py file beside "
            "the notebook: hand in that file"
        )
    return program


def bound(text: str, wanted: Sequence[str]) -> set[str]:
    """Return which of the names `wanted` a program defines or imports, except for stubs.

    A program that can't be parsed has those that it seems to define.
    """
    _, nodes = parsed(text)
    if nodes is None:
        return _defined_in_text(text, wanted)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, DEFINED):
            names |= {node.name} if not is_stub(node) else set()
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, NAMED):
            names |= _names(node, ast.Store)
    return set(wanted) if "*" in names else names & set(wanted)


def is_given(node: ast.AST) -> bool:
    """Return whether a function or class is there for learners, who don't write it."""
    return isinstance(node, DEFINED) and GIVEN in (ast.get_docstring(node) or "")


def is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Return whether nothing is written yet.

    A stub has only a docstring, super().__init__() and NotImplementedError.

    A class is a stub if all its methods are.
    """
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if isinstance(node, ast.ClassDef):
        methods = ast.FunctionDef | ast.AsyncFunctionDef
        return all(isinstance(method, methods) and is_stub(method) for method in body)
    lines = [ast.unparse(line) for line in body]
    raised = all(re.match(r"raise NotImplementedError(\(|$)", line) for line in lines[-1:])
    return raised and {*lines[:-1]} <= {"super().__init__()"} and not node.decorator_list


def _defined_in_text(text: str, wanted: Sequence[str]) -> set[str]:
    definition = r"^\s*(?:async\s+)?(?:def|class)\s+"
    return {name for name in wanted if re.search(rf"{definition}{name}\b", text, re.MULTILINE)}


def _used(nodes: Sequence[ast.stmt]) -> set[str]:
    """Return the names that functions and classes use, and the names that those are made of."""
    defined: list[ast.stmt] = [node for node in nodes if isinstance(node, DEFINED)]
    codes: list[types.CodeType] = []
    with suppress(*UNREADABLE):  # loading the program says so
        codes.append(compile(ast.Module(defined, []), "cell", "exec"))
    used: set[str] = set()
    for code in codes:  # the codes in it are added meanwhile
        used.update(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    for node in reversed(nodes):  # what a constant is made of comes before it
        if isinstance(node, NAMED) and _names(node, ast.Store) & used:
            used |= _names(node, ast.Load)
    return used


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the names that a statement stores, or loads."""
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, context)}


def _belongs(node: ast.stmt, used: set[str], module: str) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        from_itself = isinstance(node, ast.ImportFrom) and node.module == module
        return "parallel101" not in ast.unparse(node) and not from_itself
    if isinstance(node, NAMED):
        return bool(_names(node, ast.Store) & used)
    return isinstance(node, DEFINED)


def code_cells(notebook: str) -> list[tuple[str, str]]:
    """Return the id and the text of each cell of code.

    Raises ValueError, KeyError or TypeError for a text that is no notebook.
    """
    return [
        (cell.get("id", ""), "".join(cell["source"]))
        for cell in json.loads(notebook)["cells"]
        if cell["cell_type"] == "code"
    ]


def parsed(source: str) -> tuple[str, list[ast.stmt] | None]:
    """Return a cell as Python, without IPython's syntax: its text, and its statements.

    The statements are None if it isn't Python.
    """
    first = source.lstrip().partition("\n")[0]
    if first.startswith("%%"):
        if not first.startswith(PYTHON_CELLS):
            return "", None
        source = source.replace(first, "", 1)
    plain = "\n".join(
        re.match(r"\s*", line)[0] + "pass" if FOR_IPYTHON.match(line) else line  # type: ignore[index]
        for line in source.split("\n")
    )
    for text in (source, plain):  # a line of a docstring may look as if it were for IPython
        with suppress(*UNREADABLE):
            return text, ast.parse(text).body
    return plain, None
