"""Reduce-scatter: every rank has a whole array, and each rank gets its own block of their sum.

rank 0  [a0 a1 a2]        [a0+b0+c0]
rank 1  [b0 b1 b2]   →    [a1+b1+c1]
rank 2  [c0 c1 c2]        [a2+b2+c2]

It is an all-gather backwards, with an addition in place of each copy. Each algorithm here is one of
all_gather.py in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallel101.collectives.blocks import Blocks, flat_of
from parallel101.collectives.checks import Sizes, nothing, prepare
from parallel101.collectives.comm import Comm, blocking, wait_all
from parallel101.collectives.power_of_two import nearest_power_of_two, reduce_to_core
from parallel101.collectives.reductions import Reduction
from parallel101.collectives.torus import reduce_scatter as torus


def direct_steps(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> Iterator[None]:
    """Send every block to its owner, which adds up what arrives: p − 1 steps.

    In each step, every rank has another partner. `out` may be this rank's own block.
    """
    p, rank, arriving, sent = comm.size, comm.rank, [], []
    inboxes = out.new_empty(p - 1, *out.shape).unbind()
    for step, inbox in enumerate(inboxes, start=1):
        source, to = (rank - step) % p, (rank + step) % p
        arriving.append((comm.irecv(inbox, source), inbox))
        sent.append(comm.isend(blocks[to], to))
    comm.flush()
    yield  # an asynchronous caller computes here
    total = blocks[rank]
    for received, inbox in arriving:  # a fixed order, so that every run gives the same bits
        received.wait()
        total = op(total, inbox, out=out)
    wait_all(sent)


direct = blocking(direct_steps)


def ring(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> None:
    """Pass the partial sum of each block to the right round the ring until it is at its owner.

    p − 1 steps of one block.
    """
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    partial = blocks[left]
    for step in range(1, p):
        mine = blocks[(rank - step - 1) % p]
        inbox = torch.empty_like(mine)
        received = comm.irecv(inbox, source=left)
        sent = comm.isend(partial, to=right)
        wait_all([received, sent])
        partial = op(inbox, mine, out=out if step == p - 1 else inbox)


def bidirectional_ring(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> None:
    """Pass two partial sums of each block, one from each side, to its owner.

    ⌊p/2⌋ steps on links that carry both directions.
    """
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    # how many ranks a partial sum passes on its way to the right, and to the left
    far, near = p // 2, (p - 1) // 2
    rightward, leftward = blocks[(rank + far) % p], blocks[(rank - near) % p]
    for step in range(far):
        mine = blocks[(rank + far - step - 1) % p]
        inbox = torch.empty_like(mine)
        works = [comm.irecv(inbox, source=left), comm.isend(rightward, to=right)]
        if step < near:
            also_mine = blocks[(rank - near + step + 1) % p]
            also_inbox = torch.empty_like(also_mine)
            works += [comm.irecv(also_inbox, source=right), comm.isend(leftward, to=left)]
        wait_all(works)
        rightward = op(inbox, mine, out=inbox)
        # my own block is in the sum from the left, so the last sum from the right must not have it
        if step < near:
            leftward = also_inbox if step == near - 1 else op(also_inbox, also_mine, out=also_inbox)
    if near:
        op(rightward, leftward, out=out)
    else:
        out.copy_(rightward)


def recursive_halving(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> None:
    """Exchange half of what is left with a partner and add: lg p steps.

    If p isn't a power of two, ⌊lg p⌋ + 2 steps (power_of_two.py).
    """
    core, partner, cuts = nearest_power_of_two(comm)
    total = reduce_to_core(blocks, op, comm, partner)
    if core is None:
        comm.irecv(out, source=comm.rank - 1).wait()
    else:
        mine = Blocks(halve(total.merged(cuts), op, core), blocks.sizes, first=comm.rank)
        out.copy_(mine[comm.rank])
        if partner is not None:
            comm.isend(mine[partner], to=partner).wait()


def halve(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Run recursive halving on a power of two of ranks. Returns this rank's block."""
    low, high = 0, comm.size
    while high - low > 1:
        middle = (low + high) // 2
        lower, upper = slice(low, middle), slice(middle, high)
        in_lower = comm.rank < middle
        keep, give = (lower, upper) if in_lower else (upper, lower)
        partner = comm.rank + (middle - low if in_lower else low - middle)
        inbox = blocks.empty(keep.start, keep.stop)
        received = comm.irecv(inbox[keep], source=partner)
        sent = comm.isend(blocks[give], to=partner)
        wait_all([received, sent])
        op(blocks[keep], inbox[keep], out=inbox[keep])
        blocks, low, high = inbox, keep.start, keep.stop
    return blocks[comm.rank]


ALGORITHMS = {f.__name__: f for f in (direct, ring, bidirectional_ring, recursive_halving)}
ON_A_MESH = {"torus": torus}


def reduce_scatter(
    x: Tensor, dim: int = 0, op: str = "sum", *, sizes: Sizes = None, **options: Any
) -> Tensor:
    """Return this rank's block, along `dim`, of the arrays of all ranks combined by `op`.

    Moves values only; `parallel101.autograd.reduce_scatter` describes the arguments and adds the
    gradient.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.3.
    """
    own = {"dim": dim, "op": op, "blocks": sizes}
    call = prepare("reduce_scatter", x, own, ALGORITHMS, ON_A_MESH, **options)
    if call is None:
        return nothing(x)
    comm, blocks = call.comm, Blocks(flat_of(call.x, call.dim), call.elements)
    if comm.size == 1:
        return call.x.clone(memory_format=torch.contiguous_format)
    out = call.x.new_empty(call.elements[comm.rank])
    call.run(blocks, out, call.reduction, comm)
    return call.shaped(call.reduction.finish(out, comm.size), call.sizes[comm.rank])
