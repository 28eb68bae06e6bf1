"""The binomial tree: a rank responsible for a range of ranks gives half of it to a rank there.

That rank does the same with its half.

    0 1 2 3 4 5 6 7      step 1:  0 → 4
    0 1 2 3|4 5 6 7      step 2:  0 → 2   4 → 6
    0 1|2 3|4 5|6 7      step 3:  0 → 1   2 → 3   4 → 5   6 → 7

It has ⌈lg p⌉ steps for any p and any root. Each half is a contiguous range of ranks, so its blocks
are one message. Broadcast and scatter go from the root to the leaves, reduce and gather from the
leaves to the root. This file sends nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class Branch(NamedTuple):
    """One edge of the tree. All ranks here are positions in the group."""

    parent: int  # the rank responsible for a range
    child: int  # the rank that gets half of it
    ranks: slice  # that half


def path(p: int, root: int, rank: int) -> list[Branch]:
    """Return the branches from the root that lead to `rank` or start at it.

    Some of them do neither; `rank` skips them.
    """
    branches, holder, low, high = [], root, 0, p
    while high - low > 1:
        middle = (low + high + 1) // 2
        # keep the larger half, so that the root sends no more than n(p−1)/p bytes
        if holder >= middle:
            middle = (low + high) // 2
        lower, upper = slice(low, middle), slice(middle, high)
        kept, given = (lower, upper) if holder < middle else (upper, lower)
        branches.append(Branch(holder, given.start, given))
        if given.start <= rank < given.stop:
            holder, kept = given.start, given
        low, high = kept.start, kept.stop
    return branches


def subtree(p: int, root: int, rank: int) -> slice:
    """Return the ranks whose blocks pass through `rank`: all for the root, itself for a leaf."""
    return next(
        (branch.ranks for branch in path(p, root, rank) if branch.child == rank), slice(0, p)
    )
