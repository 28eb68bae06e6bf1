"""Reduce: every rank has an array, and in the end one rank, the root, has their sum.

A broadcast backwards.

rank 0  [a]        [a+b+c]
rank 1  [b]   →    [     ]       flat: n bytes p − 1 times over the root's link; a tree adds on the way;
rank 2  [c]        [     ]       reduce-scatter + gather splits the array, and all ranks add at once
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel101.collectives.blocks import even_blocks, flat_of
from parallel101.collectives.checks import nothing, prepare
from parallel101.collectives.comm import Comm
from parallel101.collectives.gather import binomial as binomial_gather
from parallel101.collectives.reduce_scatter import ring as ring_reduce_scatter
from parallel101.collectives.reductions import Reduction
from parallel101.collectives.tree import path
from parallel101.mesh import GroupLike


def flat(x: Tensor, op: Reduction, root: int, comm: Comm) -> Tensor:
    """All send to the root, which adds the arrays one by one, always in the same order: p − 1
    steps.
    """
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
    """Along the tree from its leaves: in each step half of the remaining ranks send their sums
    to the other half. ⌈lg p⌉ steps.
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


def reduce_scatter_gather(x: Tensor, op: Reduction, root: int, comm: Comm) -> Tensor:
    """Each rank sums up its block (ring), the root gathers them (binomial): p − 1 + ⌈lg p⌉
    steps, 2n(p−1)/p bytes for any p.
    """
    blocks = even_blocks(x, comm.size)
    mine = blocks.empty() if comm.rank == root else blocks.empty(comm.rank, comm.rank + 1)
    ring_reduce_scatter(blocks, mine[comm.rank], op, comm)
    binomial_gather(mine, root, comm)
    return mine.flat


ALGORITHMS = {f.__name__: f for f in (flat, binomial, reduce_scatter_gather)}


def reduce(
    x: Tensor, dst: int = 0, op: str = "sum", *, group: GroupLike = None, algorithm: str = "auto"
) -> Tensor:
    """The arrays of all ranks, combined by `op`, at the root.

    Args: x: this rank's array, of the same shape and dtype on every rank. dst: the root, as a
        position in the group. op: "sum", "mean", "product", "max" or "min"; see reductions.py for
        the dtypes that each accepts. group: see `group_of`. An idle rank gets a zero-volume tensor
        and sends nothing. algorithm: "auto" or one of `algorithms("reduce")`. "auto" takes, by the
        bytes of x: binomial on up to 8 ranks, else
            binomial up to 512 KiB, else reduce_scatter_gather (see auto.py).

    Returns: At the root a new contiguous tensor like x, elsewhere a zero-volume one; no part of the
        graph.

    Raises ValueError or TypeError, before any message, for wrong arguments. Source: Thakur,
    Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
    section 4.4.
    """
    call = prepare("reduce", x, group, algorithm, ALGORITHMS, dst=dst, op=op)
    if call is None:
        return nothing(x)
    x, comm = call.x, call.comm
    if comm.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    total = call.run(flat_of(x), call.reduction, dst, comm)
    return call.reduction.finish(total, comm.size).view(x.shape) if comm.rank == dst else nothing(x)
