"""Scatter: one rank, the root, has an array, and in the end each rank has its own block of it.

rank 0  [a b c]        [a]
rank 1  [     ]   →    [b]       flat: every block straight from the root, no byte sent twice;
rank 2  [     ]        [c]       a tree: fewer steps, but a block is sent once for each level that it passes
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallel101.collectives.blocks import Blocks, flat_of, row_of, shaped
from parallel101.collectives.checks import nothing, prepare
from parallel101.collectives.comm import Comm, wait_all
from parallel101.collectives.tree import path, subtree
from parallel101.mesh import GroupLike


def flat(blocks: Blocks, out: Tensor, root: int, comm: Comm) -> None:
    """The root sends each of the others its block: p − 1 steps."""
    if comm.rank == root:
        sent = [comm.isend(blocks[to], to) for to in range(comm.size) if to != root]
        out.copy_(blocks[root])  # while the messages are in flight
        wait_all(sent)
    else:
        comm.irecv(out, source=root).wait()


def binomial(blocks: Blocks, out: Tensor, root: int, comm: Comm) -> None:
    """Send half of the blocks to a rank of that half, which does the same: ⌈lg p⌉ steps."""
    held = blocks.room(subtree(comm.size, root, comm.rank))
    for parent, child, ranks in path(comm.size, root, comm.rank):
        if comm.rank == parent:
            comm.isend(held[ranks], to=child).wait()
        elif comm.rank == child:
            comm.irecv(held[ranks], source=parent).wait()
    if held[comm.rank].data_ptr() != out.data_ptr():  # in a broadcast they are the same memory
        out.copy_(held[comm.rank])


ALGORITHMS = {f.__name__: f for f in (flat, binomial)}


def scatter(
    x: Tensor,
    src: int = 0,
    dim: int = 0,
    *,
    group: GroupLike = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """The root's array, split along `dim`: to each rank its own block.

    Args: x: at the root the whole array. On the others only its shape (the whole one) and dtype
        count; its values are ignored. src: the root, as a position in the group. dim: along which
        it is split; negative counts from the end. group: see `group_of`. An idle rank gets a
        zero-volume tensor and sends nothing. sizes: the size of every rank's block along `dim`,
        zeros included. Default: `split_sizes(x.shape[dim], p)`. algorithm: "auto" or one of
        `algorithms("scatter")`. "auto" takes, by the bytes of x: flat on up to 8 ranks, else
            binomial up to 64 KiB, else flat (see auto.py).

    Returns:
        A new contiguous tensor of x's shape with sizes[position] along `dim`, no part of the graph.

    Raises ValueError or TypeError, before any message, for wrong arguments. The root sends n(p−1)/p
    bytes, where x has n. Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective
    communication: theory, practice, and experience" (2007), section 4.
    """
    call = prepare("scatter", x, group, algorithm, ALGORITHMS, src=src, dim=dim, blocks=sizes)
    if call is None:
        return nothing(x)
    x, comm, dim = call.x, call.comm, call.dim
    elements = [size * row_of(x, dim) for size in call.sizes]
    out = x.new_empty(elements[comm.rank])
    blocks = (
        Blocks(flat_of(x, dim), elements)
        if comm.rank == src
        else Blocks(out, elements, first=comm.rank)
    )
    call.run(blocks, out, src, comm)
    return shaped(out, [*x.shape[:dim], call.sizes[comm.rank], *x.shape[dim + 1 :]], dim)
