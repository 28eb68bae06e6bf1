"""The chunks of a run: which elements moved together, found in the values that the messages carried.

    two elements are in the same chunk if the same messages carried them, containing the same ranks' data

If data was added up, a chunk is a part of the tensor and has one stripe for each rank. If data was only moved, a chunk is a part
of one rank's tensor, unless every rank cut its tensor into parts for all ranks: then a chunk is again a part of the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.analysis.provenance import Term

Counts = tuple[int, ...]  # how often each rank's data is in something, by rank
ElementKey = tuple[int | None, int | None]  # (origin, or None for all; position, or None for a mixture of positions)


class Chunk(NamedTuple):
    """Elements that moved together."""

    label: str
    stripes: tuple[int, ...]  # the ranks whose data it may hold
    elements: int  # how many
    mixed: bool = False  # it stands for sums of elements of different positions


class Chunks(NamedTuple):
    """The chunks of a run, and which of them each message and each result contains, with whose data."""

    chunks: list[Chunk]
    sums: bool  # data was added up somewhere, not only moved
    in_messages: list[dict[int, Counts]]  # by the chunk's number
    in_results: list[dict[int, Counts] | None]  # None for a rank whose result is not known


def chunks_of(messages: Sequence[list[Term]], results: Sequence[list[Term] | None], ranks: Sequence[int]) -> Chunks:
    """Group the terms of messages and results into chunks.

    Args:
        messages: the decoded payload of each message.
        results: the decoded result of each rank, None if it is not known.
        ranks: those that took part.
    """
    tensors = [*messages, *(result or [] for result in results)]
    terms = {term for tensor in tensors for term in tensor if any(term.counts)}
    sums = any(sum(term.counts) > 1 for term in terms)
    origins = sorted({rank for term in terms for rank, count in enumerate(term.counts) if count})
    by_position = _group(tensors, by_origin=False)
    if sums or len(origins) <= 1 or len(set(by_position.values())) >= len(origins):
        chunk_of, by_origin = by_position, False
    else:
        chunk_of, by_origin = _group(tensors, by_origin=True), True
    sizes: dict[int, int] = defaultdict(int)
    owner: dict[int, int | None] = {}
    mixtures = {chunk for (_, position), chunk in chunk_of.items() if position is None}
    for (origin, _), chunk in chunk_of.items():
        sizes[chunk] += 1
        owner[chunk] = origin
    every = tuple(ranks) if sums else tuple(origins)
    chunks = [
        Chunk("?" if c in mixtures else letter(c), (owner[c],) if by_origin else every, sizes[c], c in mixtures)  # type: ignore[arg-type]
        for c in range(len(sizes))
    ]

    def content(tensor: Sequence[Term]) -> dict[int, Counts]:
        held: dict[int, Counts] = {}
        for term in tensor:
            if any(term.counts):
                chunk = chunk_of[_key(term, by_origin)]
                held[chunk] = tuple(map(max, held.get(chunk, term.counts), term.counts))
        return held

    return Chunks(chunks, sums, [content(m) for m in messages], [None if r is None else content(r) for r in results])


def letter(chunk: int) -> str:
    """The letter of a chunk: a … z, then aa, ab, …"""
    name = ""
    chunk += 1
    while chunk:
        chunk, rest = divmod(chunk - 1, 26)
        name = chr(ord("a") + rest) + name
    return name


def _key(term: Term, by_origin: bool) -> ElementKey:
    return (next(rank for rank, count in enumerate(term.counts) if count) if by_origin else None, term.position)


def _group(tensors: Sequence[Sequence[Term]], by_origin: bool) -> dict[ElementKey, int]:
    """The chunk of each element, in order of origin and position. Mixtures come last."""
    appearances: dict[ElementKey, list] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        for term in tensor:
            if any(term.counts):
                appearances[_key(term, by_origin)].append((index, () if term.position is None else term.counts))
    keys = sorted(appearances, key=lambda key: (key[1] is None, key[0] or 0, key[1] or 0))
    numbers: dict[tuple, int] = {}
    chunk_of = {}
    for key in keys:
        same = ("mixed",) if key[1] is None else (key[0], *sorted(appearances[key]))
        chunk_of[key] = numbers.setdefault(same, len(numbers))
    return chunk_of
