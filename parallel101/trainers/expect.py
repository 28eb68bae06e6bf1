"""A check of an argument: each error says what was given and what was expected."""

from __future__ import annotations

from typing import Any


def expect(
    name: str, given: Any, right: Any, expected: str, error: type[Exception] = ValueError
) -> None:
    """Raise an error that says what was given, and what was expected, unless that is `right`."""
    if not right:
        raise error(f"{name}={given!r}: expected {expected}")
