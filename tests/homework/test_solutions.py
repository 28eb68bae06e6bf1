"""Every odd but correct solution gets full points. Every wrong one loses points and gets its name.

The reference solutions run here on gloo, sim and NCCL; test_notebooks.py shows that the grader
gives them full points. The solutions are in hwN/reference.py, unusual.py and wrong.py, or in a
larger set in files such as wrong_experts.py. A function `ring_shift__sends_first` there is a
solution of `ring_shift`.
"""

from __future__ import annotations

import ast
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from parallel101.laboratory.grade.exercise import STEPS, Case, Draw
from parallel101.laboratory.grade.grading import (
    EXERCISE_SECONDS,
    PUBLIC_SEED,
    ExerciseVerdict,
    judge,
    run_cases,
    share,
)
from parallel101.laboratory.grade.homework import find_sets
from parallel101.laboratory.grade.launched import run_launched
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks

HERE = Path(__file__).parent
HOMEWORK = HERE.parents[1] / "homework"
EXERCISES = {
    exercise.function: exercise
    for homework in find_sets(HOMEWORK)
    for exercise in homework.exercises
}
FOLDER = {
    function: HERE / Path(exercise.path).parent.name.partition("_")[0]
    for function, exercise in EXERCISES.items()
}


def files(file: str) -> list[Path]:
    """All hwN/<file>; for "wrong.py" also wrong_experts.py and the like."""
    kind, _, suffix = file.partition(".")
    folders = sorted(set(FOLDER.values()))
    return [path for folder in folders for path in folder.glob(f"{kind}*.{suffix}")]


@cache
def defined(path: Path) -> list[str]:
    """The names of the functions and classes that a file defines."""
    tree = ast.parse(path.read_text())
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]


def solutions(file: str) -> list[str]:
    """The names of all solutions in hwN/<file>, in a fixed order."""
    names = [name for path in sorted(files(file)) for name in defined(path)]
    edited = list(EDITS) if file == "wrong.py" else []
    return edited + [name for name in names if "__" in name.strip("_")]


def submission(name: str, file: str) -> Submission:
    function = name.partition("__")[0]
    if file == "wrong.py" and name in EDITS:
        path = FOLDER[function] / "reference.py"
        source = path.read_text()
        for before, after in EDITS[name]:
            assert source.count(before) == 1, f"{name}: {source.count(before)} times {before!r}"
            source = source.replace(before, after)
        return Submission(path, source)
    path = next(
        path for path in files(file) if path.parent == FOLDER[function] and name in defined(path)
    )
    source = path.read_text()
    return Submission(path, source if name == function else f"{source}\n{function} = {name}\n")


def declared(name: str) -> dict[str, Any]:
    """What the files wrong.py of all sets declare under this name."""
    found: dict[str, Any] = {}
    for path in files("wrong.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                found |= ast.literal_eval(node.value)
    return found


EXPECTED = declared("EXPECTED")  # the misconception that is named; None if there is none
POINTS = declared("POINTS")  # of solutions that miss the idea of an exercise


def edits() -> dict[str, list[tuple[str, str]]]:
    """By wrong solution, what it has in place of which lines of the reference: from wrong.txt.

    ring_shift__never_waits: receive's wait forgotten (4 points)
    -     work.wait()
    +     pass
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for path in files("wrong.txt"):
        for entry in path.read_text().strip().split("\n\n"):
            head, _, body = entry.partition("\n")
            name, says, _, points = re.fullmatch(
                r"(\w+): (.+?)( \(([\d.]+) points?\))?", head
            ).groups()
            EXPECTED[name] = None if says == "-" else says
            if points:
                POINTS[name] = float(points)
            found[name] = [
                tuple(
                    "".join(f"{line[2:]}\n" for line in re.findall(f"^[{sign}].*", part, re.M))
                    for sign in "-+"
                )
                for part in re.findall(r"(?:^- .*\n?)+(?:^\+.*\n?)*", body, re.M)
            ]
    return found


EDITS = edits()


@cache
def cases_of(function: str) -> list[Case]:
    return EXERCISES[function].cases(Draw(PUBLIC_SEED, function))


@pytest.fixture(scope="module")
def graded():
    """Grades a solution. Those of one exercise run on the same processes, one after the other:
    starting them takes longer.
    """
    shared: dict[str, SubmissionRanks] = {}

    def grade_shared(name: str, file: str) -> ExerciseVerdict:
        function = name.partition("__")[0]
        if function not in shared:
            while shared:
                shared.popitem()[1].stop()
            shared[function] = SubmissionRanks(EXERCISES[function], submission(name, file))
        shared[function].take(submission(name, file))
        until = time.monotonic() + EXERCISE_SECONDS
        return judge(EXERCISES[function], run_cases(shared[function], cases_of(function), until))

    yield grade_shared
    for ranks in shared.values():
        ranks.stop()


def complaint(verdict) -> str:
    """What to read if a solution should have passed."""
    wrong = [
        f"{finding.kind}: {finding.message}" for finding in verdict.findings if not finding.passed
    ]
    return "\n".join([f"{verdict.points} of {verdict.out_of} points", verdict.problem, *wrong])


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("function", list(EXERCISES))
def test_the_reference_is_right_on_other_ranks(function, backend):
    """The clock of gloo is real: what only the virtual clock tells is not judged there."""
    exercise = EXERCISES[function]
    case = max(cases_of(function), key=lambda case: case.world_size)
    kinds = None
    if backend == "gloo":
        kinds = {"value", "bytes"} | ({"steps"} if case.network == STEPS else set())
    trial = run_launched(exercise, submission(function, "reference.py"), case, backend)
    verdict = judge(exercise, [trial], kinds)
    assert verdict.passed, complaint(verdict)


@pytest.mark.nccl(2)
@pytest.mark.parametrize("function", list(EXERCISES))
def test_the_reference_is_right_on_nccl(function):
    exercise = EXERCISES[function]
    case = next(case for case in cases_of(function) if case.world_size == 2)
    verdict = judge(
        exercise,
        [run_launched(exercise, submission(function, "reference.py"), case, "nccl")],
        {"value", "bytes"},
    )
    assert verdict.passed, complaint(verdict)


@pytest.mark.parametrize("name", solutions("unusual.py"))
def test_an_unusual_solution_keeps_full_points(graded, name):
    verdict = graded(name, "unusual.py")
    assert verdict.passed and verdict.points == verdict.out_of, complaint(verdict)


@pytest.mark.parametrize("name", solutions("wrong.py"))
def test_a_wrong_solution_loses_points_and_gets_its_name(graded, name):
    verdict = graded(name, "wrong.py")
    assert not verdict.passed, "a wrong solution passes"
    assert verdict.points < verdict.out_of or verdict.exercise.practice
    found = verdict.misconception.name if verdict.misconception else None
    assert found == EXPECTED[name], (
        f"named {found!r}, expected {EXPECTED[name]!r}\n{complaint(verdict)}"
    )
    if name in POINTS:
        assert verdict.points == POINTS[name], complaint(verdict)


def test_the_checks_of_an_exercise_share_its_points():
    for exercise in EXERCISES.values():
        shares = [(check.kind, share(exercise, check)) for check in exercise.checks]
        assert sum(part for _, part in shares) == pytest.approx(1.0)
        values = sum(part for kind, part in shares if kind == "value")
        weights = exercise.weights
        assert values in (pytest.approx(weights.get("value", exercise.value_share)), 1.0)
        assert not weights or set(weights) == {kind for kind, _ in shares}
        if weights:  # the learner is told
            stated = ", ".join(f"{100 * part:.0f} % {kind}" for kind, part in weights.items())
            code = Path(exercise.path).parent / f"{Path(exercise.path).parent.name[:3]}.py"
            (stub,) = (
                node
                for node in ast.parse(code.read_text()).body
                if getattr(node, "name", "") == exercise.function
            )
            assert f"Points: {stated}." in ast.get_docstring(stub)


def test_every_exercise_has_an_unusual_solution_and_every_wrong_one_a_name():
    assert {name.partition("__")[0] for name in solutions("unusual.py")} == set(EXERCISES)
    assert set(solutions("wrong.py")) == set(EXPECTED)
    named = {m.name for exercise in EXERCISES.values() for m in exercise.misconceptions}
    assert named == {name for name in EXPECTED.values() if name}
