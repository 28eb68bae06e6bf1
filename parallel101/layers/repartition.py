"""Repartition: a tensor goes from the blocks of one mesh to those of another.

Each rank sends to each other rank what both of their blocks have in common.

    source: mesh 3 × 1        target: mesh 1 × 2
        0 0 0 0                   0 0 1 1            rank 1 sends the left half of its rows to
        1 1 1 1         ─▶        0 0 1 1            rank 0, and keeps the right half
        2 2 2 2                   0 0 1 1

It is one all-to-all of unequal pieces, of which many are empty. Its adjoint is the Repartition
back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd.differentiable import differentiable
from parallel101.collectives.blocks import flat_of
from parallel101.collectives.checks import compare, nothing, tensor_of
from parallel101.collectives.comm import comm_of, wait_all
from parallel101.layers.axes import check_dims, check_tensor, mesh_axes, outside, whole_shape
from parallel101.mesh import Group, split_ranges

Ranges = tuple[range, ...]  # along each dim of the whole tensor


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
        self.source, self.target = partition_of(source), partition_of(target)
        self.shape = whole_shape(whole_shape(shape, source.shape), target.shape)
        strangers = sorted(set(self.target.ranks) - set(self.source.ranks))
        if shape is None and strangers:
            raise ValueError(
                f"the ranks {strangers} of the target are not in the source, so they can't "
                "know the shape: expected shape="
            )

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() not in self.source.ranks + self.target.ranks:
            return outside(x)
        check_tensor(x)
        whole = self.shape or self.source.equal_blocks(x)
        check_dims(whole, self.target.shape, "x")
        return repartition(x, self.source, self.target, whole)

    def elements_sent(self, shape: Sequence[int]) -> dict[tuple[int, int], int]:
        """Return how many elements each rank will send to each other, {(from, to): elements}.

        `shape` is that of the whole tensor. These ranks are global.
        """
        sent = {}
        for rank in self.source.ranks:
            for other, region in self.target.overlaps(shape, self.source.block(shape, rank)):
                if other != rank:
                    sent[rank, other] = Size(extent(region)).numel()
        return sent

    def extra_repr(self) -> str:
        return " → ".join(
            "mesh " + "×".join(map(str, partition.shape))
            for partition in (self.source, self.target)
        )


class Partition(NamedTuple):
    """The blocks of a tensor, one for each rank of a mesh."""

    ranks: tuple[int, ...]  # row by row
    shape: tuple[int, ...]  # of the mesh

    def cuts(self, whole: Sequence[int]) -> list[list[range]]:
        """Return the parts into which each dim is cut; a dim without a mesh axis is whole."""
        return [split_ranges(n, p) for n, p in zip(whole, self.shape)] + [
            [range(n)] for n in whole[len(self.shape) :]
        ]

    def block(self, whole: Sequence[int], rank: int) -> Ranges:
        """Return the block of this rank."""
        position, region = self.ranks.index(rank), []
        for parts in reversed(self.cuts(whole)):
            position, i = divmod(position, len(parts))
            region.append(parts[i])
        return tuple(reversed(region))

    def overlaps(self, whole: Sequence[int], region: Ranges) -> Iterator[tuple[int, Ranges]]:
        """Yield the ranks whose blocks have elements of this region, and which elements."""
        touching = [
            [
                (i, common)
                for i, part in enumerate(parts)
                if (common := range(max(part.start, own.start), min(part.stop, own.stop)))
            ]
            for parts, own in zip(self.cuts(whole), region)
        ]
        for found in product(*touching):
            position = 0
            for (i, _), extent in zip(found, self.shape):
                position = position * extent + i
            yield self.ranks[position], tuple(common for _, common in found)

    def equal_blocks(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor if all blocks are as large as x."""
        check_dims(x.shape, self.shape, "x")
        return tuple(n * p for n, p in zip(x.shape, self.shape)) + tuple(x.shape[len(self.shape) :])


def partition_of(mesh: DeviceMesh) -> Partition:
    """Return the blocks of a mesh. Raises TypeError for anything else."""
    shape = mesh_axes(mesh, ()).shape
    return Partition(tuple(mesh.mesh.flatten().tolist()), shape)


def repartition(x: Tensor, source: Partition, target: Partition, whole: Sequence[int]) -> Tensor:
    """Return this rank's block in `target`; x is its block in `source`.

    A rank outside gives or gets a zero-volume tensor. Raises ValueError for an x of another shape.
    """
    me = dist.get_rank()
    ranks = tuple(sorted({*source.ranks, *target.ranks}))
    group = Group(ranks, ranks.index(me), (len(ranks),), None)
    old = source.block(whole, me) if me in source.ranks else ()
    new = target.block(whole, me) if me in target.ranks else ()
    if not old:
        outside(x)
    elif tuple(x.shape) != extent(old):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but this rank's block of a tensor of shape "
            f"{tuple(whole)} has shape {extent(old)}"
        )

    def forward(x: Tensor) -> Tensor:
        x, comm = tensor_of(x), comm_of(group, x.device, "repartition")
        compare("repartition", group, dtype=x.dtype, whole_shape=tuple(whole))
        result = x.new_empty(extent(new)) if new else nothing(x)
        inboxes, outboxes, works = [], [], []
        for rank, region in source.overlaps(whole, new) if new else ():
            part = result[within(new, region)]
            if rank == me:
                part.copy_(x[within(old, region)])
            else:
                inboxes.append((part, x.new_empty(part.shape)))
                works.append(comm.irecv(inboxes[-1][1].view(-1), source=ranks.index(rank)))
        for rank, region in target.overlaps(whole, old) if old else ():
            if rank != me:
                outboxes.append(flat_of(x[within(old, region)]))  # kept until it is sent
                works.append(comm.isend(outboxes[-1], to=ranks.index(rank)))
        wait_all(works)
        for part, inbox in inboxes:
            part.copy_(inbox)
        return result

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return repartition(g, target, source, whole)

    return differentiable("repartition", x, group, forward, backward)


def extent(region: Ranges) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(map(len, region))


def within(block: Ranges, region: Ranges) -> tuple[slice, ...]:
    """Return where this region of the whole tensor is in the block."""
    return tuple(
        slice(part.start - own.start, part.stop - own.start) for own, part in zip(block, region)
    )
