"""Gather: every rank has a shard, and one rank, the root, gets all of them, in order.

It is a scatter backwards.

rank 0  [a]        [a b c]     flat: every shard goes straight to the root, no byte is sent twice
rank 1  [b]   →    [     ]     a tree: fewer steps, but a shard is sent once for each level that it
rank 2  [c]        [     ]         passes
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parallel101.collectives.blocks import Blocks, flat_of
from parallel101.collectives.checks import Sizes, nothing, prepare
from parallel101.collectives.comm import Comm, wait_all
from parallel101.collectives.tree import path, subtree


def flat(blocks: Blocks, root: int, comm: Comm) -> None:
    """Send each other rank's block to the root: p − 1 steps."""
    if comm.rank == root:
        wait_all(
            [comm.irecv(blocks[source], source) for source in range(comm.size) if source != root]
        )
    else:
        comm.isend(blocks[comm.rank], to=root).wait()


def binomial(blocks: Blocks, root: int, comm: Comm) -> None:
    """Gather along the tree from its leaves, in ⌈lg p⌉ steps.

    Each rank joins what its children send, and sends it on.
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


def gather(x: Tensor, dst: int = 0, dim: int = 0, *, sizes: Sizes = None, **options: Any) -> Tensor:
    """Return the shards of all ranks joined along `dim`, at the root, and elsewhere nothing.

    `dst` is the root's position in the group, not its global rank. Moves values only;
    `parallel101.autograd.gather` describes the arguments and adds the gradient.
    Source: Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice,
    and experience" (2007), section 4.
    """
    own = {"dst": dst, "dim": dim, "shards": sizes}
    call = prepare("gather", x, own, ALGORITHMS, **options)
    if call is None:
        return nothing(x)
    mine = flat_of(call.x, call.dim)
    if call.comm.rank == dst:
        blocks = Blocks(mine.new_empty(sum(call.elements)), call.elements)
        blocks[dst].copy_(mine)
    else:
        blocks = Blocks(mine, call.elements, first=call.comm.rank)
    call.run(blocks, dst, call.comm)
    return call.shaped(blocks.flat, sum(call.sizes)) if call.comm.rank == dst else nothing(x)
