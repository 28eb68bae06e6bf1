"""All-reduce: each rank has an array, in the end every rank has their sum, the same to the last bit.

rank 0  [a]        [a+b+c]       reduce, then broadcast: one rank's link carries it all;
rank 1  [b]   →    [a+b+c]       reduce-scatter, then all-gather: every link carries 2n(p−1)/p, the least there is;
rank 2  [c]        [a+b+c]       recursive doubling: all of n at each step, but only lg p steps
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel101.collectives import torus
from parallel101.collectives.all_gather import bidirectional_ring as bidirectional_all_gather
from parallel101.collectives.all_gather import direct as direct_all_gather
from parallel101.collectives.all_gather import double
from parallel101.collectives.all_gather import ring as ring_all_gather
from parallel101.collectives.auto import check_algorithm, choose
from parallel101.collectives.blocks import Blocks, even_blocks, flat_of
from parallel101.collectives.broadcast import binomial as binomial_broadcast
from parallel101.collectives.checks import nothing, tensor_of
from parallel101.collectives.comm import Comm, comm_of, wait_all
from parallel101.collectives.power_of_two import combine_pairs, fold, hand_back
from parallel101.collectives.reduce import binomial as binomial_reduce
from parallel101.collectives.reduce_scatter import bidirectional_ring as bidirectional_reduce_scatter
from parallel101.collectives.reduce_scatter import direct as direct_reduce_scatter
from parallel101.collectives.reduce_scatter import halve
from parallel101.collectives.reduce_scatter import ring as ring_reduce_scatter
from parallel101.collectives.reductions import Reduction, reduction_of
from parallel101.mesh import GroupLike, group_of


def reduce_broadcast(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Up a binomial tree and down again: 2⌈lg p⌉ steps of n bytes."""
    total = binomial_reduce(blocks[:], op, 0, comm)
    result = op.finish(total, comm.size) if comm.rank == 0 else blocks.empty().flat
    binomial_broadcast(result, 0, comm)
    return result


def direct(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Each rank adds up one block, which all send to it and which it sends to all: 2(p − 1) steps, 2n(p−1)/p bytes."""
    result = blocks.empty()
    direct_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    direct_all_gather(result, comm)
    return result.flat


def ring(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Once round the ring to add, once more to tell: 2(p − 1) steps, 2n(p−1)/p bytes, between neighbours only."""
    result = blocks.empty()
    ring_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    ring_all_gather(result, comm)
    return result.flat


def bidirectional_ring(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """The same both ways at once: 2⌊p/2⌋ steps where a link carries both directions."""
    result = blocks.empty()
    bidirectional_reduce_scatter(blocks, result[comm.rank], op, comm)
    op.finish(result[comm.rank], comm.size)
    bidirectional_all_gather(result, comm)
    return result.flat


def recursive_doubling(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Swap sums with a partner at distance 1, 2, 4, … and add: lg p steps of n bytes for a power of two, ⌊lg p⌋ + 2 otherwise."""
    core, pair, _ = fold(comm)
    total = combine_pairs(blocks, op, comm, pair)[:]
    distance = 1
    while core and distance < core.size:
        partner, inbox = core.rank ^ distance, torch.empty_like(total)
        received = core.irecv(inbox, source=partner)
        sent = core.isend(total, to=partner)
        wait_all([received, sent])
        lower, higher = (total, inbox) if core.rank < partner else (inbox, total)
        total = op(lower, higher, out=inbox)  # both add in the same order: two NaNs or zeros of either sign, too, meet alike
        distance *= 2
    result = op.finish(total, comm.size) if core else blocks.empty().flat
    hand_back(result, comm, pair)
    return result


def rabenseifner(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Recursive halving to add, recursive doubling to tell: 2 lg p steps and 2n(p−1)/p bytes for a power of two."""
    result = blocks.empty()
    core, pair, cuts = fold(comm)
    total = combine_pairs(blocks, op, comm, pair)
    if core:
        shares = result.merged(cuts)
        shares[core.rank].copy_(halve(total.merged(cuts), op, core))
        op.finish(shares[core.rank], comm.size)
        double(shares, core)
    hand_back(result.flat, comm, pair)
    return result.flat


ALGORITHMS = {f.__name__: f for f in (reduce_broadcast, direct, ring, bidirectional_ring, recursive_doubling, rabenseifner)}


def all_reduce(x: Tensor, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto") -> Tensor:
    """The arrays of all ranks, combined, on every rank: the same bits on each, and in every run.

    Args:
        x: this rank's array, of the same shape and dtype on every rank.
        op: "sum", "mean", "product", "max" or "min"; see reductions.py for which dtypes have which.
        group: see `group_of`. An idle rank gets a zero-volume tensor and sends nothing.
        algorithm: "auto", one of `algorithms("all_reduce")`, or, where the group is a DeviceMesh of two axes or more, "two_level" or
            "torus" (see torus.py). "auto" takes, by the bytes of x: recursive_doubling up to 4 MiB on up
            to 2 ranks, else reduce_broadcast up to 1 MiB on up to 8 ranks, else recursive_doubling up to 64 KiB, else ring (see auto.py).

    Returns:
        A new contiguous tensor like x, no part of the graph.

    Raises ValueError or TypeError, before any message, for what does not fit.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4.5.
    """
    check_algorithm("all_reduce", algorithm, ALGORITHMS, torus.ALGORITHMS)
    x, reduction, members = tensor_of(x), reduction_of(op, x), group_of(group)
    if members.position is None:
        return nothing(x)
    torus.check_axes(algorithm, members)
    comm = comm_of(members, x.device, "all_reduce")
    if comm.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    run = choose("all_reduce", algorithm, ALGORITHMS | torus.ALGORITHMS, x.nbytes, comm.size)
    return run(even_blocks(flat_of(x), comm.size), reduction, comm).view(x.shape)
