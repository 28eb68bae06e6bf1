"""Finds what is wrong with the values that the ranks returned.

That is their order, their place, their factor, or elements that were lost.

    an all-gather returns    c b a        order: the parts are in the order c, b, a
    a reduce-scatter, rank 0     b        place: rank 0 ends with chunk b, which is rank 1's part
    a mean of 4 ranks       x/16          factor: 1/16 of the sum; the mean is 1/4 of it
    of 10 elements, returned     8        lost: 2 elements are in no result

The chunks say which data a rank has. This file looks at each element: where in the result it is,
and what it was divided by.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from parallel101.laboratory.analysis.provenance import ElementOrigin
from parallel101.laboratory.analysis.replay import Replay

ElementKey = tuple[
    int, int
]  # what an element of a result is: (its origin, or 0 for a sum; its position)


class Fault(NamedTuple):
    """A fault in the values that ranks returned."""

    # "twice", "missing", "mixed", "absent", "unwritten", "nothing", "order", "place", "factor",
    # "lost"
    kind: str
    chunk: int
    # how often it is in the sum; what the sum was divided by; how many elements were lost (0: all
    # of `origins`)
    times: int
    holders: tuple[int, ...]  # the ranks that ended with it
    origins: tuple[
        int, ...
    ]  # whose data it is; of "order": the chunks in their order in the result


def value_faults(replay: Replay, operation: str) -> list[Fault]:
    """Return the faults in the results of a run whose ranks hold the chunks that they should."""
    whose = operation in ("all-gather", "gather", "all-to-all")
    there = {origin for chunk in replay.chunks for origin in chunk.stripes}
    forgotten = (
        tuple(sorted({rank for origin in there for rank in replay.expected[origin]} - there))
        if whose
        else ()
    )
    if forgotten:
        return [Fault("lost", 0, 0, (), forgotten)]
    if not any(replay.origins):
        return []
    keys = {rank: keys_of(replay, rank, whose) for rank in replay.ranks if replay.elements(rank)}
    return [
        *_orders(replay, keys),
        *_place_faults(replay, keys, operation),
        *_factors(replay),
        *_losses(replay, keys, whose),
    ]


def part_faults(replay: Replay) -> list[Fault]:
    """Return the fault if each rank has one part of one rank's data, but two have the same part.

    Then another part is in no result.
    """
    parts = [replay.final(rank) for rank in replay.ranks]
    origins = tuple({origin for chunk in replay.chunks for origin in chunk.stripes})
    if (
        replay.sums
        or replay.numel is None
        or len(origins) != 1
        or any(len(part) != 1 for part in parts)
    ):
        return []
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, part in zip(replay.ranks, parts, strict=True):
        holders[next(iter(part))].append(rank)
    lost = replay.numel - sum(replay.chunks[chunk].elements for chunk in holders)
    double = [chunk for chunk in sorted(holders) if len(holders[chunk]) > 1]
    if len(holders) < 2 or not double or lost <= 0:
        return []
    return [Fault("lost", double[0], lost, tuple(holders[double[0]]), origins)]


def keys_of(replay: Replay, rank: int, whose: bool) -> list[ElementKey]:
    return [
        (element.counts.index(max(element.counts)) if whose else 0, element.position or 0)
        for element in _placed(replay, rank)
    ]


def _placed(replay: Replay, rank: int) -> list[ElementOrigin]:
    """Return the elements of a result that are copies, sums or means of one position."""
    return [element for element in replay.elements(rank) if element.position is not None]


def _orders(replay: Replay, keys: dict[int, list[ElementKey]]) -> list[Fault]:
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, elements in keys.items():
        if joined_along(replay, rank, elements) is None:
            holders[tuple(chunk for chunk, _ in groupby(_chunk_of(replay, rank)))].append(rank)
    return [Fault("order", chunks[0], 0, tuple(ranks), chunks) for chunks, ranks in holders.items()]


def joined_along(replay: Replay, rank: int, elements: list[ElementKey]) -> int | None:
    """Return the dim along which the parts of a result are joined in order, or None."""
    result = replay.results[rank] if rank < len(replay.results) else None
    if elements == sorted(set(elements)):
        return 0
    # several tensors, such as a list of blocks and their sum
    if isinstance(result, Sequence) and len(set(elements)) < len(elements):
        return 0 if all(part == sorted(part) for part in _each(result, elements)) else None
    if not isinstance(result, torch.Tensor) or result.numel() != len(elements):
        return None
    sizes = Counter(origin for origin, _ in elements)
    indices = torch.arange(len(elements)).reshape(result.shape)
    for dim in range(1, result.dim()):
        across = len(elements) // max(1, result.shape[dim])
        lengths = [sizes[origin] // across for origin in sorted(sizes)]
        if sum(lengths) == result.shape[dim]:
            parts = [part.flatten().tolist() for part in indices.split(lengths, dim)]
            if [elements[index] for part in parts for index in part] == sorted(set(elements)):
                return dim
    return None


def _each(result: Sequence, elements: list[ElementKey]) -> list[list[ElementKey]]:
    parts, start = [], 0
    for part in result:
        numel = part.numel() if isinstance(part, torch.Tensor) else 1
        parts.append(elements[start : start + numel])
        start += numel
    return parts


def _chunk_of(replay: Replay, rank: int) -> list[int]:
    """Return the chunk of each element that a rank returned, in order."""
    return [replay.number(element) for element in _placed(replay, rank)]


def _place_faults(replay: Replay, keys: dict[int, list[ElementKey]], operation: str) -> list[Fault]:
    """Return faults for parts on a wrong rank. The parts belong to the ranks in order."""
    if operation not in ("scatter", "reduce-scatter", "all-to-all"):
        return []
    first = {
        rank: min(position for _, position in elements)
        for rank, elements in keys.items()
        if elements
    }
    owners = dict(zip(sorted(first, key=lambda rank: first[rank]), sorted(first), strict=True))
    return [
        Fault("place", _chunk_of(replay, rank)[0], 0, (rank,), (owner,))
        for rank, owner in sorted(owners.items())
        if rank != owner
    ]


def _factors(replay: Replay) -> list[Fault]:
    """Return faults for results that are a fraction of the sum other than its mean.

    Results that differ in this are faults, too.
    """
    divisors: dict[tuple[int, int], int] = {}  # of each (rank, chunk)
    right: Counter[bool] = Counter()  # how many elements are sums, and how many are means
    for rank in replay.ranks:
        for element in _placed(replay, rank):
            chunk = replay.number(element)
            divisors[rank, chunk] = max(element.divisor, divisors.get((rank, chunk), 1))
            if element.divisor in (1, sum(element.counts)):
                right[element.divisor == 1] += 1
    expected = dict.fromkeys(divisors, 1)
    if replay.sums and right[False] > right[True]:
        expected = {(rank, chunk): sum(replay.final(rank)[chunk]) for rank, chunk in divisors}
    holders: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (rank, chunk), divisor in sorted(
        divisors.items(), key=lambda item: (item[0][1], item[0][0])
    ):
        if divisor != expected[rank, chunk]:
            holders[chunk, divisor].append(rank)
    return [
        Fault("factor", chunk, divisor, tuple(ranks), ())
        for (chunk, divisor), ranks in holders.items()
    ]


def _losses(replay: Replay, keys: dict[int, list[ElementKey]], whose: bool) -> list[Fault]:
    """Return a fault for a remainder of the input that is in no result.

    (A function may leave out more on purpose, which isn't a fault.)
    """
    if replay.numel is None:
        return []
    there = {key for elements in keys.values() for key in elements}
    inputs = len(replay.ranks) if whose else 1
    lost = replay.numel * inputs - len(there)
    return (
        [Fault("lost", 0, lost // inputs, (), ())]
        if 0 < lost < len(replay.ranks) * inputs and lost % inputs == 0
        else []
    )
