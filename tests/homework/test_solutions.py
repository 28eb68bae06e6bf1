"""Every odd but correct solution gets full points.

Every wrong solution loses points and gets its name.

The reference solutions run here on gloo, sim and NCCL. That the grader gives them full points,
test_notebooks.py shows. The solutions are in hwN/reference.py, unusual.py and wrong.py. A function
`ring_shift__sends_first` there is a solution of `ring_shift`.
"""

from __future__ import annotations

import ast
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from parallel101.grade.exercise import STEPS, Case, Draw, Trial
from parallel101.grade.grading import (
    EXERCISE_SECONDS,
    PUBLIC_SEED,
    ExerciseVerdict,
    judge,
    run_cases,
)
from parallel101.grade.homework import find_sets
from parallel101.grade.launched import run_launched
from parallel101.grade.remote import Submission, SubmissionRanks

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


def solutions(file: str) -> list[str]:
    """The names of all solutions in hwN/<file>, in a fixed order."""
    names = []
    for folder in sorted(set(FOLDER.values())):
        tree = ast.parse((folder / file).read_text())
        names += [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and "__" in node.name.strip("_")
        ]
    return names


def submission(name: str, file: str) -> Submission:
    function = name.partition("__")[0]
    path = FOLDER[function] / file
    source = path.read_text()
    return Submission(path, source if name == function else f"{source}\n{function} = {name}\n")


def expected_names() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in sorted(set(FOLDER.values())):
        namespace = {}
        tree = ast.parse((folder / "wrong.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPECTED":
                namespace = ast.literal_eval(node.value)
        found |= namespace
    return found


EXPECTED = expected_names()


@cache
def cases_of(function: str) -> list[Case]:
    return EXERCISES[function].cases(Draw(PUBLIC_SEED, function))


@pytest.fixture(scope="module")
def graded():
    """Grades a solution. Those of one exercise run on the same processes, one after the other:
    starting them takes longer.
    """
    shared: dict[str, SubmissionRanks] = {}

    def grade_shared(name: str, file: str, until_named: str | None = None) -> ExerciseVerdict:
        function = name.partition("__")[0]
        if function not in shared:
            while shared:
                shared.popitem()[1].stop()
            shared[function] = SubmissionRanks(EXERCISES[function], submission(name, file))
        shared[function].take(submission(name, file))
        cases, until = cases_of(function), time.monotonic() + EXERCISE_SECONDS
        trials: list[Trial] = []
        for part in [[case] for case in cases] if until_named else [cases]:
            trials += run_cases(shared[function], part, until)
            verdict = judge(EXERCISES[function], trials)
            if verdict.misconception and verdict.misconception.name == until_named:
                break
        return verdict

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
    """On the most ranks, and on sim on the fewest too.

    The clock of gloo is real: what only the virtual clock tells is not judged there.
    """
    exercise = EXERCISES[function]
    cases = list(
        {case.world_size: case for case in cases_of(function) if case.world_size > 1}.values()
    )
    cases = cases[-1:] if backend == "gloo" else cases[:1] + cases[1:][-1:]
    kinds = (
        ({"value", "bytes"} | ({"steps"} if cases[0].network == STEPS else set()))
        if backend == "gloo"
        else None
    )
    trials = [
        run_launched(exercise, submission(function, "reference.py"), case, backend)
        for case in cases
    ]
    verdict = judge(exercise, trials, kinds)
    assert verdict.passed, complaint(verdict)


@pytest.mark.nccl
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs one GPU per rank")
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
    assert verdict.points == verdict.out_of, complaint(verdict)


@pytest.mark.parametrize("name", solutions("wrong.py"))
def test_a_wrong_solution_loses_points_and_gets_its_name(graded, name):
    """The first solution with a mistake runs all cases; a second or third one (`__root_0_2`)
    only until it has its name.
    """
    again = name.endswith(("_2", "_3")) and name[:-2] in EXPECTED
    verdict = graded(name, "wrong.py", until_named=EXPECTED[name] if again else None)
    assert verdict.points < verdict.out_of, "a wrong solution passes"
    found = verdict.misconception.name if verdict.misconception else None
    assert found == EXPECTED[name], (
        f"named {found!r}, expected {EXPECTED[name]!r}\n{complaint(verdict)}"
    )


def test_every_exercise_has_an_unusual_solution_and_every_wrong_one_a_name():
    assert {name.partition("__")[0] for name in solutions("unusual.py")} == set(EXERCISES)
    assert set(solutions("wrong.py")) == set(EXPECTED)
