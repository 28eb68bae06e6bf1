"""Checks and misconceptions of exercises that return estimates: a dict of numbers by name.

    {"matmul": 1.8, "tp": 0.4, …}  ──▶  a check for each part, against its formula
                                   └─▶  the mistake whose factor explains all wrong numbers

A part is compared with its formula of the learner's own other parts, so that a mistake in one
costs the points of one.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from parallel101.laboratory.exercises.training_exercises import ended
from parallel101.laboratory.grade.exercise import Case, Check, Trial

Facts = Mapping[str, Any]
Said = Mapping[str, float]  # the numbers that the learner's function returned
TOLERANCE = 1e-6  # relative


@dataclass(frozen=True)
class EstimatePart:
    """One number of an estimate.

    Attributes:
        name: its key in the dict that the learner's function returns, and the name of its formula
            in estimate_answers.py.
        says: what it is, as the report shows it.
        weight: against the other parts.
        tolerance: relative.
    """

    name: str
    says: str
    weight: float = 1.0
    tolerance: float = TOLERANCE

    def right(self, facts: Facts, said: Said) -> float:
        """Its value, from the case's facts and the learner's other numbers. In the grader only."""
        return getattr(answers(), self.name)(facts, said)

    def check(self) -> Check:
        def wrong(trial: Trial) -> str | None:
            said = numbers(trial)
            if self.name not in said:
                return f"the function returned {_short(trial.results[0])}; {self._expected()}"
            found, right = said[self.name], self.right(trial.case.facts, said)
            if about(found, right, self.tolerance):
                return None
            return f"{self.name!r} is {found:.6g}; expected {right:.6g}"

        return Check("value", self.says, wrong, weight=self.weight)

    def ratio(self, trial: Trial) -> float:
        """What was returned, relative to what is right, which isn't 0. NaN if it is no number."""
        said = numbers(trial)
        return said.get(self.name, math.nan) / self.right(trial.case.facts, said)

    def _expected(self) -> str:
        return f"expected a dict with a number for {self.name!r}"


def answers() -> types.ModuleType:
    """The formulas, which ranks can't import: a rank that has them has the answers."""
    from parallel101.laboratory.exercises import estimate_answers

    return estimate_answers


def about(found: float, right: float, tolerance: float = TOLERANCE) -> bool:
    return abs(found - right) <= tolerance * abs(right)  # NaN is never close


def numbers(trial: Trial) -> dict[str, float]:
    """The numbers by name that rank 0 returned. Anything else is left out."""
    found = trial.results[0]
    entries = found.items() if isinstance(found, dict) else ()
    return {name: float(value) for name, value in entries if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, value))}"[:200]
    return f"{value!r}"[:100]


def named(function: Callable[..., Any], *arguments: Any) -> Any:
    """The program of a rank: dicts reach the learner's function as objects with attributes."""
    return function(
        *(SimpleNamespace(**part) if isinstance(part, dict) else part for part in arguments)
    )


def estimate_case(arguments: Sequence[Any], note: str, **facts: Any) -> Case:
    """One call of the learner's function, on one rank. Its checks look at the facts."""
    return Case([tuple(arguments)], [{}], note=note, facts=facts)


# ---- misconceptions ----

Factor = Callable[[Facts], float]


def off_by(part: EstimatePart, *factors: Factor) -> Callable[[Sequence[Trial]], bool]:
    """Whether one of the factors explains this part in all runs, and it is wrong in one of them.

    Runs in which the part should be 0 don't count.
    """

    def seen(trials: Sequence[Trial]) -> bool:
        found = [
            (part.ratio(trial), trial.case.facts)
            for trial in ended(trials)
            if part.right(trial.case.facts, numbers(trial)) != 0
        ]
        if all(about(ratio, 1, part.tolerance) for ratio, _ in found):
            return False
        return any(
            all(about(ratio, factor(facts), max(part.tolerance, 1e-4)) for ratio, facts in found)
            for factor in factors
        )

    return seen
