"""All-reduce along the axes of a mesh: reduce-scatter along one axis after the other, then all-gather in reverse order.

    mesh (2, 3)    0 1 2       two_level: the last axis lies inside a node and comes first, so only 1/3 of the bytes
                   3 4 5       cross the slow links between nodes;  torus: every axis has links of its own

Both send 2n(p−1)/p bytes, as a flat ring does, but in 2 Σ (pᵢ − 1) steps instead of 2 (Π pᵢ − 1).
They are algorithms of `all_reduce` for a group that is a DeviceMesh; they do not choose or build the mesh.
"""

from __future__ import annotations

from torch import Tensor

from parallel101.collectives.all_gather import ring as ring_all_gather
from parallel101.collectives.blocks import Blocks, even_blocks
from parallel101.collectives.comm import Comm
from parallel101.collectives.reduce_scatter import ring as ring_reduce_scatter
from parallel101.collectives.reductions import Reduction
from parallel101.mesh import Group


def two_level(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Reduce-scatter inside the node (the mesh's last axis), all-reduce across nodes (all other axes), all-gather inside the node."""
    *across, inside = range(len(comm.shape))
    return along_lines(blocks.flat, op, [comm.along(inside), comm.along(*across)], comm.size)


def torus(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """A ring along each axis in turn, each on a smaller share of the array, and back in reverse order."""
    return along_lines(blocks.flat, op, [comm.along(axis) for axis in range(len(comm.shape))], comm.size)


def along_lines(x: Tensor, op: Reduction, lines: list[Comm], ranks: int) -> Tensor:
    """All-reduce over the ranks of a mesh, given the lines through this rank that span the mesh."""
    result = x.new_empty(x.shape)
    share, room, levels = x, result, []  # what is left to reduce, and where its result will lie
    for line in lines:
        if line.size > 1:
            whole = even_blocks(room, line.size)
            ring_reduce_scatter(even_blocks(share, line.size), whole[line.rank], op, line)
            levels.append((whole, line))
            share = room = whole[line.rank]
    op.finish(share, ranks)
    for whole, line in reversed(levels):
        ring_all_gather(whole, line)
    return result


def check_axes(algorithm: str, group: Group) -> None:
    """Raises ValueError if `algorithm` is one of these and the group is not a mesh of two axes or more."""
    if algorithm in ALGORITHMS and group.position is not None and len(group.shape) < 2:
        raise ValueError(f"algorithm={algorithm!r} needs a DeviceMesh of two axes or more as its group; this group has shape {group.shape}")


ALGORITHMS = {f.__name__: f for f in (two_level, torus)}
