"""Bytes, seconds and lists of ranks as text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence


def human_bytes(nbytes: float) -> str:
    """Format bytes in powers of 1024: 1536 -> "1.5 KiB", with one decimal if it is needed."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop()
    digits = 0 if nbytes >= 100 or nbytes == int(nbytes) else 1
    return f"{nbytes:.{digits}f} {units[-1]}"


def decimal_bytes(nbytes: float) -> str:
    """Format bytes in powers of 1000, as in papers: 18_874_368 -> "18.9 MB".

    A trainer's `describe()` does so too.
    """
    units = ["TB", "GB", "MB", "kB", "B"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        units.pop()
    return f"{nbytes:.3g} {units[-1]}"


def human_seconds(seconds: float) -> str:
    """Format seconds with three significant digits: 0.0123 -> "12.3 ms"."""
    unit, scale = "s", 1.0
    for smaller in ("ms", "µs"):
        if seconds * scale < 1:
            unit, scale = smaller, scale * 1000
    value = seconds * scale
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def round_step(span: float, most: int) -> float:
    """Return the distance between the ticks of an axis: 1, 2 or 5 times a power of ten.

    A `span` has at most `most` ticks.
    """
    if span <= 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(span / most))
    return step * next(k for k in (1, 2, 5, 10, 20) if span / (step * k) <= most)


def listed(items: Iterable[object]) -> str:
    """Format a list: [1, 2, 3] -> "1, 2 and 3"."""
    words = [str(item) for item in items]
    if len(words) < 2:
        return words[0] if words else "none"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def ranks_text(numbers: Iterable[int], everyone: Iterable[int] = ()) -> str:
    """Format ranks: [2] -> "rank 2"; [0, 1, …, 5, 7] -> "ranks 0–5 and 7".

    All of `everyone` gives "every rank". A long list is cut to its beginning and the number of
    further ranks.
    """
    ranks = sorted(set(numbers))
    if len(ranks) > 1 and ranks == sorted(everyone):
        return "every rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    parts: list[object] = []
    for _, numbered in itertools.groupby(enumerate(ranks), lambda entry: entry[1] - entry[0]):
        run = [rank for _, rank in numbered]
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else run
        if len(parts) >= 8 and run[-1] != ranks[-1]:
            return f"ranks {listed([*parts, f'{len(ranks) - ranks.index(run[-1]) - 1} more'])}"
    return f"ranks {listed(parts)}"


def chunk_letters(names: Sequence[str]) -> str:
    """Format the letters of chunks, in order: "a", "a and b", "a–d"."""
    if (
        len(names) > 2
        and all(len(name) == 1 for name in names)
        and ord(names[-1]) - ord(names[0]) == len(names) - 1
    ):
        return f"{names[0]}–{names[-1]}"
    return listed(names)


def sentence(text: str) -> str:
    """Return the text with a capital at the start and a full stop at the end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")
