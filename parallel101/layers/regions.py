"""Regions of a tensor: each rank has one and needs another, and they exchange what is missing.

    whole tensor        0 1 2 3 4 5 6 7
    rank 0   has        0 1 2 3             needs   0 1 2 3 4          gets 4 from rank 1
    rank 1   has                4 5 6 7     needs         3 4 5 6 7    gets 3 from rank 0

Every rank works out all messages from the two lists of regions, so that nobody sends a message to
ask. Where several ranks have an element, its values are summed. That makes the exchange its own
transpose: backward is the same function with the two lists swapped. Repartition and HaloExchange
are this exchange with different regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from torch import Size, Tensor

from parallel101.autograd.differentiable import differentiable
from parallel101.collectives.blocks import flat_of
from parallel101.collectives.checks import compare, nothing, tensor_of
from parallel101.collectives.comm import comm_of, wait_all
from parallel101.mesh import Group, split_ranges

Region = tuple[range, ...]  # along each dim of the whole tensor; (): nothing of it


def exchange(
    x: Tensor,
    group: Group,
    has: Sequence[Region],
    needs: Sequence[Region],
    name: str,
    **agreed: Any,
) -> Tensor:
    """Return the region that this rank needs, a new tensor; x is the region that it has.

    Each rank sends each other rank the part of its region that the other needs, in one message if
    there is any. Elements that nobody has are zero. Backward does the same with `has` and
    `needs` swapped.

    Args:
        has, needs: the region of each position in `group`.
        name: of the operation, in the record and in errors.
        agreed: values that must be the same on all ranks; a checked run compares them.

    Returns a zero-volume tensor on a rank that needs nothing.
    """

    def forward(x: Tensor) -> Tensor:
        x, comm = tensor_of(x), comm_of(group, x.device, name)
        compare(name, group, dtype=x.dtype, **agreed)
        old, new = has[comm.rank], needs[comm.rank]
        result = x.new_zeros(extent(new)) if new else nothing(x)
        inboxes, outboxes, works = [], [], []
        for rank, region in overlaps(new, has):
            part = result[within(new, region)]
            if rank == comm.rank:
                part.copy_(x[within(old, region)])
            else:
                inboxes.append((part, x.new_empty(part.shape)))
                works.append(comm.irecv(inboxes[-1][1].view(-1), source=rank))
        for rank, region in overlaps(old, needs):
            if rank != comm.rank:
                outboxes.append(flat_of(x[within(old, region)]))  # kept until it is sent
                works.append(comm.isend(outboxes[-1], to=rank))
        wait_all(works)
        for part, inbox in inboxes:
            part.add_(inbox)
        return result

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return exchange(g, group, needs, has, name, **agreed)

    return differentiable(name, x, group, forward, backward)


def blocks(whole: Sequence[int], mesh_shape: Sequence[int]) -> list[Region]:
    """Return the block of each rank of a mesh, row by row: mesh axis i cuts dim i."""
    uncut = [[range(n)] for n in whole[len(mesh_shape) :]]
    return list(product(*map(split_ranges, whole, mesh_shape), *uncut))


def overlaps(region: Region, others: Sequence[Region]) -> Iterator[tuple[int, Region]]:
    """Yield the positions of the regions that share elements with this one, and which elements."""
    for position, other in enumerate(others):
        common = tuple(
            range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(region, other)
        )
        if common and all(common):
            yield position, common


def extent(region: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(map(len, region))


def within(block: Region, region: Region) -> tuple[slice, ...]:
    """Return where this region of the whole tensor is in the block."""
    return tuple(
        slice(part.start - own.start, part.stop - own.start) for own, part in zip(block, region)
    )
