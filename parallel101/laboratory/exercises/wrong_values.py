"""Values that usual mistakes give: a case computes them, so that a mistake can be named.

    facts={"own": [form, …]}    a form has, by rank, the results that the mistake gives
    gives("own")                whether every wrong run has the results of one of the forms
    gives("own", 0, 2)          the same of parts 0 and 2 of each result

A case without the fact says nothing about the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallel101.laboratory.grade.compared_values import factor, same
from parallel101.laboratory.grade.exercise import Trial
from parallel101.laboratory.grade.exercise_checks import all_show, on_ranks, wrong_trials

Seen = Callable[[Sequence[Trial]], bool]


def every_wrong(seen: Callable[[Trial], bool]) -> Seen:
    """Return a test of whether every wrong run shows this, and one of them has several ranks."""

    def seen_everywhere(trials: Sequence[Trial]) -> bool:
        wrong = wrong_trials(trials)
        return any(trial.world_size > 1 for trial in wrong) and all(map(seen, wrong))

    return seen_everywhere


def gives(fact: str, *parts: int) -> Seen:
    """Return a test of whether every wrong run has the values that a mistake gives.

    case.facts[fact] is a list of forms of the mistake. A form has, by rank, the result that it
    gives, or only the part of it, or a tuple of the `parts`. ANYTHING stands for any value.
    """

    def chosen(result: Any) -> Any:
        found = [result[part] for part in parts] if parts else result
        return found[0] if len(parts) == 1 else found

    def shows(trial: Trial) -> bool:
        found = [chosen(result) for result in trial.results]
        return any(same(found, form) for form in trial.case.facts[fact])

    return lambda trials: every_wrong(shows)([t for t in trials if fact in t.case.facts])


def gradients_times(part: int, k: Callable[[int], float]) -> Seen:
    """Return a test of whether the first gradient in part `part` is k(n) times the right one.

    This must hold in every wrong run, on every rank.
    """

    def shown(trial: Trial, rank: int) -> bool:
        mine, right = trial.results[rank][part], trial.case.expected[rank][part]
        if isinstance(right, list | tuple):
            mine, right = mine[0], right[0]
        found = factor(mine, right)
        return found is not None and abs(found - k(trial.world_size)) < 1e-6

    return every_wrong(lambda trial: all_show(on_ranks([trial]), shown))
