"""The blocks that each rank of a watched run was given and returned, as rows.

They are the matrices of a collective.

    given     rank 0  a0 b0 c0        returned   rank 0  a0 a1 a2        all-to-all: a transposition
              rank 1  a1 b1 c1                   rank 1  b0 b1 b2
              rank 2  a2 b2 c2                   rank 2  c0 c1 c2

A block is a chunk's part from one rank, or the sum of the parts of several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from parallel101.laboratory.analysis.chunks import Counts
from parallel101.laboratory.analysis.provenance import ElementOrigin
from parallel101.laboratory.analysis.replay import Replay


class ChunkPart(NamedTuple):
    """Neighbouring elements of one chunk, with the same ranks' data in them."""

    chunk: int | None  # None: data that no rank sent or returned, or none at all
    counts: Counts  # how often each rank's data is in it


def given_blocks(replay: Replay) -> list[list[ChunkPart]]:
    """Return the blocks that each of the replay's ranks was given, in order.

    Raises ValueError for a run whose data can't be followed.
    """
    if replay.numel is None:
        raise ValueError(
            "the blocks of a run are known if its data can be followed: run it with p101.watch(fn, "
            "…)"
        )
    if not replay.known:
        raise ValueError(
            "the data of this run can't be followed: its messages and results hold nothing that "
            "can be read as copies, sums or means of x. The messages inside torch's own "
            "collectives are not recorded: use the package's, such as p101.all_reduce, or your "
            "own, and return a tensor"
        )
    n = replay.trace.world_size
    own = {rank: tuple(int(r == rank) for r in range(n)) for rank in replay.ranks}
    return [
        _in_blocks(_block(replay, ElementOrigin(i, own[rank])) for i in range(replay.numel))
        for rank in replay.ranks
    ]


def returned_blocks(replay: Replay) -> list[list[ChunkPart]]:
    """Return the blocks that each of the replay's ranks returned, in order."""
    return [
        _in_blocks(_block(replay, element) for element in replay.elements(rank))
        for rank in replay.ranks
    ]


def is_transposed(given: list[list[ChunkPart]], returned: list[list[ChunkPart]]) -> bool:
    """Return whether each column of blocks has become a row."""
    return (
        len(given) > 1
        and [list(column) for column in zip(*given)] == returned
        and {len(row) for row in given} == {len(given)}
    )


def _block(replay: Replay, element: ElementOrigin) -> ChunkPart:
    chunk = replay.number(element) if any(element.counts) else None  # else it was never written
    used = chunk is not None and any(element.counts[r] for r in replay.chunks[chunk].stripes)
    return ChunkPart(chunk, element.counts) if used else ChunkPart(None, ())


def _in_blocks(blocks: Iterable[ChunkPart]) -> list[ChunkPart]:
    return [block for block, _ in groupby(blocks)]
