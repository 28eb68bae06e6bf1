"""Every odd but correct solution gets full points. Every wrong one loses points and gets its name.

hwN/reference.py    the reference solutions. They run here on gloo and NCCL; test_notebooks.py shows
                    that the grader gives them full points
hwN/unusual*.py     odd but correct ones. `ring_shift__in_pairs` is a solution of `ring_shift`
hwN/wrong*.py       wrong ones; a comment above each says what must be named, and its points
hwN/wrong.txt       wrong ones that differ from the reference in a line or two

    ring_shift__never_waits: receive's wait forgotten (4 points)
    -     work.wait()
    +     pass

In place of a name, "-" says that nothing may be named.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Trial,
    find,
    module_of,
)
from parallel101.laboratory.grade.exercise_report import ExerciseVerdict, Prediction
from parallel101.laboratory.grade.grading import (
    EXERCISE_SECONDS,
    PUBLIC_SEED,
    judge,
    run_cases,
    share,
)
from parallel101.laboratory.grade.homework import find_sets
from parallel101.laboratory.grade.remote import (
    COMPILER,
    Submission,
    SubmissionRanks,
    preload_for,
)
from parallel101.laboratory.ranks.launch import launch
from parallel101.laboratory.record.trace import Trace

HERE = Path(__file__).parent
HOMEWORK = HERE.parents[1] / "homework"
EXERCISES = {
    exercise.function: exercise
    for homework in find_sets(HOMEWORK)
    for exercise in homework.exercises
}
FOLDERS = sorted(HERE.glob("hw?"))
LABEL = r"(?P<named>.+?)(?: \((?P<points>[\d.]+) points?\))?"


class Solution(NamedTuple):
    """What is graded, and which misconception must be named and which points it must earn."""

    submission: Submission
    named: str | None = None
    points: float | None = None


def labelled(submission: Submission, label: str) -> Solution:
    found = re.fullmatch(LABEL, label)
    assert found, label
    named, points = found["named"], found["points"]
    return Solution(submission, None if named == "-" else named, points and float(points))


def defined(kind: str) -> Iterator[tuple[str, Solution]]:
    """The solutions that are functions and classes in files such as wrong_experts.py."""
    for path in sorted(path for folder in FOLDERS for path in folder.glob(f"{kind}*.py")):
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and "__" in node.name.strip("_"):
                first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                above = lines[first - 2].partition("# named: ")[2] if kind == "wrong" else "-"
                chosen = f"{source}\n{node.name.partition('__')[0]} = {node.name}\n"
                yield node.name, labelled(Submission(path, chosen), above)


def edited() -> Iterator[tuple[str, Solution]]:
    """The solutions in wrong.txt: the reference with some of its lines replaced."""
    for path in (path for folder in FOLDERS for path in folder.glob("wrong.txt")):
        for entry in path.read_text().strip().split("\n\n"):
            head, _, body = entry.partition("\n")
            name, _, label = head.partition(": ")
            source = (path.parent / "reference.py").read_text()
            for part in re.findall(r"(?:^-.*\n?)+(?:^\+.*\n?)*", body, re.M):
                before, after = (
                    "".join(f"{line[2:]}\n" for line in part.splitlines() if line[0] == sign)
                    for sign in "-+"
                )
                assert source.count(before) == 1, f"{name}: {source.count(before)} times {before}"
                source = source.replace(before, after)
            yield name, labelled(Submission(path, source), label)


WRONG = {**dict(edited()), **dict(defined("wrong"))}
UNUSUAL = dict(defined("unusual"))


def reference(function: str) -> Submission:
    path = HERE / Path(EXERCISES[function].path).parent.name.partition("_")[0] / "reference.py"
    return Submission(path, path.read_text())


@cache
def cases_of(function: str) -> list[Case]:
    return EXERCISES[function].cases(Draw(PUBLIC_SEED, function))


# what a learner predicts by the formula of the lesson
PREDICTIONS = [
    ("train_naive", "total", 3 * 4 * 2 * 3 / 4 * 928 + 3 * 928),  # the gradients, then a broadcast
    ("average_in_buckets", "calls", 4),  # three gradients of 48 bytes fit into 150
    ("train_overlapped", "seconds", 4 * (1 + 2) + 1),
    ("train_zero1", "state", 1680 / 3),
    ("train_zero2", "peak", 288),
    ("train_zero3", "sent", 2 * 3 * 1 / 2 * 1680),
    ("decode_attention", "sent", 3 * 2 * (16 + 1) * 8),
    ("ring_attention_forward", "sent", 3 * 2 * (2 * 8 * 16 * 8)),
    ("ring_attention_forward", "seconds", 4),
    ("ring_attention_backward", "sent", (3 + 4) * 2 * (2 * 8 * 16 * 8)),
    ("exchange_rows", "sent", (8 + 3) * 16 * 8),  # 8 rows go to others, 3 gradients go back
    ("mixture_of_experts", "sent", 2 * (3 + 3) * 16 * 8),
    ("train_on_mesh", "sent", 2 * 1 / 2 * (1920 / 2 + 240)),
    ("bus_bandwidth", "algorithm", 30 / (2 * 3 / 4)),
    # 8 layers of 12h² and the embedding, cut over tp 8, 18 bytes each
    ("memory", "states", round(18 * (8 * 12 * 12288**2 + 51200 * 12288) / 8 / 1e9)),
    ("step_seconds", "bubble", round(100 * 11 / 96, 1)),
    ("checkpoint_interval", "lost", round(100 * ((2 * 60 / 10986) ** 0.5 + 600 / 10986))),
    ("stragglers", "slow", round(100 * (1 - 0.999**1024))),
]


def disagreements(exercise: Exercise, ranks: SubmissionRanks) -> list[str]:
    """The predictions of this exercise that differ from a run of the reference."""
    found = []
    for function, name, said in PREDICTIONS:
        if function == exercise.function:
            question = next(one for one in exercise.questions if one.name == name)
            (trial,) = run_cases(ranks, [question.case()], time.monotonic() + 30)
            prediction = Prediction(question, said, question.measured(trial))
            found += [] if prediction.agrees else [f"{function}: {prediction}"]
    return found


def complaint(name: str, solution: Solution, verdict: ExerciseVerdict) -> list[str]:
    """What to read if a solution doesn't get the verdict that it should get."""
    if name in UNUSUAL:
        right = verdict.passed and verdict.points == verdict.out_of
    else:
        named = verdict.misconception.name if verdict.misconception else None
        loses = verdict.points < verdict.out_of or verdict.exercise.practice
        points = solution.points in (None, verdict.points)
        right = not verdict.passed and loses and points and named == solution.named
    wrong = [
        f"{finding.kind}: {finding.message}" for finding in verdict.findings if not finding.passed
    ]
    got = f"{name} got {verdict.points} of {verdict.out_of} points, {verdict.misconception}"
    return [] if right else [got, verdict.problem, *wrong]


@pytest.mark.parametrize("function", EXERCISES)
def test_odd_solutions_keep_full_points_and_wrong_ones_lose_some_and_get_their_names(function):
    """All of an exercise run on the same processes: starting them takes longer. A right prediction
    agrees with the reference's run.
    """
    exercise, complaints = EXERCISES[function], []
    with SubmissionRanks(exercise, reference(function)) as ranks:
        complaints += disagreements(exercise, ranks)
        for name, solution in [*UNUSUAL.items(), *WRONG.items()]:
            if name.partition("__")[0] == function:
                ranks.take(solution.submission)
                until = time.monotonic() + EXERCISE_SECONDS
                verdict = judge(exercise, run_cases(ranks, cases_of(function), until))
                complaints += complaint(name, solution, verdict)
    assert not complaints, "\n".join(complaints)


def run_all(given: list[tuple[Exercise, Submission, list[tuple], int]]) -> list[Any]:
    """What each rank does: one exercise's program after the other, without the grader."""
    import torch.distributed as dist

    results = []
    for exercise, submission, arguments, seed in given:
        declared = module_of(exercise.path, exercise.source, "parallel101_exercises").EXERCISES
        learner = module_of(str(submission.path), submission.source, "homework", register=True)
        torch.manual_seed(seed)
        device = torch.get_default_device()
        mine = [
            part.clone().to(device) if isinstance(part, torch.Tensor) else part
            for part in arguments[dist.get_rank()]
        ]
        function = exercise.function
        results.append(find(declared, function).program(getattr(learner, function), *mine))
    return results


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.nccl(2))])
def test_the_references_are_right_on_real_ranks(backend):
    """A solution is a real program. What the record or the virtual clock tells is not judged here.

    All exercises whose largest case of at most four ranks has as many share a launch.
    """
    preload_for(EXERCISES.values(), COMPILER)  # once, and not in each rank
    shared: dict[int, dict[str, Case]] = {}
    sizes = range(1, 5) if backend == "gloo" else [2]
    for function in EXERCISES:
        cases = [case for case in cases_of(function) if case.world_size in sizes]
        for case in sorted(cases, key=lambda case: -case.world_size)[:1]:
            shared.setdefault(case.world_size, {})[function] = case
    for ranks, cases in shared.items():
        given = [
            (EXERCISES[function], reference(function), list(case.arguments), case.seed)
            for function, case in cases.items()
        ]
        run = launch(run_all, given, world_size=ranks, backend=backend)
        for k, (function, case) in enumerate(cases.items()):
            found, unrecorded = [results[k] for results in run.results], Trace((), ranks, backend)
            trial = Trial(case, found, unrecorded, world=backend)
            for check in EXERCISES[function].checks:
                assert check.kind != "value" or check.wrong(trial) is None, (function, check.says)


def test_the_checks_of_an_exercise_share_its_points():
    for exercise in EXERCISES.values():
        shares = [(check.kind, share(exercise, check)) for check in exercise.checks]
        assert sum(part for _, part in shares) == pytest.approx(1.0)
        values = sum(part for kind, part in shares if kind == "value")
        weights = exercise.weights
        assert values in (pytest.approx(weights.get("value", 0.5)), 1.0)
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


def test_every_exercise_has_an_unusual_solution_and_every_misconception_a_wrong_one():
    assert {name.partition("__")[0] for name in UNUSUAL} == set(EXERCISES)
    shown = {(name.partition("__")[0], solution.named) for name, solution in WRONG.items()}
    named = {m.name for exercise in EXERCISES.values() for m in exercise.misconceptions}
    assert named == {name for _, name in shown if name}
