"""Broadcast: one rank, the root, has an array, and every rank gets it.

rank 0  [a]        [a]     flat: n bytes p − 1 times over the root's link
rank 1  [ ]   →    [a]     a tree: every rank that has the array sends it on
rank 2  [ ]        [a]     a chain, scatter + all-gather: the array is split, and all links are busy
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parallel101.collectives.all_gather import ring as ring_all_gather
from parallel101.collectives.blocks import even_blocks
from parallel101.collectives.checks import nothing, prepare
from parallel101.collectives.comm import Comm, wait_all
from parallel101.collectives.scatter import binomial as binomial_scatter
from parallel101.collectives.segments import segments_of
from parallel101.collectives.tree import path


def flat(buffer: Tensor, root: int, comm: Comm) -> None:
    """Send the root's array to each of the others: p − 1 steps."""
    if comm.rank == root:
        wait_all([comm.isend(buffer, to) for to in range(comm.size) if to != root])
    else:
        comm.irecv(buffer, source=root).wait()


def binomial(buffer: Tensor, root: int, comm: Comm) -> None:
    """Send the array from every rank that has it to one that hasn't: ⌈lg p⌉ such steps."""
    for parent, child, _ in path(comm.size, root, comm.rank):
        if comm.rank == parent:
            comm.isend(buffer, to=child).wait()
        elif comm.rank == child:
            comm.irecv(buffer, source=parent).wait()


def pipelined_chain(
    buffer: Tensor, root: int, comm: Comm, segment_bytes: int | None = None
) -> None:
    """Pass the array from rank to rank in m segments; a rank sends one while it receives the next.

    p − 2 + m steps of n/m bytes: a pipeline. For many bytes that costs n, and not 2n.
    """
    place = (comm.rank - root) % comm.size
    sent = []
    for segment in segments_of(buffer, comm.size, segment_bytes):
        if place > 0:
            comm.irecv(segment, source=(comm.rank - 1) % comm.size).wait()
        if place < comm.size - 1:
            sent.append(comm.isend(segment, to=(comm.rank + 1) % comm.size))
    wait_all(sent)


def scatter_all_gather(buffer: Tensor, root: int, comm: Comm) -> None:
    """Scatter one block to each rank (binomial), then all-gather the blocks (ring).

    ⌈lg p⌉ + p − 1 steps, 2n(p−1)/p bytes for any p.
    """
    blocks = even_blocks(buffer, comm.size)
    binomial_scatter(blocks, blocks[comm.rank], root, comm)
    ring_all_gather(blocks, comm)


ALGORITHMS = {f.__name__: f for f in (flat, binomial, pipelined_chain, scatter_all_gather)}


def broadcast(x: Tensor, src: int = 0, **options: Any) -> Tensor:
    """Return the root's array on every rank.

    `src` is the root's position in the group, not its global rank. Moves values only;
    `parallel101.autograd.broadcast` describes the arguments and adds the gradient.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.2.
    """
    call = prepare("broadcast", x, {"src": src}, ALGORITHMS, **options)
    if call is None:
        return nothing(x)
    result = call.x.new_empty(call.x.shape)
    if call.comm.rank == src:
        result.copy_(call.x)
    call.run(result.view(-1), src, call.comm)
    return result
