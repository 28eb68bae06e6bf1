"""Judges a reader's prediction: "252" µs of a time of 252.4 µs is right.

So is "1.344 KB" if the screen shows 1.3 KiB, and "6" of 6 steps. A prediction is right within 1 %
of the exact result, or if it is what the screen shows. A count must be exact.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress

BYTES = {"b": 1.0, "byte": 1.0, "bytes": 1.0}
BYTES |= {f"{prefix}b": 1000.0**k for k, prefix in enumerate("kmgt", 1)} | {
    f"{prefix}ib": 1024.0**k for k, prefix in enumerate("kmgt", 1)
}
SECONDS = {"s": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "μs": 1e-6}
TOLERANCE = 0.01


def readings(text: str, unit: str) -> list[float]:
    """Return every reading of a text as a number, in bytes, seconds or as a count.

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
    found = []
    for number in (re.sub("[, ]", "", parts[1]), parts[1].replace(",", ".")):
        with suppress(ValueError):
            found.append(float(number) * scale)
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
    tolerance, on_screen = TOLERANCE if unit else 1e-9, readings(shown, unit)
    if any(math.isclose(n, exact, rel_tol=tolerance) or n in on_screen for n in guesses):
        return "right"
    return "too low" if min(guesses, key=lambda n: abs(n - exact)) < exact else "too high"
