"""Checks and misconceptions of exercises that return estimates: a dict of numbers by name.

    {"matmul": 1.8, "tp": 0.4, …}  ──▶  a check for each part, against its formula
                                   └─▶  the mistake whose factor explains all wrong numbers

A part is compared with its formula of the learner's own other parts, so that a mistake in one
costs the points of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from parallel101.laboratory.grade.compared_values import kind, told_apart
from parallel101.laboratory.grade.exercise import Case, Check, Trial
from parallel101.laboratory.grade.exercise_checks import ended

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
        uses: the names of the learner's other numbers that its formula uses. They must be positive,
            and if there are several, one of them right: constants earn nothing.
        also: the name of another formula that is accepted.
    """

    name: str
    says: str
    weight: float = 1.0
    tolerance: float = TOLERANCE
    uses: tuple[str, ...] = ()
    also: str = ""

    def right(self, facts: Facts, said: Said) -> float:
        """Return its right value, from the case's facts and the learner's other numbers.

        Only the grader can call this.
        """
        return formula(self.name)(facts, said)

    def is_right(self, found: float, facts: Facts, said: Said) -> bool:
        return any(
            about(found, formula(name)(facts, said), self.tolerance)
            for name in (self.name, self.also)
            if name
        )

    def check(self) -> Check:
        def wrong(trial: Trial) -> str | None:
            said = numbers(trial)
            if self.name not in said:
                expected = f"expected a dict with a number for {self.name!r}"
                return f"the function returned {kind(trial.results[0])}; {expected}"
            found, facts = said[self.name], trial.case.facts
            if not self.is_right(found, facts, said):
                right = self.right(facts, said)
                return f"{self.name!r} is {told_apart(found, right, '; ')}"
            inputs = [(name, said.get(name, 0.0)) for name in self.uses]
            agree = [about(mine, formula(name)(facts, said)) for name, mine in inputs]
            for name, mine in inputs:
                if mine <= 0 < formula(name)(facts, said):
                    return f"{self.name!r} counts only if {name!r} is positive"
            if len(inputs) > 1 and not any(agree):
                used = " or ".join(map(repr, self.uses))
                return f"{self.name!r} counts only if {used} is right"
            return None

        return Check("value", self.says, wrong, weight=self.weight)

    def ratio(self, trial: Trial) -> float:
        """Return the learner's number divided by the right one.

        The right one isn't 0. The ratio is NaN if the learner's result is no number.
        """
        said = numbers(trial)
        return said.get(self.name, math.nan) / self.right(trial.case.facts, said)


def answers() -> Any:
    """Return the module of formulas.

    It is imported here because a rank that could import it would have the answers.
    """
    from parallel101.laboratory.exercises import estimate_answers

    return estimate_answers


def formula(name: str) -> Callable[[Facts, Said], float]:
    return getattr(answers(), name)


def about(found: float, right: float, tolerance: float = TOLERANCE) -> bool:
    return abs(found - right) <= tolerance * abs(right)  # NaN is never close


def numbers(trial: Trial) -> dict[str, float]:
    """Return the numbers by name that rank 0 returned. Anything else is left out."""
    found = trial.results[0]
    said = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool):
            said[name] = float(value)
    return said


def named(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the learner's function, with dicts turned into objects with attributes."""
    return function(
        *(SimpleNamespace(**part) if isinstance(part, dict) else part for part in arguments)
    )


def estimate_case(arguments: Sequence[Any], note: str, **facts: Any) -> Case:
    """Return a case with one call of the learner's function, on one rank.

    The checks use its facts.
    """
    return Case([tuple(arguments)], [{}], note=note, facts=facts, computes=True)


# ---- misconceptions ----

Factor = Callable[[Facts], float]


def off_by(part: EstimatePart, *factors: Factor) -> Callable[[Sequence[Trial]], bool]:
    """Return a test of whether one of the factors explains this part in all runs.

    The part must be wrong in at least one of them.

    Runs in which the part should be 0 don't count.
    """

    def is_right(trial: Trial) -> bool:
        said = numbers(trial)
        return part.is_right(said.get(part.name, math.nan), trial.case.facts, said)

    def explains(factor: Factor, trials: Sequence[Trial]) -> bool:
        tolerance = max(part.tolerance, 1e-4)
        return all(about(part.ratio(t), factor(t.case.facts), tolerance) for t in trials)

    def seen(trials: Sequence[Trial]) -> bool:
        several = [t for t in ended(trials) if part.right(t.case.facts, numbers(t)) != 0]
        return not all(map(is_right, several)) and any(explains(f, several) for f in factors)

    return seen
