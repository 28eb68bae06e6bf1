"""Scatter: one rank, the root, has an array, and each rank gets its own block of it.

rank 0  [a b c]        [a]     flat: every block comes straight from the root, no byte is sent twice
rank 1  [     ]   →    [b]     a tree: fewer steps, but a block is sent once for each level that it
rank 2  [     ]        [c]         passes
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
    """Send each of the others its block from the root: p − 1 steps."""
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
    """Return this rank's block of the root's array, which is split along `dim`.

    `src` is the root's position in the group, not its global rank. Moves values only;
    `parallel101.autograd.scatter` describes the arguments and adds the gradient.
    Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice,
    and experience" (2007), section 4.
    """
    call = prepare("scatter", x, group, algorithm, ALGORITHMS, src=src, dim=dim, blocks=sizes)
    if call is None:
        return nothing(x)
    x, comm, dim = call.x, call.comm, call.dim
    elements = [size * row_of(x, dim) for size in call.sizes]
    out = x.new_empty(elements[comm.rank])
    if comm.rank == src:
        blocks = Blocks(flat_of(x, dim), elements)
    else:
        blocks = Blocks(out, elements, first=comm.rank)
    call.run(blocks, out, src, comm)
    return shaped(out, [*x.shape[:dim], call.sizes[comm.rank], *x.shape[dim + 1 :]], dim)
