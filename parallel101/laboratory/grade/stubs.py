"""Says which functions of a homework set are filled in, so that no release gives solutions away.

hw1.py          each function that an exercise asks for is a stub: a docstring and
                raise NotImplementedError(…); so is each method of a class
                beside them there are imports, names for types, and functions whose docstring says
                "(this is given)"
hw1.ipynb       predict(…) has a question mark for each answer

It reads the files, and runs nothing.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from parallel101.laboratory.grade.homework import HomeworkSet

GIVEN = "this is given"  # in the docstring of a function that learners need and don't write
UNANSWERED = ("?", None, ...)
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CODE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Call, ast.Return, ast.For, ast.If, ast.With)


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
    for node in nodes:
        place = f"{name}, line {node.lineno}"
        if isinstance(node, DEFINED):
            if node.name not in functions and GIVEN not in (ast.get_docstring(node) or ""):
                asks = f"no exercise asks for {node.name}, and its docstring doesn't say ({GIVEN})"
                found.append(f"{place}: {asks}")
        elif not _is_plain(node, functions):
            found.append(f"{place}: runs code: {ast.unparse(node).splitlines()[0]}")
    written = {node.name for node in nodes if isinstance(node, DEFINED)}
    return found + [f"{name} has no stub of {function}" for function in sorted(functions - written)]


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


def given_in(code: Path) -> str:
    """Return the imports of a set's file, and the functions and classes in it that are given."""
    nodes = ast.parse(code.read_text(encoding="utf-8-sig")).body
    return "\n".join(
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, DEFINED) and GIVEN in (ast.get_docstring(node) or ""))
    )


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


# ---- cells of a notebook ----

# what a text that was handed in may raise when it is parsed: it is no program, has a null byte, or
# is nested too deeply
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
# of IPython's %% magics, those with Python below them
PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%writefile", "%%prun")
# a line for IPython: %timeit f(), !ls, f?, ?f, files = !ls
FOR_IPYTHON = re.compile(r"\s*([%!?]|[\w, ]+=\s*[%!]|[^#'\"]*\?\s*$)")


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
