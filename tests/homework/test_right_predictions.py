"""A learner who predicts by the formula of the lesson sees the same number in the run."""

import time

import pytest

from parallel101.laboratory.grade.exercise_report import Prediction
from parallel101.laboratory.grade.grading import run_cases
from parallel101.laboratory.grade.remote import SubmissionRanks
from tests.homework.test_solutions import EXERCISES, reference

ANSWERS = [
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


@pytest.mark.parametrize(
    ("function", "name", "said"), ANSWERS, ids=[f"{row[0]}-{row[1]}" for row in ANSWERS]
)
def test_a_right_prediction_agrees_with_the_run(function, name, said):
    exercise = EXERCISES[function]
    question = next(question for question in exercise.questions if question.name == name)
    with SubmissionRanks(exercise, reference(function)) as ranks:
        (trial,) = run_cases(ranks, [question.case()], time.monotonic() + 30)
    found = Prediction(question, said, question.measured(trial))
    assert found.agrees, found
