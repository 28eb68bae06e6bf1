"""Reduce: every rank has an array, and one rank, the root, gets the sum of them.

It is a broadcast backwards.

rank 0  [a]        [a+b+c]     flat: n bytes p − 1 times over the root's link
rank 1  [b]   →    [     ]     a tree adds on the way
rank 2  [c]        [     ]     a chain, reduce-scatter + gather: the array is split, and all ranks
                               add at once
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel101.collectives.blocks import even_blocks, flat_of
from parallel101.collectives.checks import nothing, prepare
from parallel101.collectives.comm import Comm, wait_all
from parallel101.collectives.gather import binomial as binomial_gather
from parallel101.collectives.reduce_scatter import ring as ring_reduce_scatter
from parallel101.collectives.reductions import Reduction
from parallel101.collectives.segments import segments_of
from parallel101.collectives.tree import path


def flat(x: Tensor, op: Reduction, root: int, comm: Comm) -> Tensor:
    """Send all arrays to the root, which adds them in a fixed order: p − 1 steps."""
    total = x
    if comm.rank != root:
        comm.isend(x, to=root).wait()
    else:
        for step in range(1, comm.size):
            inbox = torch.empty_like(x)
            comm.irecv(inbox, source=(root + step) % comm.size).wait()
            total = op(total, inbox, out=inbox)
    return total


def binomial(x: Tensor, op: Reduction, root: int, comm: Comm) -> Tensor:
    """Add along the tree from its leaves, in ⌈lg p⌉ steps.

    In each step, half of the remaining ranks send their sums to the other half.
    """
    total = x
    for parent, child, _ in reversed(path(comm.size, root, comm.rank)):
        if comm.rank == parent:
            inbox = torch.empty_like(x)
            comm.irecv(inbox, source=child).wait()
            total = op(total, inbox, out=inbox)
        elif comm.rank == child:
            comm.isend(total, to=parent).wait()
    return total


def pipelined_chain(
    x: Tensor, op: Reduction, root: int, comm: Comm, segment_bytes: int | None = None
) -> Tensor:
    """Add along the chain towards the root, in m segments; a rank sends one, receives the next.

    p − 2 + m steps of n/m bytes: the broadcast's pipeline backwards.
    """
    place = (comm.rank - root) % comm.size
    total = torch.empty_like(x) if place < comm.size - 1 else x
    sent = []
    for mine, segment in zip(
        segments_of(x, comm.size, segment_bytes), segments_of(total, comm.size, segment_bytes)
    ):
        if place < comm.size - 1:
            comm.irecv(segment, source=(comm.rank + 1) % comm.size).wait()
            op(segment, mine, out=segment)
        if place > 0:
            sent.append(comm.isend(segment, to=(comm.rank - 1) % comm.size))
    wait_all(sent)
    return total


def reduce_scatter_gather(x: Tensor, op: Reduction, root: int, comm: Comm) -> Tensor:
    """Sum this rank's own block (ring), and gather the sums at the root (binomial).

    p − 1 + ⌈lg p⌉ steps, 2n(p−1)/p bytes for any p.
    """
    blocks = even_blocks(x, comm.size)
    mine = blocks.empty() if comm.rank == root else blocks.empty(comm.rank, comm.rank + 1)
    ring_reduce_scatter(blocks, mine[comm.rank], op, comm)
    binomial_gather(mine, root, comm)
    return mine.flat


ALGORITHMS = {f.__name__: f for f in (flat, binomial, pipelined_chain, reduce_scatter_gather)}


def reduce(x: Tensor, dst: int = 0, op: str = "sum", **options: Any) -> Tensor:
    """Return the arrays of all ranks combined by `op`, at the root, and elsewhere nothing.

    `dst` is the root's position in the group, not its global rank. Moves values only;
    `parallel101.autograd.reduce` describes the arguments and adds the gradient.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.4.
    """
    call = prepare("reduce", x, {"dst": dst, "op": op}, ALGORITHMS, **options)
    if call is None:
        return nothing(x)
    x, comm = call.x, call.comm
    if comm.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    total = call.run(flat_of(x), call.reduction, dst, comm)
    return call.reduction.finish(total, comm.size).view(x.shape) if comm.rank == dst else nothing(x)
