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

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.layers.axes import check_dims, check_tensor, mesh_axes, outside, whole_shape
from parallel101.layers.regions import Region, blocks, exchange, extent, overlaps
from parallel101.mesh import Group


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
        me = dist.get_rank()
        ranks = tuple(sorted({*self.source.ranks, *self.target.ranks}))
        if me not in ranks:
            return outside(x)
        check_tensor(x)
        whole = self.shape or self.source.equal_blocks(x)
        check_dims(whole, self.target.shape, "x")
        group = Group(ranks, ranks.index(me), (len(ranks),), None)
        has, needs = (
            [blocks_of.get(rank, ()) for rank in ranks]
            for blocks_of in (self.source.blocks(whole), self.target.blocks(whole))
        )
        own = has[ranks.index(me)]
        if not own:
            outside(x)
        elif tuple(x.shape) != extent(own):
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but this rank's block of a tensor of shape "
                f"{tuple(whole)} has shape {extent(own)}"
            )
        return exchange(x, group, has, needs, "repartition", whole_shape=tuple(whole))

    def elements_sent(self, shape: Sequence[int]) -> dict[tuple[int, int], int]:
        """Return the elements that each rank will send to each other, {(from, to): elements}.

        `shape` is that of the whole tensor. The ranks are global.
        """
        target = self.target.blocks(shape)
        return {
            (rank, other): Size(extent(region)).numel()
            for rank, block in self.source.blocks(shape).items()
            for position, region in overlaps(block, list(target.values()))
            if (other := list(target)[position]) != rank
        }

    def extra_repr(self) -> str:
        return " → ".join(
            "mesh " + "×".join(map(str, partition.shape))
            for partition in (self.source, self.target)
        )


class Partition(NamedTuple):
    """A mesh that cuts a tensor into blocks."""

    ranks: tuple[int, ...]  # row by row
    shape: tuple[int, ...]  # of the mesh

    def blocks(self, whole: Sequence[int]) -> dict[int, Region]:
        """Return the block of each rank."""
        return dict(zip(self.ranks, blocks(whole, self.shape), strict=True))

    def equal_blocks(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor if all blocks are as large as x."""
        check_dims(x.shape, self.shape, "x")
        return tuple(n * p for n, p in zip(x.shape, self.shape)) + tuple(x.shape[len(self.shape) :])


def partition_of(mesh: DeviceMesh) -> Partition:
    """Return the Partition of a mesh. Raises TypeError for anything else."""
    shape = mesh_axes(mesh, ()).shape
    return Partition(tuple(mesh.mesh.flatten().tolist()), shape)
