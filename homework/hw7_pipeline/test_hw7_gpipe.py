"""Exercise 18: GPipe. All forwards, then all backwards."""

from __future__ import annotations

from parallel101.laboratory.exercises.pipeline_exercises import (
    DETACHED,
    HELD,
    LAST_ONLY,
    NO_AVERAGE,
    SLOTS,
    messages_of,
    one_at_a_time,
    run_step,
    slots,
    step_cases,
    two_halves,
)
from parallel101.laboratory.grade.exercise import Exercise
from parallel101.laboratory.grade.exercise_checks import MESSAGES, bytes_sent, value

EXERCISES = [
    Exercise(
        number="18",
        function="gpipe_step",
        title="GPipe",
        points=10,
        cases=step_cases,
        program=run_step,
        checks=(
            value(
                "the loss and every gradient equal one process", parts=("the loss", "the gradients")
            ),
            bytes_sent(messages_of, "M activations forward and M gradients back, and nothing else"),
            slots(two_halves, "2(M + P − 1) slots"),
        ),
        weights={"value": 0.3, "bytes": 0.1, "steps": 0.6},
        least_received=messages_of,
        misconceptions=(*MESSAGES, NO_AVERAGE, LAST_ONLY, DETACHED, one_at_a_time),
        questions=(SLOTS, HELD),
        hints=(
            "Write down what rank 1 of 3 does for one microbatch: what it receives, from whom, "
            "what it computes, what it sends. Then put a loop around it.",
            "A received activation is a leaf: x.requires_grad_() before stage(x). After "
            "y.backward(dy), x.grad is what the rank before waits for. Keep (x, y) of each "
            "microbatch until its backward.",
            "The two loops differ between ranks in three places: where x comes from, where y goes, "
            "and what backward starts from. Only the last rank has a loss; divide it so that the "
            "microbatches add up to the mean. Don't wait for a send before the loops have ended.",
        ),
        picture="pipeline",
    )
]
