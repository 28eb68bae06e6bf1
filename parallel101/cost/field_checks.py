"""Checks of the fields of shapes, layouts and clusters, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_whole(of: object, *names: str) -> None:
    """Raise ValueError unless these fields are whole numbers, 1 or more."""
    for name in names:
        if type(value := getattr(of, name)) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number, 1 or more")


def check_known(of: object, known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError unless each of these fields has one of its known values."""
    for name, values in known.items():
        if (value := getattr(of, name)) not in values:
            raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, values))}")
