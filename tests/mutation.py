"""How many small changes of the package do the tests catch?

    pip install coverage
    python -m tests.mutation collect    # runs the tests, and notes which lines each one executes
    python -m tests.mutation try 32     # changes 32 places in each folder, one at a time
    python -m tests.mutation report     # the share that was caught, with Wilson's 95 % intervals
    python -m tests.mutation repeats    # tests that execute nothing that several others don't

A change is of one operator, constant, condition, argument or statement in a function. It is tried
in a copy of the clone, with tests that execute its line: the folder's own first, then the quickest,
40 seconds in all; slow tests and the browser's take no part. A failure or a hang catches it. What
was found is kept in build/mutation.
"""

from __future__ import annotations

import ast
import atexit
import copy
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

SEED, SECONDS = 0, 40
KEPT = Path(os.environ.get("MUTATION", "build/mutation")).absolute()
PAIRS = "Add Sub, Sub Add, Mult Div, Div Mult, FloorDiv Div, Mod FloorDiv, Pow Mult, And Or, Or And"
PAIRS += ", Lt LtE, LtE Lt, Gt GtE, GtE Gt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is, In NotIn"
INSTEAD = {getattr(ast, a): getattr(ast, b) for a, b in map(str.split, PAIRS.split(", "))}
measured, took = [], defaultdict(float)  # this process's coverage; each test's seconds


def measure() -> None:  # in each process of the tests, which imports this file as sitecustomize
    import coverage

    def start() -> None:
        test = Path(os.environ.get("MUTATION_TEST", os.devnull)).read_text()
        new = coverage.Coverage(None, source_pkgs=["parallel101"], config_file=False, context=test)
        new._warn = lambda *_, **__: None  # that none of our lines ran
        [old.stop() for old in measured]
        measured[:] = [new]
        new.start()

    def save(leave=lambda code: None, code: int = 0) -> None:
        with suppress(Exception), open(KEPT / f"lines-{os.getpid()}", "a") as out:
            measured[0].stop()  # and a learner's process may write nothing
            data = measured[0].get_data()
            for file in data.measured_files():
                for line, tests in data.contexts_by_lineno(file).items():
                    print(json.dumps([file, line, tests]), file=out)
        leave(code)

    start()
    os.register_at_fork(after_in_child=start)
    atexit.register(save)
    os._exit = lambda code, leave=os._exit: save(leave, code)


def pytest_configure() -> None:
    os.environ["MUTATION_TEST"] = str(KEPT / f"test-{os.getpid()}")
    Path(os.environ["MUTATION_TEST"]).touch()


def pytest_runtest_logstart(nodeid: str) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        Path(os.environ["MUTATION_TEST"]).write_text(nodeid)
        sys.modules["sitecustomize"].measured[0].switch_context(nodeid)


def pytest_runtest_logreport(report) -> None:
    took[report.nodeid] += math.inf if report.failed else report.duration


def collect() -> None:
    shutil.rmtree(KEPT, ignore_errors=True)
    (KEPT / "start").mkdir(parents=True)
    shutil.copy(__file__, KEPT / "start/sitecustomize.py")
    paths = {"PYTHONPATH": f"{KEPT / 'start'}:{Path.cwd()}", "MUTATION": str(KEPT)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "tests.mutation"]
    subprocess.run([*command, "-m", "not slow and not browser"], env=os.environ | paths)
    number = {test: i for i, test in enumerate(json.loads((KEPT / "took.json").read_text()))}
    lines = defaultdict(set)
    for noted in KEPT.glob("lines-*"):
        for file, line, tests in map(json.loads, noted.read_text().splitlines()):
            lines[f"{os.path.relpath(file)}:{line}"].update(number[t] for t in tests if t in number)
    (KEPT / "lines.json").write_text(json.dumps({at: sorted(lines[at]) for at in lines}))


def pytest_sessionfinish() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        (KEPT / "took.json").write_text(json.dumps(took))


def changes(tree: ast.AST, inside: bool = False):
    """Yield each place in a function that can be changed, and what it becomes."""
    for node in ast.iter_child_nodes(tree):
        new, kind = copy.deepcopy(node), type(node)
        if kind in (ast.FunctionDef, ast.AsyncFunctionDef):
            for statement in node.body:
                yield from changes(ast.Module([statement], []), inside=True)
            continue
        if kind is ast.JoinedStr or not inside:  # before Python 3.12 its parts have no places
            yield from () if inside else changes(node)
            continue
        if isinstance(getattr(node, "op", None), tuple(INSTEAD)):
            new.op = INSTEAD[type(node.op)]()
            yield node, ast.unparse(new)
        elif kind is ast.Compare and type(node.ops[0]) in INSTEAD:
            new.ops[0] = INSTEAD[type(node.ops[0])]()
            yield node, ast.unparse(new)
        elif kind is ast.Constant and isinstance(node.value, (int, float)):
            yield node, repr(not node.value if isinstance(node.value, bool) else node.value + 1)
        elif kind is ast.Call and (node.keywords or len(node.args) > 1):
            new.args[:2] = node.args[:2] if node.keywords else node.args[1::-1]
            new.keywords[-1:] = []
            yield node, ast.unparse(new)
        elif kind in (ast.Assign, ast.Raise, ast.Expr, ast.Return):
            if not isinstance(getattr(node, "value", node), (ast.Constant, type(None))):
                yield node, "return None" if kind is ast.Return else "pass"
        elif kind in (ast.If, ast.While, ast.IfExp):
            yield node.test, f"not ({ast.unparse(node.test)})"
        yield from changes(node, inside)


def sample(each: int) -> list[tuple]:
    """Draw (floor, folder, file, place, what it becomes): `each` of each folder, in turn."""
    places = defaultdict(list)
    for path in sorted(Path("parallel101").rglob("*.py")):
        floor = "laboratory" if path.parts[1] == "laboratory" else "subject"
        inner = path.parts[1:] if floor == "subject" else path.parts[2:]
        folder = inner[0] if len(inner) > 1 else "others"
        found = changes(ast.parse(path.read_text()))
        places[folder] += [(floor, folder, str(path), *change) for change in found]
    draws = [random.Random(f"{SEED} {name}").sample(places[name], each) for name in places]
    return [place for row in zip(*draws) for place in row]


def attempt(place: tuple, copied: Path, lines: dict, took: dict) -> dict:
    """Change one place in a copy of the clone, run its tests, and change it back."""
    floor, folder, file, node, new = place
    names, numbers = list(took), set(lines.get(f"{file}:{node.lineno}", ()))
    if not numbers:  # of a process that may write nothing
        numbers.update(*(lines[at] for at in lines if at.startswith(f"{file}:")))
    chosen, total = [], 0.0
    for test in sorted((names[i] for i in numbers), key=lambda t: (folder not in t, took[t])):
        if took[test] < math.inf and (not chosen or total + took[test] <= SECONDS):
            chosen, total = [*chosen, test], total + took[test]
    path, text = copied / file, (copied / file).read_bytes()
    rows = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    start, stop = rows[node.lineno - 1], rows[node.end_lineno - 1]
    start, stop = start + node.col_offset, stop + node.end_col_offset
    found = {"floor": floor, "folder": folder, "place": f"{file}:{node.lineno}", "caught": False}
    found |= {"was": text[start:stop].decode(), "new": new, "tests": len(chosen), "by": ""}
    if not chosen:
        return found
    (copied / "chosen.txt").write_text("\n".join(chosen))
    _write(path, text[:start] + new.encode() + text[stop:])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "@chosen.txt"]
    options = {"cwd": copied, "env": os.environ | {"PYTHONPATH": str(copied)}, "text": True}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, **options)
    try:
        output, _ = run.communicate(timeout=60 + 4 * total)
        found |= {"caught": run.returncode != 0, "by": output[-300:] if run.returncode else ""}
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        found |= {"caught": True, "by": "a hang"}
    _write(path, text)
    return found


def _write(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    for byte_code in path.parent.glob(f"__pycache__/{path.stem}.*"):
        byte_code.unlink()  # it knows the file's time in whole seconds only


def attempt_all(each: int) -> None:
    from tqdm import tqdm

    lines, took = (json.loads((KEPT / name).read_text()) for name in ("lines.json", "took.json"))
    copies, leave_out = [KEPT / "a", KEPT / "b"], shutil.ignore_patterns(".git", ".venv", "build")
    for copied in copies:
        shutil.copytree(".", copied, ignore=leave_out, dirs_exist_ok=True)

    def one(place: tuple) -> None:
        copied = copies.pop()
        print(json.dumps(attempt(place, copied, lines, took)), file=out, flush=True)
        copies.append(copied)

    with open(KEPT / "tried.jsonl", "a") as out, ThreadPoolExecutor(2) as pool:
        list(tqdm(pool.map(one, places := sample(each)), total=len(places)))


def repeats(others: int = 3) -> None:
    """Print what may go to tests/thorough.txt: a test with other values than one that stays, if
    each line of the package that it executes is executed by so many tests that stay.
    """
    lines, took = (json.loads((KEPT / name).read_text()) for name in ("lines.json", "took.json"))
    names, executes, left = list(took), defaultdict(set), defaultdict(int)
    for line, tests in lines.items():
        for i in tests:
            executes[names[i]].add(line)
            left[line] += 1
    for test in took:
        left[test.partition("[")[0]] += 1
    for test in sorted(executes, key=lambda test: -took[test]):
        function = test.partition("[")[0]
        if left[function] > 1 and all(left[line] > others for line in executes[test]):
            print(f"{took[test]:.2f} {test}")
            for each in (function, *executes[test]):
                left[each] -= 1


def report() -> None:
    caught = defaultdict(list)
    for row in map(json.loads, (KEPT / "tried.jsonl").read_text().splitlines()):
        caught[row["folder"]].append(row["caught"])
        caught[f"all of the {row['floor']}"].append(row["caught"])
    for name, tried in sorted(caught.items()):
        n, p, z = len(tried), sum(tried) / len(tried), 1.96
        middle, half = p + z * z / n / 2, z * math.sqrt(p * (1 - p) / n + (z / n / 2) ** 2)
        low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
        print(f"| {name} | {sum(tried)} of {n} | {p:.0%} | {low:.0%} to {high:.0%} |")


if __name__ == "sitecustomize":
    measure()
elif __name__ == "__main__":
    todo = {"collect": collect, "try": attempt_all, "report": report, "repeats": repeats}[
        sys.argv[1]
    ]
    todo(*map(int, sys.argv[2:]))
