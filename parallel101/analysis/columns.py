"""What moved as one: the chunks of a run, found in the values that its messages carried.

    two elements are in the same chunk when the same messages carried them, with the same ranks' data in them

Where sums were taken a chunk is a part of the tensor and holds one stripe for each rank. Where data was only moved it is
a part of one rank's tensor, unless every rank cut its own into parts for all: then the parts are the chunks again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.analysis.provenance import Term
from parallel101.viz.palette import letter

Counts = tuple[int, ...]  #  how often each rank's data is in something, by rank
Atom = tuple[int | None, int | None]  #  (origin or None for all, position or None for a mixture)


class Column(NamedTuple):
    """A chunk. `stripes` are the ranks whose data it may hold, `elements` how many it has."""

    label: str
    stripes: tuple[int, ...]
    elements: int
    mixed: bool = False  #  it stands for sums of elements of different places


class Columns(NamedTuple):
    """The chunks of a run, and for each of its messages and results which chunks it holds, and with whose data."""

    columns: list[Column]
    sums: bool  #  data was added somewhere, and not only moved
    in_messages: list[dict[int, Counts]]
    in_results: list[dict[int, Counts] | None]  #  None for a rank whose result is not known


def columns_of(messages: Sequence[list[Term]], results: Sequence[list[Term] | None], ranks: Sequence[int]) -> Columns:
    """Sort the terms of messages and results into chunks.

    Args:
        messages: the decoded payload of each message.
        results: the decoded result of each rank, None where it is not known.
        ranks: those that took part.
    """
    places = [*messages, *(result or [] for result in results)]
    terms = {term for place in places for term in place if any(term.counts)}
    sums = any(sum(term.counts) > 1 for term in terms)
    origins = sorted({r for term in terms for r, count in enumerate(term.counts) if count})
    by_position = _group(places, by_origin=False)
    if sums or len(origins) <= 1 or len(set(by_position.values())) >= len(origins):
        column_of, by_origin = by_position, False
    else:
        column_of, by_origin = _group(places, by_origin=True), True
    sizes: dict[int, int] = defaultdict(int)
    owner: dict[int, int | None] = {}
    mixtures = {column for (_, position), column in column_of.items() if position is None}
    for (origin, _), column in column_of.items():
        sizes[column] += 1
        owner[column] = origin
    every = tuple(ranks) if sums else tuple(origins)
    columns = [
        Column("?" if c in mixtures else letter(c), (owner[c],) if by_origin else every, sizes[c], c in mixtures)  # type: ignore[arg-type]
        for c in range(len(sizes))
    ]

    def content(place: Sequence[Term]) -> dict[int, Counts]:
        held: dict[int, Counts] = {}
        for term in place:
            if any(term.counts):
                column = column_of[_atom(term, by_origin)]
                held[column] = tuple(map(max, held.get(column, term.counts), term.counts))
        return held

    return Columns(columns, sums, [content(m) for m in messages], [None if r is None else content(r) for r in results])


def _atom(term: Term, by_origin: bool) -> Atom:
    return (next(r for r, count in enumerate(term.counts) if count) if by_origin else None, term.position)


def _group(places: Sequence[Sequence[Term]], by_origin: bool) -> dict[Atom, int]:
    """For each atom its column, in order of origin and place; mixtures come last."""
    history: dict[Atom, list] = defaultdict(list)
    for index, place in enumerate(places):
        for term in place:
            if any(term.counts):
                history[_atom(term, by_origin)].append((index, () if term.position is None else term.counts))
    atoms = sorted(history, key=lambda atom: (atom[1] is None, atom[0] or 0, atom[1] or 0))
    numbers: dict[tuple, int] = {}
    column_of = {}
    for atom in atoms:
        key = ("mixed",) if atom[1] is None else (atom[0], *sorted(history[atom]))
        column_of[atom] = numbers.setdefault(key, len(numbers))
    return column_of
