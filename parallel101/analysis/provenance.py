"""Tensors whose values encode their origin, so that the record of a run shows whose data is in each message, without annotations.

    element j of rank r starts as  8^r + 8^n·code(j)   ·  code(j) = K·(j + 1) + (j² mod K)
    a sum over ranks is            Σ c_r·8^r + 8^n·code(j)·Σ c_r

Digit r in base 8 is how often rank r is in a sum: 2 means that it was counted twice. The part above the digits, divided by the
sum of the digits, is the code of a position in the tensor. If no position has this code, elements from different positions were added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

BASE = 8
MOST = BASE - 1  # how often one rank can be counted in a sum
_LARGEST = {torch.int64: 2**63 - 1, torch.float64: 2**53}  # the largest number up to which all integers are exact


class Term(NamedTuple):
    """What one element holds."""

    position: int | None  # in the ranks' tensors; None if it holds nothing, or elements from different positions
    counts: tuple[int, ...]  # how often each rank's data is in it, by rank

    @property
    def mixed(self) -> bool:
        """True if elements from different positions were added together."""
        return self.position is None and any(self.counts)


def origin_tensor(rank: int, world_size: int, numel: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The tensor with which `rank` starts. `decode` tells whose elements are in its copies and sums.

    Exact for every sum in which no rank is counted more than 7 times.

    Args:
        rank: 0 … world_size − 1.
        world_size: the number of ranks n; each takes three bits.
        numel: the number of elements. The other bits of the dtype must be enough for their positions.
        dtype: torch.int64 or torch.float64.

    Returns:
        A tensor of shape (numel,).

    Raises:
        ValueError: a rank outside the world, another dtype, or more elements than fit (the message says how many do).
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: expected a whole number of ranks, at least 1")
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank!r} is not one of the {world_size} ranks 0 … {world_size - 1}")
    if not isinstance(numel, int) or numel < 0:
        raise ValueError(f"numel={numel!r}: expected a whole number of elements, at least 0")
    if dtype not in _LARGEST:
        raise ValueError(
            f"dtype={dtype}: values that encode their origin need torch.int64 or torch.float64 (other dtypes have too few exact bits)"
        )
    most = most_elements(world_size, dtype)
    if numel > most:
        advice = "take fewer elements" if most else "take fewer ranks" + (", or torch.int64" if dtype != torch.int64 else "")
        raise ValueError(f"numel={numel} elements of {world_size} ranks do not fit into {dtype}, which can hold {most}: {advice}")
    return torch.tensor([BASE**rank + BASE**world_size * _code(j, world_size) for j in range(numel)], dtype=dtype)


def most_elements(world_size: int, dtype: torch.dtype = torch.int64) -> int:
    """How many elements `origin_tensor` can tell apart for this many ranks."""
    largest_sum = BASE**world_size - 1  # all digits 7
    room = (_LARGEST[dtype] - largest_sum) // BASE**world_size // (MOST * world_size)  # the largest code that fits 7·n times
    return max(0, (room + 1) // _check(world_size) - 1)


def decode(values: Iterable[float], world_size: int) -> list[Term] | None:
    """What each value holds, or None if the values are not sums of values from `origin_tensor`.

    Args:
        values: of a payload or a result, flat.
        world_size: the number of ranks of the run.

    Returns:
        A Term for each value. A zero holds nothing: position None, all counts 0.
    """
    terms = []
    known: dict[float, Term | None] = {}
    for value in values:
        if value not in known:
            known[value] = _term(value, world_size)
        term = known[value]
        if term is None:
            return None
        terms.append(term)
    return terms


def flat_values(result: object, most: int = 1 << 16) -> list[float] | None:
    """The numbers in what a rank returned: tensors, numbers, lists of them. None if there is anything else, or more than `most`."""
    if result is None:
        return []
    if isinstance(result, torch.Tensor):
        return result.detach().flatten().tolist() if result.numel() <= most else None
    if isinstance(result, (int, float)):
        return [result]
    if isinstance(result, Sequence) and not isinstance(result, (str, bytes)) and len(result) <= most:
        parts = [flat_values(part, most) for part in result]
        if any(part is None for part in parts):
            return None
        return [value for part in parts if part is not None for value in part]
    return None


def _check(world_size: int) -> int:
    """K: a prime, as large as the bits allow. At most one mixture in K is mistaken for a position."""
    return 61 if world_size <= 12 else 7 if world_size <= 16 else 1


def _code(position: int, world_size: int) -> int:
    check = _check(world_size)
    return check * (position + 1) + position * position % check


def _term(value: float, world_size: int) -> Term | None:
    if isinstance(value, bool) or value != value or value in (float("inf"), float("-inf")) or value < 0 or value != int(value):
        return None
    high, low = divmod(int(value), BASE**world_size)
    counts = tuple(low // BASE**r % BASE for r in range(world_size))
    total = sum(counts)
    if total == 0:
        return Term(None, counts) if high == 0 else None
    check = _check(world_size)
    if high < total * check:  # smaller than the code of position 0: an ordinary small number
        return None
    code, rest = divmod(high, total)
    position = code // check - 1
    if rest or code != _code(position, world_size):
        return Term(None, counts)
    return Term(position, counts)
