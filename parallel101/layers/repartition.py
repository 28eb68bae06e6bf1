"""Repartition: a tensor goes from the blocks of one mesh to those of another.

Each rank sends to each other rank what both of their blocks have in common.

    source: mesh 3 × 1        target: mesh 1 × 2
        0 0 0 0                   0 0 1 1            rank 1 sends the left half of its rows to
        1 1 1 1         ─▶        0 0 1 1            rank 0, and keeps the right half
        2 2 2 2                   0 0 1 1

It is one all-to-all of unequal pieces, of which many are empty. Its adjoint is the Repartition
back. It is an `exchange` of regions, as HaloExchange is one: each rank has one region of a tensor
and needs another.

    whole tensor        0 1 2 3 4 5 6 7
    rank 0   has        0 1 2 3             needs   0 1 2 3 4          gets 4 from rank 1
    rank 1   has                4 5 6 7     needs         3 4 5 6 7    gets 3 from rank 0

Every rank works out all messages from the two lists of regions, so that nobody sends a message to
ask. Where several ranks have an element, its values are summed. That makes the exchange its own
transpose: backward is the same function with the two lists swapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd.differentiable import differentiable
from parallel101.collectives.blocks import flat_of
from parallel101.collectives.checks import compare, nothing, tensor_of
from parallel101.collectives.comm import comm_of, wait_all
from parallel101.layers.axes import check_dims, mesh_axes
from parallel101.mesh import Group, group_of, split_ranges


class Repartition(nn.Module):
    """Moves a tensor from the blocks into which one mesh cuts it to those of another mesh.

    Mesh axis i cuts dim i, by `split_sizes`.

    Args:
        source, target: DeviceMeshes of any ranks and shapes. A rank outside the source gives a
            zero-volume tensor, and one outside the target gets one. A rank outside both sends
            nothing.
        shape: of the whole tensor. Default: all blocks of the source are as large as mine; then
            every rank of the target must be in the source, because no message is spent on asking.

    Forward takes this rank's block and returns its new one, a new tensor. A rank sends to each
    other rank the part of its block that belongs to the other's new block, in one message. What it
    has already is copied. Adjoint: Repartition(target, source).

    Raises ValueError or TypeError for wrong arguments; ValueError, before any message, for a block
    that contradicts `shape`.

    Source: DistDL's Repartition; Hewett and Grady (arXiv 2006.03108), which calls it a generalized
    all-to-all.
    """

    def __init__(
        self, source: DeviceMesh, target: DeviceMesh, *, shape: Sequence[int] | None = None
    ):
        super().__init__()
        self.source, self.target = mesh_axes(source, (), shape), mesh_axes(target, (), shape)
        # by rank, row by row
        self.givers, self.takers = source.mesh.flatten().tolist(), target.mesh.flatten().tolist()
        strangers = sorted({*self.takers} - {*self.givers})
        if shape is None and strangers:
            raise ValueError(
                f"the ranks {strangers} of the target are not in the source, so they can't "
                "know the shape: expected shape="
            )

    def forward(self, x: Tensor) -> Tensor:
        group = group_of(sorted({*self.givers, *self.takers}))
        if not self.source.takes(x, cut=range(len(self.source.shape))) and group.position is None:
            return x.clone()
        # without shape=, all blocks are as large as x
        n, parts = x.dim(), self.source.shape
        whole = self.source.whole or [size * p for size, p in zip(x.shape, (*parts, *[1] * n))]
        check_dims(whole, self.target.shape, "x")
        has, needs = (
            [blocks_of.get(rank, ()) for rank in group.ranks] for blocks_of in self.blocks(whole)
        )
        return exchange(x, group, has, needs, "repartition", whole_shape=tuple(whole))

    def blocks(self, whole: Sequence[int]) -> Iterator[dict[int, Region]]:
        """Yield the block of each rank of the source, and then of the target."""
        for ranks, mesh in ((self.givers, self.source), (self.takers, self.target)):
            uncut = [[range(n)] for n in whole[len(mesh.shape) :]]
            yield dict(zip(ranks, product(*map(split_ranges, whole, mesh.shape), *uncut)))

    def elements_sent(self, shape: Sequence[int]) -> dict[tuple[int, int], int]:
        """Return the elements that each rank will send to each other, {(from, to): elements}.

        `shape` is that of the whole tensor. The ranks are global.
        """
        source, target = self.blocks(shape)
        return {
            (rank, self.takers[position]): Size(extent(region)).numel()
            for rank, block in source.items()
            for position, region in overlaps(block, list(target.values()))
            if rank != self.takers[position]
        }

    def extra_repr(self) -> str:
        source, target = ("×".join(map(str, mesh.shape)) for mesh in (self.source, self.target))
        return f"mesh {source} → mesh {target}"


# ── The exchange of regions

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
