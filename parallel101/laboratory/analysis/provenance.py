"""Tensors whose values encode their origin, so that a record shows whose data a message has.

The program needs no annotations.

    element j of rank r starts as  F·(8^r + 8^n·code(j))   ·  code(j) = K·(j + 1) + (j² mod K)
    a sum over ranks is            F·(Σ c_r·8^r + 8^n·code(j)·Σ c_r)

Digit r in base 8 is how often rank r is in a sum: 2 means that it was counted twice. The part above
the digits, divided by the sum of the digits, is the code of a position in the tensor. If no
position has this code, elements from different positions were added. The common factor F = n² keeps
a mean, and a mean of means, exact: what a sum was divided by is found by trying.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

BASE = 8
# elements of a tensor whose means are followed: with more, other numbers would be mistaken for them
MOST_DIVIDED = 1 << 16
MOST = BASE - 1  # how often one rank can be counted in a sum
# the largest number up to which all integers are exact
_LARGEST = {torch.int64: 2**63 - 1, torch.float64: 2**53}


class ElementOrigin(NamedTuple):
    """The origin of one element's value."""

    # in the ranks' tensors; None if it holds nothing, or elements from different positions
    position: int | None
    counts: tuple[int, ...]  # how often each rank's data is in it, by rank
    divisor: int = 1  # what the sum was divided by
    unwritten: bool = False  # memory that was never written is in it
    meant_for: int | None = None  # of such memory: the rank whose data belongs there, if known

    @property
    def mixed(self) -> bool:
        """Return True if elements from different positions were added together."""
        return self.position is None and any(self.counts)

    @property
    def origin(self) -> int | None:
        """Return the first rank whose data it holds, or should hold."""
        return next((rank for rank, count in enumerate(self.counts) if count), self.meant_for)


def origin_tensor(
    rank: int, world_size: int, numel: int, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return the tensor with which `rank` starts.

    `decode` tells whose elements are in its copies and sums.

    Exact for every sum in which no rank is counted more than 7 times.

    Args:
        rank: 0 … world_size − 1.
        world_size: the number of ranks n; each takes three bits.
        numel: the number of elements. The other bits of the dtype must be enough for their
            positions.
        dtype: torch.int64 or torch.float64.

    Returns:
        A tensor of shape (numel,).

    Raises:
        ValueError: a rank outside the world, another dtype, or more elements than fit (the message
            says how many do).
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: expected a whole number of ranks, at least 1")
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank!r} is not one of the {world_size} ranks 0 … {world_size - 1}")
    if not isinstance(numel, int) or numel < 0:
        raise ValueError(f"numel={numel!r}: expected a whole number of elements, at least 0")
    if dtype not in _LARGEST:
        raise ValueError(
            f"dtype={dtype}: values that encode their origin need torch.int64 or torch.float64 "
            "(other dtypes have too few exact bits)"
        )
    most = most_elements(world_size, dtype)
    if numel > most:
        other = ", or torch.int64" if dtype != torch.int64 else ""
        advice = "take fewer elements" if most else f"take fewer ranks{other}"
        raise ValueError(
            f"numel={numel} elements of {world_size} ranks do not fit into {dtype}, which can hold "
            f"{most}: {advice}"
        )
    factor = common_factor(world_size)
    return torch.tensor(
        [factor * BASE**rank + unit(world_size) * _code(j, world_size) for j in range(numel)],
        dtype=dtype,
    )


def common_factor(world_size: int) -> int:
    """Return F. For more than 8 ranks there is no room for it."""
    return world_size**2 if world_size <= 8 else 1


def unit(world_size: int) -> int:
    """Return F·8^n, by which an element's code is multiplied."""
    return common_factor(world_size) * BASE**world_size


def most_elements(world_size: int, dtype: torch.dtype = torch.int64) -> int:
    """Count the elements that `origin_tensor` can distinguish for this many ranks."""
    room = _LARGEST[dtype] // unit(world_size)  # for the codes of a sum
    # the largest code that fits 7·n times; all digits may be 7
    room = (room - 1) // (MOST * world_size)
    return max(0, (room + 1) // _check(world_size) - 1)


def decode(values: Sequence[float] | None, world_size: int) -> list[ElementOrigin] | None:
    """Return each value's origin, or None if the values aren't sums of `origin_tensor`'s values.

    Args:
        values: of a payload or a result, flat; None if they aren't known.
        world_size: the number of ranks of the run.

    Returns:
        An ElementOrigin for each value. A zero holds nothing, nor does memory that was never
        written: position None, all counts 0.
    """
    if values is None:
        return None
    origins: dict[float, ElementOrigin] = {}
    for value in values:
        if value not in origins:
            origin = _origin(value, world_size)
            if (origin is None or origin.mixed) and is_unwritten(value):
                origin = ElementOrigin(None, (0,) * world_size, unwritten=True)
            if origin is None:
                return None
            origins[value] = origin
    divisors = {origin.divisor for origin in origins.values() if origin.divisor > 1}
    # what looks like a mixture may be a mean, like its neighbours
    for value, origin in origins.items() if divisors else ():
        if origin.mixed:
            origins[value] = next(
                (mean for divisor in divisors for mean in _sums(value, divisor, world_size)), origin
            )
    return [origins[value] for value in values]


def flat_values(result: object, most: int = 1 << 16) -> list[float] | None:
    """Return the numbers in a rank's result: tensors, numbers, lists of them.

    None if there is anything else, or more than `most`.
    """
    if result is None:
        return []
    if isinstance(result, torch.Tensor):
        return result.detach().flatten().tolist() if result.numel() <= most else None
    if isinstance(result, (int, float)):
        return [result]
    if isinstance(result, str | bytes) or not isinstance(result, Sequence) or len(result) > most:
        return None
    parts = [flat_values(part, most) for part in result]
    values = [value for part in parts if part is not None for value in part]
    return None if None in parts else values


def is_unwritten(value: float) -> bool:
    """Return whether torch has filled new memory with this value, or a sum has such a value in it.

    It fills it with NaN or the largest integer, if it is deterministic, as `watch` makes it.
    """
    return not isinstance(value, bool) and (value != value or 2**61 <= abs(value) < math.inf)


def _check(world_size: int) -> int:
    """Return K: a prime, as large as the bits allow.

    At most one mixture in K is mistaken for a position.
    """
    return 61 if world_size <= 12 else 7 if world_size <= 16 else 1


def _code(position: int, world_size: int) -> int:
    check = _check(world_size)
    return check * (position + 1) + position * position % check


def _origin(value: float, world_size: int) -> ElementOrigin | None:
    """Return the origin of one value.

    If it isn't a sum of origins, it may be such a sum divided by a whole number.
    """
    if isinstance(value, bool) or not 0 <= value < math.inf:
        return None
    whole = next((_sum(total, world_size) for total in _multiplied(value, 1, world_size)), None)
    if whole is not None and not whole.mixed:
        return whole
    most = max(world_size * min(world_size, 8), 16)
    divisors = range(2, most + 1) if whole is None else (world_size, world_size**2)
    means = [origin for divisor in divisors for origin in _sums(value, divisor, world_size)]
    if whole is not None:  # a mixture, it seems: it is a mean only if each rank is in it once
        means = [origin for origin in means if set(origin.counts) == {1}]
    return min(means, key=lambda origin: (max(origin.counts), origin.divisor), default=whole)


def _sums(value: float, divisor: int, world_size: int) -> Iterator[ElementOrigin]:
    """Yield the sums of elements of one position that give `value` when they are divided."""
    for total in _multiplied(value, divisor, world_size):
        origin = _sum(total, world_size)
        if origin is not None and origin.position is not None and origin.position < MOST_DIVIDED:
            yield origin._replace(divisor=divisor)


def _multiplied(value: float, divisor: int, world_size: int) -> Iterator[int]:
    """Yield the whole numbers that give `value` when multiplied by F and divided by `divisor`.

    The result may be exact or rounded down.
    """
    factor = common_factor(world_size)
    if value != int(value):
        total = round(value * divisor / factor)
        if abs(total * factor / divisor - value) <= 1e-12 * value:
            yield total
        return
    total = -(-int(value) * divisor // factor)
    while total * factor // divisor == value:
        yield total
        total += 1


def _sum(total: int, world_size: int) -> ElementOrigin | None:
    """Return the origin of a sum of origins, without their factor."""
    high, low = divmod(total, BASE**world_size)
    counts = tuple(low // BASE**r % BASE for r in range(world_size))
    count = sum(counts)
    if count == 0:
        return ElementOrigin(None, counts) if high == 0 else None
    check = _check(world_size)
    if high < count * check:  # smaller than the code of position 0: an ordinary small number
        return None
    code, rest = divmod(high, count)
    position = code // check - 1
    return ElementOrigin(None if rest or code != _code(position, world_size) else position, counts)
