"""Bytes, seconds and lists of ranks as people write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def human_bytes(nbytes: float) -> str:
    """1536 -> "1.5 KiB": powers of 1024, one decimal where it says something."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if nbytes >= 100 or nbytes == int(nbytes) else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def decimal_bytes(nbytes: float) -> str:
    """18_874_368 -> "18.9 MB": powers of 1000, as papers write memory, and as a trainer's `describe()` does."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def human_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms": three significant digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            value = seconds * scale
            digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def round_step(span: float, most: int) -> float:
    """The distance of an axis's ticks: 1, 2 or 5 times a power of ten, so that at most `most` of them fit into `span`."""
    if span <= 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(span / most))
    return step * next(k for k in (1, 2, 5, 10, 20) if span / (step * k) <= most)


def listed(items: Iterable[object]) -> str:
    """[1, 2, 3] -> "1, 2 and 3"."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"


def ranks(numbers: Sequence[int], everyone: Sequence[int] = ()) -> str:
    """[2] -> "rank 2"; [0, 1] -> "ranks 0 and 1"; more than four in a row -> "ranks 0–5"; all of `everyone` -> "every rank"."""
    numbers = sorted(set(numbers))
    if len(numbers) > 1 and numbers == sorted(everyone):
        return "every rank"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}–{numbers[-1]}"
    return f"ranks {listed(numbers)}" if len(numbers) <= 4 else f"{len(numbers)} ranks"


def labels(names: Sequence[str]) -> str:
    """Chunks by their letters, in order: "a", "a and b", "a–d"."""
    if len(names) > 2 and all(len(name) == 1 for name in names) and ord(names[-1]) - ord(names[0]) == len(names) - 1:
        return f"{names[0]}–{names[-1]}"
    return listed(names)


def sentence(text: str) -> str:
    """The same with a capital first and a full stop last."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")
