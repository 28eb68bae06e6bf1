"""Finds the chunks of a run, that is the elements that moved together, in the messages' values.

    two elements are in the same chunk if the same messages carried them, containing the same ranks'
    data

If data was added up, a chunk is a part of the tensor and has one stripe for each rank. If data was
only moved, a chunk is a part of one rank's tensor, unless every rank cut its tensor into parts for
all ranks: then a chunk is again a part of the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
    """The chunks of a run, and which of them each message and each result contains.

    It also says whose data each contains.
    """

    chunks: list[Chunk]
    sums: bool  # data was added up somewhere, not only moved
    in_messages: list[dict[int, Counts]]  # by the chunk's number
    in_results: list[dict[int, Counts] | None]  # None for a rank whose result is not known
    number: Callable[[ElementOrigin], int]  # the chunk of an element that holds data


def chunks_of(
    messages: Sequence[list[ElementOrigin]],
    results: Sequence[list[ElementOrigin] | None],
    ranks: Sequence[int],
    meant_for: Sequence[Mapping[int, Element]] = (),
) -> Chunks:
    """Group the terms of messages and results into chunks.

    Args:
        messages: the decoded payload of each message.
        results: the decoded result of each rank, None if it is not known.
        ranks: those that took part.
        meant_for: of the first results, the element that belongs at each place, as far as that is
            known. It counts for memory that was never written.
    """
    tensors = [_placed(message, {}) for message in messages]
    for i, result in enumerate(results):
        tensors.append(_placed(result or [], meant_for[i] if i < len(meant_for) else {}))
    terms = {(element, counts) for tensor in tensors for element, counts in tensor}
    sums = any(sum(counts) > 1 for _, counts in terms)
    origins = sorted(
        {origin for (origin, _), counts in terms if sum(counts) <= 1 and origin is not None}
        | {rank for _, counts in terms for rank, count in enumerate(counts) if count}
    )
    by_position = _group(tensors, by_origin=False)
    if sums or len(origins) <= 1 or len(set(by_position.values())) >= len(origins):
        chunk_of, by_origin = by_position, False
    else:
        tensors = [
            [(element, counts) for element, counts in tensor if element[0] is not None]
            for tensor in tensors
        ]
        chunk_of, by_origin = _group(tensors, by_origin=True), True
    sizes: dict[int, int] = defaultdict(int)
    owner: dict[int, int | None] = {}
    mixtures = {chunk for (_, position), chunk in chunk_of.items() if position is None}
    for (origin, _), chunk in chunk_of.items():
        sizes[chunk] += 1
        owner[chunk] = origin
    every = tuple(ranks) if sums else tuple(origins)
    chunks = [
        Chunk(
            "?" if c in mixtures else letter(c),
            (owner[c],) if by_origin else every,  # type: ignore[arg-type]
            sizes[c],
            c in mixtures,
        )
        for c in range(len(sizes))
    ]

    def content(tensor: Sequence[tuple[Element, Counts]]) -> dict[int, Counts]:
        held: dict[int, Counts] = {}
        for element, counts in tensor:
            chunk = chunk_of[_key(element, by_origin)]
            held[chunk] = tuple(map(max, held.get(chunk, counts), counts))
        return held

    contents = [content(tensor) for tensor in tensors]
    in_results = [
        None if result is None else held
        for result, held in zip(results, contents[len(messages) :], strict=True)
    ]
    return Chunks(
        chunks,
        sums,
        contents[: len(messages)],
        in_results,
        lambda term: chunk_of[_key(_placed([term], {})[0][0], by_origin)],
    )


def letter(chunk: int) -> str:
    """Return the letter of a chunk: a … z, then aa, ab, …"""
    return (letter(chunk // 26 - 1) if chunk >= 26 else "") + chr(ord("a") + chunk % 26)


def _placed(
    tensor: Sequence[ElementOrigin], meant_for: Mapping[int, Element]
) -> list[tuple[Element, Counts]]:
    """Return a tensor's elements that hold data or are meant for it, each with whose data it is."""
    elements: list[tuple[Element, Counts]] = []
    for place, term in enumerate(tensor):
        if any(term.counts):
            elements.append(
                (
                    (next(rank for rank, count in enumerate(term.counts) if count), term.position),
                    term.counts,
                )
            )
        elif term.unwritten and place in meant_for:
            elements.append((meant_for[place], term.counts))
    return elements


def _key(element: Element, by_origin: bool) -> Element:
    return element if by_origin else (None, element[1])


def _group(
    tensors: Sequence[Sequence[tuple[Element, Counts]]], by_origin: bool
) -> dict[Element, int]:
    """Return the chunk of each element, in order of origin and position. Mixtures come last."""
    appearances: dict[Element, list] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        for element, counts in tensor:
            appearances[_key(element, by_origin)].append(
                (index, () if element[1] is None else counts)
            )
    keys = sorted(appearances, key=lambda key: (key[1] is None, key[0] or 0, key[1] or 0))
    numbers: dict[tuple, int] = {}
    chunk_of = {}
    for key in keys:
        same = ("mixed",) if key[1] is None else (key[0], *sorted(appearances[key]))
        chunk_of[key] = numbers.setdefault(same, len(numbers))
    return chunk_of
