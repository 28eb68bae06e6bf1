"""A check may give a part of its points, and a submission may hold dataclasses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel101.laboratory.grade.compared_values import difference
from parallel101.laboratory.grade.exercise import Case, Check, Exercise, Trial
from parallel101.laboratory.grade.grading import judge, run_cases
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks
from parallel101.laboratory.record.trace import Trace
from tests.grade.test_relay import DECLARATION

CASE = Case([()], [True])


def exercise(part) -> Exercise:
    return Exercise(
        number="1",
        function="f",
        title="A share",
        points=10,
        weights={"value": 0.4, "mfu": 0.6},
        cases=lambda draw: [CASE],
        checks=(
            Check("value", "true", lambda trial: None if trial.results[0] else "false"),
            Check("mfu", "all of it", lambda trial: "not all of it", part=part),
        ),
        least_received=lambda case: [0],
    )


def trial(value: bool) -> Trial:
    return Trial(CASE, [value], Trace((), 1, "sim"))


def half(trials) -> float:
    return 0.5


def fails(trials) -> float:
    raise KeyError("what a rank returns may be anything")


@pytest.mark.parametrize(
    ("part", "value", "points"),
    [
        (half, True, 4 + 3),
        (half, False, 0),  # it counts only with the right value
        (lambda trials: 7.0, True, 4 + 0.99 * 6),  # a check that isn't passed has not all points
        (lambda trials: -1.0, True, 4),
        (fails, True, 4),
    ],
    ids=["half", "wrong value", "too much", "too little", "error"],
)
def test_a_check_that_is_not_passed_earns_its_part_if_the_value_is_right(part, value, points):
    verdict = judge(exercise(part), [trial(value)])
    assert verdict.points == pytest.approx(points) and not verdict.passed
    assert "not all of it" in str(verdict)


def test_without_a_part_a_check_earns_all_or_nothing():
    assert judge(exercise(lambda trials: 0.0), [trial(True)]).points == 4
    assert Check("mfu", "all of it", lambda trial: None).part([]) == 0


DATACLASS = """from dataclasses import dataclass

@dataclass(frozen=True)
class Layout:
    dp: int = 1

def f():
    return Layout(dp=8).dp == 8
"""


@pytest.mark.parametrize("first", ["", "from __future__ import annotations\n"], ids=["", "future"])
def test_a_submission_may_define_dataclasses(first):
    declared = replace(exercise(half), path="declared.py", source=DECLARATION)
    with SubmissionRanks(declared, Submission(Path("f.py"), first + DATACLASS)) as ranks:
        (found,) = run_cases(ranks, [CASE], float("inf"))
    assert found.error is None and found.results == [True]


def test_two_numbers_that_look_the_same_are_told_apart():
    several = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert "(a difference of 1e-08)" in difference(several + torch.tensor([1e-8, 0]), several)
    assert "(a difference of " in difference(several[:1] + 1e-8, several[:1])
    assert difference(several[:1], several[1:]) == "1; expected 2"


def test_a_function_that_only_computes_is_not_said_to_have_ranks():
    assert Case([()], [{}], "16 GPUs", computes=True).label == "16 GPUs"
    assert Case([()], [{}], "16 GPUs").label == "1 rank, 16 GPUs"
