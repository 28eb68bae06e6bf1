"""Recursive halving and doubling on a number of ranks that isn't a power of two.

p = 6 = 4 + 2     0◀─1   2◀─3   4   5     before: the odd rank of each of the first pairs sends its
                                          values to its partner
                  0━━━━━━2━━━━━━4━━━5     the core, the nearest power of two below p, runs the
                                          algorithm
                  0─▶1   2─▶3   4   5     after: the partner sends back the result

Source: Thakur, Rabenseifner, Gropp (2005), section 4.5 ("non-power-of-two number of processes").
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from parallel101.collectives.blocks import Blocks
from parallel101.collectives.comm import Comm
from parallel101.collectives.reductions import Reduction


class PowerOfTwo(NamedTuple):
    """The ranks that run the algorithm, and this rank's part before and after it."""

    core: Comm | None  # the ranks that run the algorithm; None on a rank that is not one of them
    # the other rank of my pair, or None; the even rank of a pair is in the core
    partner: int | None
    cuts: list[int]  # the core's rank i works for the ranks cuts[i] … cuts[i + 1] − 1


def nearest_power_of_two(comm: Comm) -> PowerOfTwo:
    """Return the core, the largest power of two of ranks, and this rank's partner."""
    core_size = 1 << (comm.size.bit_length() - 1)
    pairs = comm.size - core_size
    cuts = [*range(0, 2 * pairs, 2), *range(2 * pairs, comm.size + 1)]
    partner = comm.rank ^ 1 if comm.rank < 2 * pairs else None
    return PowerOfTwo(comm.subset(cuts[:-1]), partner, cuts)


def reduce_to_core(blocks: Blocks, op: Reduction, comm: Comm, partner: int | None) -> Blocks:
    """Combine both ranks' values on the even rank of each pair, before a reduction.

    Returns the combined values in new memory, or `blocks` if there is nothing to combine.
    """
    if partner is None:
        return blocks
    if comm.rank % 2:
        comm.isend(blocks[:], to=partner).wait()
        return blocks
    both = blocks.empty()
    comm.irecv(both[:], source=partner).wait()
    op(blocks[:], both[:], out=both[:])
    return both


def copy_from_core(result: Tensor, comm: Comm, partner: int | None) -> None:
    """Send the result to the odd rank of each pair, after the algorithm."""
    if partner is not None and comm.rank % 2:
        comm.irecv(result, source=partner).wait()
    elif partner is not None:
        comm.isend(result, to=partner).wait()
