"""The programs of the bug hunt in homework 8: their faults are there, and differ with the seed."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import pytest

from parallel101.laboratory.exercises.bug_hunt import CAUSES, hunt
from parallel101.laboratory.grade.grading import run_cases
from parallel101.laboratory.grade.remote import SubmissionRanks
from parallel101.laboratory.record.errors import DeadlockError
from tests.homework.test_solutions import EXERCISES, HOMEWORK, reference

SOLVED = runpy.run_path(str(Path(__file__).parent / "hw8" / "reference.py"))


@pytest.mark.parametrize("kind", CAUSES)
def test_the_reference_finds_every_fault_and_only_a_hang_hangs(kind):
    for number, cause in enumerate(CAUSES[kind]):
        for rank in (0, 3):
            one = hunt(kind, f"seed {number}", cause, rank)
            assert isinstance(one.error, DeadlockError) == (kind == "hang")
            assert one.answer[0] == rank and one.answer[2] == cause
            assert SOLVED[f"find_{kind}"](one.records()) == one.answer


@pytest.mark.parametrize("kind", CAUSES)
def test_a_seed_gives_the_same_program_again_and_other_seeds_give_others(kind):
    again, once = hunt(kind, "Ada"), hunt(kind, "Ada")
    assert (once.source, once.plan, once.answer) == (again.source, again.plan, again.answer)
    others = [hunt(kind, str(number)) for number in range(12)]
    assert len({one.answer[1] for one in others}) > 3 and len({one.source for one in others}) > 6
    code = once.source.splitlines()[once.answer[1] - 1]
    assert f"\n{once.answer[1]:3}  {code}\n" in once.listing
    assert "answer" not in repr(once) and "plan=" not in repr(once)


def test_an_unknown_kind_or_cause_is_refused():
    with pytest.raises(ValueError, match="kind must be one of hang"):
        hunt("crash", "Ada")
    with pytest.raises(ValueError, match="cause must be one of missing call"):
        hunt("hang", "Ada", "slow compute")


@pytest.mark.parametrize("kind", CAUSES)
def test_the_questions_are_about_the_program_in_the_notebook(kind):
    exercise = EXERCISES[f"find_{kind}"]
    cell = f'mystery = hunt("{kind}", "'
    source = (HOMEWORK / "hw8_beyond" / "hw8.ipynb").read_text().replace('\\"', '"')
    seed = source.partition(cell)[2].partition('"')[0]
    answer = hunt(kind, seed).answer
    with SubmissionRanks(exercise, reference(f"find_{kind}")) as ranks:
        (trial,) = run_cases(ranks, [exercise.questions[0].case()], time.monotonic() + 30)
    assert tuple(question.measured(trial) for question in exercise.questions) == answer
