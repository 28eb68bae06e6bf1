"""All-reduce: every rank has an array, and in the end every rank has their sum, equal to the last
bit.

rank 0  [a]        [a+b+c]       reduce, then broadcast: one rank's link carries everything;
rank 1  [b]   →    [a+b+c]       reduce-scatter, then all-gather: every link carries 2n(p−1)/p bytes, the minimum;
rank 2  [c]        [a+b+c]       recursive doubling: n bytes in each step, but only lg p steps
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel101.collectives.all_gather import bidirectional_ring as bidirectional_all_gather
from parallel101.collectives.all_gather import direct as direct_all_gather
from parallel101.collectives.all_gather import double
from parallel101.collectives.all_gather import ring as ring_all_gather
from parallel101.collectives.blocks import Blocks, even_blocks, flat_of
from parallel101.collectives.broadcast import binomial as binomial_broadcast
from parallel101.collectives.checks import nothing, prepare
from parallel101.collectives.comm import Comm, wait_all
from parallel101.collectives.power_of_two import (
    copy_from_core,
    nearest_power_of_two,
    reduce_to_core,
)
from parallel101.collectives.reduce import binomial as binomial_reduce
from parallel101.collectives.reduce_scatter import (
    bidirectional_ring as bidirectional_reduce_scatter,
)
from parallel101.collectives.reduce_scatter import direct as direct_reduce_scatter
from parallel101.collectives.reduce_scatter import halve
from parallel101.collectives.reduce_scatter import ring as ring_reduce_scatter
from parallel101.collectives.reductions import Reduction
from parallel101.collectives.torus import all_gather as torus_all_gather
from parallel101.collectives.torus import reduce_scatter as torus_reduce_scatter
from parallel101.mesh import GroupLike


def reduce_broadcast(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Add up along a binomial tree to rank 0, and broadcast along the same tree: 2⌈lg p⌉ steps
    of n bytes.
    """
    total = binomial_reduce(blocks[:], op, 0, comm)
    result = op.finish(total, comm.size) if comm.rank == 0 else blocks.empty().flat
    binomial_broadcast(result, 0, comm)
    return result


def direct(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Each rank receives one block from every other rank, adds it up and sends the sum to all:
    2(p − 1) steps, 2n(p−1)/p bytes.
    """
    result = blocks.empty()
    direct_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    direct_all_gather(result, comm)
    return result.flat


def ring(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Once round the ring to add, once more to distribute the sums: 2(p − 1) steps, 2n(p−1)/p
    bytes, between neighbours only.
    """
    result = blocks.empty()
    ring_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    ring_all_gather(result, comm)
    return result.flat


def bidirectional_ring(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """The same with two rings, one in each direction: 2⌊p/2⌋ steps on links that carry both
    directions.
    """
    result = blocks.empty()
    bidirectional_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    bidirectional_all_gather(result, comm)
    return result.flat


def recursive_doubling(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Exchange sums with a partner at distance 1, 2, 4, … and add: lg p steps of n bytes, ⌊lg
    p⌋ + 2 if p is no power of two.
    """
    core, partner_outside, _ = nearest_power_of_two(comm)
    total = reduce_to_core(blocks, op, comm, partner_outside)[:]
    distance = 1
    while core and distance < core.size:
        partner, inbox = core.rank ^ distance, torch.empty_like(total)
        received = core.irecv(inbox, source=partner)
        sent = core.isend(total, to=partner)
        wait_all([received, sent])
        lower, higher = (total, inbox) if core.rank < partner else (inbox, total)
        # both add in the same order, so their bits are equal even for NaN and −0
        total = op(lower, higher, out=inbox)
        distance *= 2
    result = op.finish(total, comm.size) if core else blocks.empty().flat
    copy_from_core(result, comm, partner_outside)
    return result


def rabenseifner(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Recursive halving to add, recursive doubling to distribute the sums: 2 lg p steps,
    2n(p−1)/p bytes if p is a power of two.
    """
    result = blocks.empty()
    core, partner, cuts = nearest_power_of_two(comm)
    total = reduce_to_core(blocks, op, comm, partner)
    if core:
        shares = result.merged(cuts)
        shares[core.rank].copy_(halve(total.merged(cuts), op, core))
        op.finish(shares[core.rank], comm.size)
        double(shares, core)
    copy_from_core(result.flat, comm, partner)
    return result.flat


def torus(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Reduce-scatter and all-gather over all links of the torus at the same time: 2 Σ (pᵢ − 1)
    steps.
    """
    result = blocks.empty()
    torus_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    torus_all_gather(result, comm)
    return result.flat


def two_level(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Reduce-scatter inside the node (the mesh's last axis), all-reduce across nodes (all other
    axes), all-gather inside the node.
    """
    *across, inside = range(len(comm.shape))
    result = blocks.flat.new_empty(blocks.flat.shape)
    # what is left to reduce, and where its result will lie
    share, room, levels = blocks.flat, result, []
    for line in (comm.along(inside), comm.along(*across)):
        if line.size > 1:
            whole = even_blocks(room, line.size)
            ring_reduce_scatter(even_blocks(share, line.size), whole[line.rank], op, line)
            levels.append((whole, line))
            share = room = whole[line.rank]
    op.finish(share, comm.size)
    for whole, line in reversed(levels):
        ring_all_gather(whole, line)
    return result


ALGORITHMS = {
    f.__name__: f
    for f in (reduce_broadcast, direct, ring, bidirectional_ring, recursive_doubling, rabenseifner)
}
ON_A_MESH = {f.__name__: f for f in (torus, two_level)}


def all_reduce(
    x: Tensor, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto"
) -> Tensor:
    """The arrays of all ranks, combined by `op`, on every rank: the same bits on each, and in every
    run.

    Args: x: this rank's array, of the same shape and dtype on every rank. op: "sum", "mean",
        "product", "max" or "min"; see reductions.py for the dtypes that each accepts. group: see
        `group_of`. An idle rank gets a zero-volume tensor and sends nothing. algorithm: "auto", one
        of `algorithms("all_reduce")`, or, if the group is a DeviceMesh of two axes or more, "torus"
        or
            "two_level". "auto" takes, by the bytes of x: recursive_doubling up to 4 MiB on up
            to 2 ranks, else reduce_broadcast up to 1 MiB on up to 8 ranks, else recursive_doubling
            up to 64 KiB, else ring (see auto.py).

    Returns:
        A new contiguous tensor like x, no part of the graph.

    Raises ValueError or TypeError, before any message, for wrong arguments. Source: Thakur,
    Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
    section 4.5.
    """
    call = prepare("all_reduce", x, group, algorithm, ALGORITHMS, ON_A_MESH, op=op)
    if call is None:
        return nothing(x)
    x, comm = call.x, call.comm
    if comm.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    return call.run(even_blocks(flat_of(x), comm.size), call.reduction, comm).view(x.shape)
