"""Grades homework 1. `pytest homework/hw1_moving` runs it."""

from parallel101.grade.checks import MESSAGES, bytes_sent, steps, value
from parallel101.grade.exercise import Case, Draw, Exercise


def ring_shift_cases(draw: Draw) -> list[Case]:
    cases = []
    for n in (1, 2, 3, 4, 5):
        xs = draw.tensors(n, draw.integer(1, 9), 2)
        cases.append(Case([(x,) for x in xs], [xs[(rank - 1) % n] for rank in range(n)], facts={"nbytes": xs[0].nbytes}))
    return cases


def once(case: Case) -> list[int]:
    return [case.facts["nbytes"] if case.world_size > 1 else 0] * case.world_size


EXERCISES = [
    Exercise(
        number="1",
        function="ring_shift",
        title="Ring shift",
        points=10,
        cases=ring_shift_cases,
        checks=(
            value(),
            bytes_sent(lambda case: [case.facts["nbytes"]] * case.world_size, "every rank sends x once"),
            steps(lambda case: 1, "one step"),
        ),
        least_received=once,
        misconceptions=MESSAGES,
    ),
]
