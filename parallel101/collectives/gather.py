"""Gather: every rank has a shard, and in the end one rank, the root, has them all, in order.

A scatter backwards.

rank 0  [a]        [a b c]
rank 1  [b]   →    [     ]       flat: every shard straight to the root, no byte sent twice;
rank 2  [c]        [     ]       a tree: fewer steps, but a shard is sent once for each level that it passes
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallel101.collectives.blocks import Blocks, flat_of, row_of, shaped
from parallel101.collectives.checks import nothing, prepare
from parallel101.collectives.comm import Comm, wait_all
from parallel101.collectives.tree import path, subtree
from parallel101.mesh import GroupLike


def flat(blocks: Blocks, root: int, comm: Comm) -> None:
    """Each of the others sends its block to the root: p − 1 steps."""
    if comm.rank == root:
        wait_all(
            [comm.irecv(blocks[source], source) for source in range(comm.size) if source != root]
        )
    else:
        comm.isend(blocks[comm.rank], to=root).wait()


def binomial(blocks: Blocks, root: int, comm: Comm) -> None:
    """Along the tree from its leaves: each rank joins what its children send and sends it on.
    ⌈lg p⌉ steps.
    """
    held = blocks.room(subtree(comm.size, root, comm.rank))
    if held is not blocks:
        held[comm.rank].copy_(blocks[comm.rank])
    for parent, child, ranks in reversed(path(comm.size, root, comm.rank)):
        if comm.rank == parent:
            comm.irecv(held[ranks], source=child).wait()
        elif comm.rank == child:
            comm.isend(held[ranks], to=parent).wait()


ALGORITHMS = {f.__name__: f for f in (flat, binomial)}


def gather(
    x: Tensor,
    dst: int = 0,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """The shards of all ranks, joined along `dim` in the order of the group, at the root.

    Args: x: this rank's shard, of any dtype. Its shape may differ between ranks along `dim` only,
        and then `sizes` is needed. dst: the root, as a position in the group. dim: along which the
        shards are joined; negative counts from the end. group: see `group_of`. An idle rank gets a
        zero-volume tensor and sends nothing. sizes: the size of every rank's shard along `dim`,
        zeros included, the same list on every rank. Default: all as large as mine. algorithm:
        "auto" or one of `algorithms("gather")`. "auto" takes, by the bytes of the result: flat on
        up to 8 ranks,
            else binomial up to 64 KiB, else flat (see auto.py).

    Returns: At the root a new contiguous tensor of x's shape with sum(sizes) along `dim`, elsewhere
        a zero-volume one; no part of the graph.

    Raises ValueError or TypeError, before any message, for wrong arguments. The root receives
    n(p−1)/p bytes, where the result has n. Source: Chan, Heimlich, Purkayastha, van de Geijn,
    "Collective communication: theory, practice, and experience" (2007), section 4.
    """
    call = prepare("gather", x, group, algorithm, ALGORITHMS, dst=dst, dim=dim, shards=sizes)
    if call is None:
        return nothing(x)
    x, comm, dim = call.x, call.comm, call.dim
    elements = [size * row_of(x, dim) for size in call.sizes]
    mine = flat_of(x, dim)
    if comm.rank == dst:
        blocks = Blocks(x.new_empty(sum(elements)), elements)
        blocks[dst].copy_(mine)
    else:
        blocks = Blocks(mine, elements, first=comm.rank)
    call.run(blocks, dst, comm)
    if comm.rank != dst:
        return nothing(x)
    return shaped(blocks.flat, [*x.shape[:dim], sum(call.sizes), *x.shape[dim + 1 :]], dim)
