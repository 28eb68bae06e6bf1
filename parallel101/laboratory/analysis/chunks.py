"""Finds the chunks of a run, that is the elements that moved together, in the messages' values.

    two elements are in the same chunk if the same messages carried them, containing the same ranks'
    data

If data was added up, a chunk is a part of the tensor and has one stripe for each rank. If data was
only moved, a chunk is a part of one rank's tensor, unless every rank cut its tensor into parts for
all ranks: then a chunk is again a part of the tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parallel101.laboratory.analysis.provenance import ElementOrigin

Counts = tuple[int, ...]  # how often each rank's data is in something, by rank
# (origin, or None for all; position, or None for a mixture of positions)
Element = tuple[int | None, int | None]


class Chunk(NamedTuple):
    """Elements that moved together."""

    label: str
    stripes: tuple[int, ...]  # the ranks whose data it may hold
    elements: int  # how many
    mixed: bool = False  # it is a sum of elements of different positions


class Chunks(NamedTuple):
    """The chunks of a run, and the number of the chunk of each element."""

    chunks: list[Chunk]
    sums: bool  # data was added up somewhere, not only moved
    by_origin: bool  # a chunk is a part of one rank's tensor
    numbers: dict[Element, int]

    def number(self, element: ElementOrigin) -> int | None:
        """Return the chunk of an element, or None if nothing of any chunk is in it, or meant to."""
        return self.numbers.get(_key(element, self.by_origin)) if _is_data(element) else None

    def held(self, tensor: Iterable[ElementOrigin]) -> dict[int, Counts]:
        """Return whose data a tensor holds of each chunk."""
        held: dict[int, Counts] = {}
        for element in tensor:
            if (chunk := self.number(element)) is not None:
                held[chunk] = tuple(map(max, held.get(chunk, element.counts), element.counts))
        return held


def chunks_of(tensors: Sequence[Sequence[ElementOrigin]], ranks: Sequence[int]) -> Chunks:
    """Group the elements of messages, and of what ranks returned and were given, into chunks.

    `ranks`: those that took part.
    """
    every = {element for tensor in tensors for element in tensor if _is_data(element)}
    sums = any(sum(element.counts) > 1 for element in every)
    origins = {r for element in every for r, count in enumerate(element.counts) if count}
    origins |= {element.meant_for for element in every if element.meant_for is not None}
    numbers = _numbers(tensors, by_origin=False)
    by_origin = not sums and len(origins) > 1 and len(set(numbers.values())) < len(origins)
    if by_origin:
        numbers = _numbers(tensors, by_origin=True)
    sizes = Counter(numbers.values())
    owners = {chunk: origin for (origin, _), chunk in numbers.items()}
    mixtures = {chunk for (_, position), chunk in numbers.items() if position is None}
    stripes = tuple(ranks) if sums else tuple(sorted(origins))
    chunks = [
        Chunk(
            "?" if c in mixtures else letter(c),
            (owners[c],) if by_origin else stripes,  # type: ignore[arg-type]
            sizes[c],
            c in mixtures,
        )
        for c in range(len(sizes))
    ]
    return Chunks(chunks, sums, by_origin, numbers)


def letter(chunk: int) -> str:
    """Return the letter of a chunk: a … z, then aa, ab, …"""
    return (letter(chunk // 26 - 1) if chunk >= 26 else "") + chr(ord("a") + chunk % 26)


def _is_data(element: ElementOrigin) -> bool:
    return any(element.counts) or (element.unwritten and element.position is not None)


def _key(element: ElementOrigin, by_origin: bool) -> Element:
    return element.origin if by_origin else None, element.position


def _numbers(tensors: Sequence[Sequence[ElementOrigin]], by_origin: bool) -> dict[Element, int]:
    """Return the chunk of each element, in order of origin and position. Mixtures come last."""
    appearances: dict[Element, list] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        for element in filter(_is_data, tensor):
            counts = () if element.position is None else element.counts
            appearances[_key(element, by_origin)].append((index, counts))
    if by_origin:  # memory that was never written, and may be meant for any rank's data
        appearances = {key: of for key, of in appearances.items() if key[0] is not None}
    keys = sorted(appearances, key=lambda key: (key[1] is None, key[0] or 0, key[1] or 0))
    chunks: dict[tuple, int] = {}
    return {
        (origin, position): chunks.setdefault(
            ("mixed",) if position is None else (origin, *sorted(appearances[origin, position])),
            len(chunks),
        )
        for origin, position in keys
    }
