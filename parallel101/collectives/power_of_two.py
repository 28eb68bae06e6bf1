"""Halving and doubling want a power of two. Any other number of ranks is folded onto one, before and after.

p = 6 = 4 + 2        0◀─1   2◀─3   4   5      each odd rank of the first pairs hands its part to its neighbour and sits out
                     0━━━━━━2━━━━━━4━━━5      the core, a power of two, does the work
                     0─▶1   2─▶3   4   5      and the neighbour hands back the result: two more steps
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from parallel101.collectives.blocks import Blocks
from parallel101.collectives.comm import Comm
from parallel101.collectives.reductions import Reduction


class Fold(NamedTuple):
    core: Comm | None  #  the power of two of ranks that go on; None on one that sits out
    pair: int | None  #  the other rank of my pair, where I am in one; the odd one of the two sits out
    cuts: list[int]  #  rank i of the core works for the ranks cuts[i] … cuts[i + 1] − 1


def fold(comm: Comm) -> Fold:
    core_size = 1 << (comm.size.bit_length() - 1)
    pairs = comm.size - core_size
    cuts = [*range(0, 2 * pairs, 2), *range(2 * pairs, comm.size + 1)]
    pair = comm.rank ^ 1 if comm.rank < 2 * pairs else None
    return Fold(comm.subset(cuts[:-1]), pair, cuts)


def combine_pairs(blocks: Blocks, op: Reduction, comm: Comm, pair: int | None) -> Blocks:
    """The fold before a reduction: the odd rank's values go into its neighbour's. Returns mine, or both in new memory."""
    if pair is None:
        return blocks
    if comm.rank % 2:
        comm.isend(blocks[:], to=pair).wait()
        return blocks
    both = blocks.empty()
    comm.irecv(both[:], source=pair).wait()
    op(blocks[:], both[:], out=both[:])
    return both


def hand_back(result: Tensor, comm: Comm, pair: int | None) -> None:
    """The fold after: the odd rank of a pair receives the result."""
    if pair is not None and comm.rank % 2:
        comm.irecv(result, source=pair).wait()
    elif pair is not None:
        comm.isend(result, to=pair).wait()
