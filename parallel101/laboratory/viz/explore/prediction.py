"""Judges a reader's prediction: "252" µs of a time of 252.4 µs is right.

So is "1.344 KB" if the screen shows 1.3 KiB, and "6" of 6 steps. It is compared with the exact
result, and may differ from it by the rounding of the prediction, or by that of the result on the
screen.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

BYTES = {"b": 1.0, "byte": 1.0, "bytes": 1.0}
BYTES |= {f"{prefix}b": 1000.0**k for k, prefix in enumerate("kmgt", 1)} | {
    f"{prefix}ib": 1024.0**k for k, prefix in enumerate("kmgt", 1)
}
SECONDS = {"s": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "μs": 1e-6}
GROUPED = re.compile(r"[-+]?\d{1,3}([, ]\d{3})+(\.\d+)?")


class Number(NamedTuple):
    """A number that was written, in bytes, seconds or as a count.

    It means all numbers within `rounding` of it.
    """

    value: float
    rounding: float


def readings(text: str, unit: str) -> list[Number]:
    """Return every reading of a text as a number.

    Empty if it can't be read: "many", "8-9 B", or "41 s" of a quantity in bytes.

    "1,024" is 1024 or 1.024. Of "2 · 7 = 14", the 14 counts.

    Args:
        unit: of a number without one. If it is "", the quantity is a count, and any word may
            follow: "6 steps".
    """
    written = text.rpartition("=")[2].replace("−", "-").strip("[]() ").lower()
    parts = re.fullmatch(r"(.*?[\d.])\s*([a-zµμ ]*)", written)
    if parts is None or (scale := scale_of(parts[2] or unit, unit)) is None:
        return []
    body, found = parts[1], []
    grouped = [re.sub("[, ]", "", body)] if GROUPED.fullmatch(body) else []
    for number in (body, *grouped, body.replace(",", ".")):
        with suppress(InvalidOperation):
            read = Decimal(number)
            last_digit = 10.0 ** min(0, int(read.as_tuple().exponent))
            found.append(Number(float(read) * scale, 0.5 * last_digit * scale))
    return found


def with_unit(text: str, unit: str) -> str:
    """Return a prediction as it is shown, with a unit if it ends in a number: "96" is "96 B"."""
    return f"{text} {unit}" if unit and text[-1:].isdigit() else text


def scale_of(word: str, unit: str) -> float | None:
    """Return the bytes or seconds that a word means; None if `unit` is of another kind."""
    if not unit:
        return 1.0
    return next(kind for kind in (BYTES, SECONDS) if unit.lower() in kind).get(word.lower())


def verdict(prediction: str, unit: str, shown: str, exact: float | None) -> str:
    """Return "right", "too low" or "too high"; "" if the prediction isn't a number.

    Args:
        unit: of a prediction without one.
        shown: the result on the screen, with its unit.
        exact: the same number, not rounded, in bytes, seconds or as a count; None: there is none.
    """
    guesses = readings(prediction, unit)
    if not guesses or exact is None:
        return ""
    on_screen = readings(shown, unit)[0]
    rounding = 0.0 if math.isclose(on_screen.value, exact) else on_screen.rounding
    differences = [(guess.value - exact, max(guess.rounding, rounding)) for guess in guesses]
    if any(abs(difference) <= most * (1 + 1e-9) for difference, most in differences):
        return "right"
    return "too low" if min(differences, key=lambda pair: abs(pair[0]))[0] < 0 else "too high"
