"""Scatter: one rank, the root, has an array, and each rank gets its own block of it.

rank 0  [a b c]        [a]     flat: every block comes straight from the root, no byte is sent twice
rank 1  [     ]   →    [b]     a tree: fewer steps, but a block is sent once for each level that it
rank 2  [     ]        [c]         passes
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parallel101.collectives.blocks import Blocks, flat_of
from parallel101.collectives.checks import Sizes, nothing, prepare
from parallel101.collectives.comm import Comm, wait_all
from parallel101.collectives.tree import path, subtree


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
    x: Tensor, src: int = 0, dim: int = 0, *, sizes: Sizes = None, **options: Any
) -> Tensor:
    """Return this rank's block of the root's array, which is split along `dim`.

    `src` is the root's position in the group, not its global rank. Moves values only;
    `parallel101.autograd.scatter` describes the arguments and adds the gradient.
    Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice,
    and experience" (2007), section 4.
    """
    own = {"src": src, "dim": dim, "blocks": sizes}
    call = prepare("scatter", x, own, ALGORITHMS, **options)
    if call is None:
        return nothing(x)
    out = call.x.new_empty(call.elements[call.comm.rank])
    if call.comm.rank == src:
        blocks = Blocks(flat_of(call.x, call.dim), call.elements)
    else:
        blocks = Blocks(out, call.elements, first=call.comm.rank)
    call.run(blocks, out, src, call.comm)
    return call.shaped(out, call.sizes[call.comm.rank])
