"""All-reduce: every rank has an array, and every rank gets the sum of them, equal to the last bit.

rank 0  [a]        [a+b+c]     reduce, then broadcast: one rank's link carries everything
rank 1  [b]   →    [a+b+c]     reduce-scatter, then all-gather: each link carries 2n(p−1)/p bytes,
rank 2  [c]        [a+b+c]         the minimum
                               recursive doubling: n bytes in each step, but only lg p steps
"""

from __future__ import annotations

from typing import Any

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


def reduce_broadcast(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Add up along a binomial tree to rank 0, then broadcast along it: 2⌈lg p⌉ steps of n bytes."""
    total = binomial_reduce(blocks[:], op, 0, comm)
    result = op.finish(total, comm.size) if comm.rank == 0 else blocks.empty().flat
    binomial_broadcast(result, 0, comm)
    return result


def direct(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Sum this rank's block, which all others send to it, and send the sum to all.

    2(p − 1) steps, 2n(p−1)/p bytes.
    """
    result = blocks.empty()
    direct_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    direct_all_gather(result, comm)
    return result.flat


def ring(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Go once round the ring to add, and once more to distribute the sums, between neighbours only.

    2(p − 1) steps, 2n(p−1)/p bytes.
    """
    result = blocks.empty()
    ring_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    ring_all_gather(result, comm)
    return result.flat


def bidirectional_ring(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Use two rings, one in each direction: 2⌊p/2⌋ steps on links that carry both directions."""
    result = blocks.empty()
    bidirectional_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    bidirectional_all_gather(result, comm)
    return result.flat


def recursive_doubling(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Exchange sums with a partner at distance 1, 2, 4, … and add: lg p steps of n bytes.

    If p isn't a power of two, ⌊lg p⌋ + 2 steps.
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
    """Add by recursive halving, and distribute the sums by recursive doubling.

    2 lg p steps and 2n(p−1)/p bytes if p is a power of two.
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
    """Reduce-scatter and all-gather over all links of the torus at once: 2 Σ (pᵢ − 1) steps."""
    result = blocks.empty()
    torus_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    torus_all_gather(result, comm)
    return result.flat


def two_level(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Reduce-scatter inside the node, all-reduce across nodes, all-gather inside the node.

    The mesh's last axis is the node; all other axes go across nodes.
    """
    *across, inside = range(len(comm.shape))
    result = blocks.flat.new_empty(blocks.flat.shape)
    # what is left to reduce, and where its result goes
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


def all_reduce(x: Tensor, op: str = "sum", **options: Any) -> Tensor:
    """Return the arrays of all ranks combined by `op`, on every rank: the same bits on each.

    Moves values only; `parallel101.autograd.all_reduce` describes the arguments and adds the
    gradient.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.5.
    """
    call = prepare("all_reduce", x, {"op": op}, ALGORITHMS, ON_A_MESH, **options)
    if call is None:
        return nothing(x)
    x, comm = call.x, call.comm
    if comm.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    return call.run(even_blocks(flat_of(x), comm.size), call.reduction, comm).view(x.shape)
