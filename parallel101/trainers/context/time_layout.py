"""The positions of a sequence that each rank of a context-parallel group has.

    9 positions, 2 ranks   contiguous     zigzag: four chunks
    rank 0                 0 1 2 3 4      0 1 2 | 7 8           the first and the last
    rank 1                 5 6 7 8        3 4 | 5 6             the second, and the last but one

Under a causal mask, position t attends to t + 1 positions, so the last rank of the contiguous
layout has the most to compute. In zigzag every rank has a cheap chunk and an expensive one. Source:
"The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel101.mesh import GroupLike, group_of, split_ranges
from parallel101.trainers.expect import expect

# The part of one rank's keys that another's queries see: the queries that see any of them and the
# keys that any query sees, as slices of what each holds; whether each query sees the keys up to its
# own position only, else all; and how many pairs these are
Seen = tuple[slice, slice, bool, int]


def pieces(time: int, n: int, position: int, layout: str) -> list[range]:
    """Return the ranges of positions that `position` of n ranks has, in order.

    Raises ValueError for an unknown layout, and if a rank would have no position.
    """
    expect("layout", layout, layout in ("contiguous", "zigzag"), '"contiguous" or "zigzag"')
    expected = f"at least one position for each of {n} ranks. Use fewer, or longer sequences"
    expect("time", time, type(time) is int and time >= n, expected)
    if layout == "contiguous":
        return [split_ranges(time, n)[position]]
    chunks = split_ranges(time, 2 * n)
    return [chunks[position], chunks[2 * n - 1 - position]]


def time_sizes(time: int, n: int, layout: str) -> list[int]:
    """Return how many of `time` positions each of n ranks has.

    Raises ValueError as `pieces`.
    """
    return [sum(map(len, pieces(time, n, position, layout))) for position in range(n)]


def local_positions(
    time: int, n: int, position: int, layout: str, device: torch.device | str | None = None
) -> Tensor:
    """Return the positions that `position` of n ranks has, as an int64 tensor, in order.

    Raises ValueError as `pieces`.
    """
    ranges = pieces(time, n, position, layout)
    return torch.cat([torch.arange(each.start, each.stop, device=device) for each in ranges])


def context_positions(
    time: int,
    *,
    group: GroupLike = None,
    layout: str = "contiguous",
    device: torch.device | str | None = None,
) -> Tensor:
    """Return this rank's positions of a sequence, in the order in which ring attention has them.

        mine = p101.context_positions(time, layout="zigzag")
        tokens = tokens[:, mine]                # (batch, time) → (batch, time here)
        x = embedding(tokens) + position(mine)  # positions stay those of the whole sequence

    Args:
        time: of the whole sequence, at least the number of ranks.
        group: see `group_of`; None is all ranks. An idle rank has no positions.
        layout: "contiguous" or "zigzag".
        device: of the result.

    Returns an int64 tensor. Sends nothing. Raises ValueError as `pieces`.
    """
    members = group_of(group)
    if members.position is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    return local_positions(time, members.size, members.position, layout, device)


def visible(me: int, source: int, sizes: list[int], layout: str, causal: bool) -> Seen | None:
    """Return the part of position `source`'s keys that the queries of position `me` see.

        zigzag, 2 ranks     keys 0 | 3   1 | 2
        queries    0             ◣   .   .   .       each row and column is a chunk
                   3             ■   ◣   ■   ■       of rank 0: chunks 0 and 3, of rank 1: 1 and 2
                   1             ■   .   ◣   .
                   2             ■   .   ■   ◣

    Returns None if they see nothing.
    """
    rows, columns = range(sizes[me]), range(sizes[source])
    if causal and source == me:
        return slice(None), slice(None), True, len(rows) * (len(rows) + 1) // 2
    if causal and layout == "contiguous" and source > me:
        return None
    if causal and layout == "zigzag":
        time, n = sum(sizes), len(sizes)
        if source < me:  # its late chunk is later than both of mine
            columns = columns[: len(pieces(time, n, source, layout)[0])]
        else:  # my early chunk is earlier than both of its
            rows = rows[len(pieces(time, n, me, layout)[0]) :]
    seen = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    return *seen, False, len(rows) * len(columns)
