"""Broadcast: one rank has it, in the end all have it.

rank 0  [a]        [a]
rank 1  [ ]   →    [a]       flat: n bytes p − 1 times over one rank's link; a tree shares the work among those who
rank 2  [ ]        [a]       already have it; a chain and scatter + all-gather cut the array and keep all links busy
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel101.collectives.all_gather import ring as ring_all_gather
from parallel101.collectives.auto import check_algorithm, choose
from parallel101.collectives.blocks import even_blocks
from parallel101.collectives.checks import nothing, root_of, tensor_of
from parallel101.collectives.comm import Comm, comm_of, wait_all
from parallel101.collectives.scatter import binomial as binomial_scatter
from parallel101.collectives.tree import path
from parallel101.mesh import GroupLike, group_of

SEGMENT_BYTES = 256 * 1024  # of the pipelined chain: small enough that many are under way, large enough that a message is worth its latency


def flat(buffer: Tensor, root: int, comm: Comm) -> None:
    """The root sends to each of the others: p − 1 steps."""
    if comm.rank == root:
        wait_all([comm.isend(buffer, to) for to in range(comm.size) if to != root])
    else:
        comm.irecv(buffer, source=root).wait()


def binomial(buffer: Tensor, root: int, comm: Comm) -> None:
    """Whoever has it passes it on: twice as many at each step, ⌈lg p⌉ steps."""
    for giver, taker, _ in path(comm.size, root, comm.rank):
        if comm.rank == giver:
            comm.isend(buffer, to=taker).wait()
        elif comm.rank == taker:
            comm.irecv(buffer, source=giver).wait()


def chain(buffer: Tensor, root: int, comm: Comm) -> None:
    """From each rank to the next, in m segments, the next arriving while the last one leaves: p − 2 + m steps of n/m bytes."""
    place = (comm.rank - root) % comm.size
    sent = []
    for segment in buffer.split(max(1, SEGMENT_BYTES // buffer.element_size())):
        if place > 0:
            comm.irecv(segment, source=(comm.rank - 1) % comm.size).wait()
        if place < comm.size - 1:
            sent.append(comm.isend(segment, to=(comm.rank + 1) % comm.size))
    wait_all(sent)


def scatter_all_gather(buffer: Tensor, root: int, comm: Comm) -> None:
    """Scatter a block to each (binomial), then all-gather them (ring): ⌈lg p⌉ + p − 1 steps, 2n(p−1)/p bytes for any p."""
    blocks = even_blocks(buffer, comm.size)
    binomial_scatter(blocks, blocks[comm.rank], root, comm)
    ring_all_gather(blocks, comm)


ALGORITHMS = {f.__name__: f for f in (flat, binomial, chain, scatter_all_gather)}


def broadcast(x: Tensor, src: int = 0, *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    """The root's tensor, on every rank.

    Args:
        x: at the root what is sent, of any dtype; on the others it gives shape and dtype only, its values are ignored.
        src: the root, as a position in the group.
        group: see `group_of`. An idle rank gets a zero-volume tensor and sends nothing.
        algorithm: "auto" or one of `algorithms("broadcast")`. "auto" takes, by the bytes of x: binomial on up to 8 ranks, else
            binomial up to 512 KiB, else scatter_all_gather (see auto.py).

    Returns:
        A new contiguous tensor like x, no part of the graph.

    Raises ValueError or TypeError, before any message, for what does not fit.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4.2.
    """
    check_algorithm("broadcast", algorithm, ALGORITHMS)
    x, members = tensor_of(x), group_of(group)
    src = root_of(members, src, "src")
    if members.position is None:
        return nothing(x)
    comm = comm_of(members, x.device, "broadcast")
    if comm.rank == src:
        result = x.clone(memory_format=torch.contiguous_format)
    else:
        result = x.new_empty(x.shape)
    choose("broadcast", algorithm, ALGORITHMS, x.nbytes, comm.size)(result.view(-1), src, comm)
    return result
