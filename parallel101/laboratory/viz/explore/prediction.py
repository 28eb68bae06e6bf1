"""Judges a reader's prediction: "27 %" of a bubble rate of 3/11 is right.

So is "41.25 GB" if the screen shows 41.2 GB, and "6" of 6 steps. It is compared with the exact
result, and may differ from it by the rounding of the prediction, or by that of the result on the
screen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

PERCENT = {"%": 1.0, "percent": 1.0}
BYTES = {"b": 1.0, "byte": 1.0, "bytes": 1.0}
BYTES |= {f"{prefix}b": 1000.0**k for k, prefix in enumerate("kmgt", 1)} | {
    f"{prefix}ib": 1024.0**k for k, prefix in enumerate("kmgt", 1)
}
SECONDS = {"s": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "μs": 1e-6}
GROUPED = re.compile(r"[-+]?\d{1,3}([, ]\d{3})+(\.\d+)?")


class Number(NamedTuple):
    """A number that was written, in percent, bytes, seconds or as a count.

    It means all numbers within `rounding` of it.
    """

    value: float
    rounding: float


def readings(text: str, unit: str) -> list[list[Number]]:
    """Return every reading of a text, as one or several numbers.

    Empty if it can't be read: "many", "8-9 %", or "41 s" of a quantity in GB.

    "1,024" is 1024, 1.024, or 1 and 24. Of "2 · 7 = 14", the 14 counts.

    Args:
        unit: of numbers without one. If it is "", the quantity is a count, and any word may follow:
            "6 steps".
    """
    written = text.rpartition("=")[2].replace("−", "-").strip("[]() ").lower()
    parts = re.fullmatch(r"(.*?[\d.])\s*([a-zµμ% ]*)", written)
    if parts is None or (scale := scale_of(parts[2] or unit, unit)) is None:
        return []
    body = parts[1]
    grouped = [[re.sub("[, ]", "", body)]] if GROUPED.fullmatch(body) else []
    found = []
    for numbers in ([body], *grouped, [body.replace(",", ".")], re.split(r"[,;\s]+", body)):
        try:
            decimals = [Decimal(number) for number in numbers]
        except InvalidOperation:
            continue
        found.append(
            [
                Number(float(d) * scale, 0.5 * 10.0 ** min(0, int(d.as_tuple().exponent)) * scale)
                for d in decimals
            ]
        )
    return found


def with_unit(text: str, unit: str) -> str:
    """Return a prediction as it is shown, with a unit if it ends in a number: "27" is "27 %".

    A rate below 1 without a unit is a part of the whole: "0.16" is "16 %".
    """
    if not unit or not text[-1:].isdigit():
        return text
    if unit == "%" and re.fullmatch(r"0?[.,]\d+", text):
        return f"{100 * Decimal(text.replace(',', '.')):f}".rstrip("0").rstrip(".") + " %"
    return f"{text} {unit}"


def scale_of(word: str, unit: str) -> float | None:
    """Return the percent, bytes or seconds that a word means; None if `unit` is of another kind."""
    if not unit:
        return 1.0
    return next(kind for kind in (PERCENT, BYTES, SECONDS) if unit.lower() in kind).get(
        word.lower()
    )


def verdict(prediction: str, unit: str, shown: str, exact: Sequence[float]) -> str:
    """Return "right", "too low" or "too high"; for several numbers "right" or "different".

    It is "" if the prediction or the result isn't a number. One number for a result with several is
    compared with the largest of them.

    Args:
        unit: of a prediction without one.
        shown: the result on the screen, with its unit.
        exact: the same numbers, not rounded, in percent, bytes, seconds or as counts.
    """
    if not (guesses := readings(prediction, unit)) or not exact:
        return ""
    fitting = [guess for guess in guesses if len(guess) == len(exact)] or [
        guess for guess in guesses if len(guess) == 1
    ]
    if not fitting:
        return "different"
    on_screen = next(reading for reading in readings(shown, unit) if len(reading) == len(exact))
    rounding = max(
        0.0 if math.isclose(number.value, value) else number.rounding
        for number, value in zip(on_screen, exact)
    )
    values = exact if len(fitting[0]) == len(exact) else [max(exact)]
    fitting.sort(key=lambda guess: abs(guess[0].value - values[0]))
    signs = [
        [compare(number, value, rounding) for number, value in zip(guess, values)]
        for guess in fitting
    ]
    if not all(any(sign) for sign in signs):
        return "right"
    return "different" if len(values) > 1 else "too low" if signs[0][0] < 0 else "too high"


def compare(number: Number, value: float, rounding: float) -> int:
    """Return −1, 0 or 1 for a prediction below, equal to or above the value.

    Both may be rounded.
    """
    difference = number.value - value
    if abs(difference) <= max(number.rounding, rounding) * (1 + 1e-9):
        return 0
    return -1 if difference < 0 else 1
