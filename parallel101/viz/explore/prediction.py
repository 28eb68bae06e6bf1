"""Whether a prediction that a reader wrote is right: "27 %" of a bubble rate of 27.3 %, "17 GB" of 16.6 GB, "6" of 6 steps.

It is right if the result, rounded to as many decimals, is the same. A number without a unit has the result's unit.
"""

from __future__ import annotations

import re

UNITS = {"": 1.0, "%": 1.0, "b": 1.0, "byte": 1.0, "bytes": 1.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "μs": 1e-6}
UNITS |= {f"{prefix}b": 1000.0**k for k, prefix in enumerate("kmgt", 1)} | {f"{prefix}ib": 1024.0**k for k, prefix in enumerate("kmgt", 1)}
NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Zµμ%]*)")


def verdict(prediction: str, result: str) -> str:
    """ "right", "too low" or "too high"; of several numbers "right" or "different"; "" if the prediction or the result is no number.

    One number for a result with several is compared with the largest of them.
    """
    guesses, values = amounts(prediction), amounts(result)
    if not guesses or not values:
        return ""
    if len(guesses) == 1:
        values = [max(values)]
    if len(guesses) != len(values):
        return "different"
    unit = values[0][1]
    signs = [compare(number, own or unit, digits, value) for (number, own, digits), value in zip(guesses, values)]
    if not any(signs):
        return "right"
    return "different" if len(signs) > 1 else "too low" if signs[0] < 0 else "too high"


def amounts(text: str) -> list[tuple[float, str, int]]:
    """The numbers in a text, each with its unit and the number of its decimals. What isn't a unit, such as "steps", counts as none."""
    found = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    return [(float(number), unit if unit.lower() in UNITS else "", len(number.partition(".")[2])) for number, unit in found]


def compare(number: float, unit: str, digits: int, value: tuple[float, str, int]) -> int:
    """−1, 0 or 1: a predicted number of this unit is below, equal to or above the value."""
    difference = number - value[0] * UNITS[value[1].lower()] / UNITS[unit.lower()]
    return 0 if abs(difference) <= 0.5 * 10.0**-digits * (1 + 1e-9) else -1 if difference < 0 else 1
