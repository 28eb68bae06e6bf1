"""Reduce-scatter: every rank has a whole array; in the end each has its own block of their sum.

rank 0  [a0 a1 a2]        [a0+b0+c0]
rank 1  [b0 b1 b2]   →    [a1+b1+c1]       an all-gather backwards, with a sum wherever it would have copied:
rank 2  [c0 c1 c2]        [a2+b2+c2]       each algorithm here is one of all_gather.py, read from the end
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel101.collectives.auto import check_algorithm, choose
from parallel101.collectives.blocks import Blocks, flat_of, row_of, shaped
from parallel101.collectives.checks import cut_sizes, dim_of, nothing, tensor_of
from parallel101.collectives.comm import Comm, comm_of, wait_all
from parallel101.collectives.power_of_two import combine_pairs, fold
from parallel101.collectives.reductions import Reduction, reduction_of
from parallel101.mesh import GroupLike, group_of, split_sizes


def direct(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> None:
    """Everyone sends each block straight to its owner, who adds them up: p − 1 steps, in each of which everyone has another partner."""
    p, rank, arriving, sent = comm.size, comm.rank, [], []
    for step in range(1, p):
        source, to = (rank - step) % p, (rank + step) % p
        inbox = torch.empty_like(out)
        arriving.append((comm.irecv(inbox, source), inbox))
        sent.append(comm.isend(blocks[to], to))
    total = blocks[rank]
    for received, inbox in arriving:  # in this order, whichever is here first: the same bits in every run
        received.wait()
        total = op(total, inbox, out=out)
    wait_all(sent)


def ring(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> None:
    """A partial sum of each block walks once round the ring and ends at its owner: p − 1 steps, each with one block a rank."""
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
    """Two partial sums of each block, one from either side, meet at its owner: ⌊p/2⌋ steps where a link carries both directions."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    far, near = p // 2, (p - 1) // 2  # ranks that a block passes on its way to the right, to the left
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
        if step < near:  # what came from the right for me is added once, below: my own block is in the other sum already
            leftward = also_inbox if step == near - 1 else op(also_inbox, also_mine, out=also_inbox)
    if near:
        op(rightward, leftward, out=out)
    else:
        out.copy_(rightward)


def recursive_halving(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> None:
    """Swap half of what is left with a partner and add: lg p steps for a power of two, ⌊lg p⌋ + 2 otherwise (see fold.py)."""
    core, pair, cuts = fold(comm)
    total = combine_pairs(blocks, op, comm, pair)
    if core is None:
        comm.irecv(out, source=comm.rank - 1).wait()
    else:
        mine = Blocks(halve(total.merged(cuts), op, core), blocks.sizes, first=comm.rank)
        out.copy_(mine[comm.rank])
        if pair is not None:
            comm.isend(mine[pair], to=pair).wait()


def halve(blocks: Blocks, op: Reduction, comm: Comm) -> Tensor:
    """Recursive halving proper; comm.size is a power of two. Returns this rank's block."""
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


def reduce_scatter(
    x: Tensor, dim: int = 0, op: str = "sum", *, group: GroupLike = None, sizes: Sequence[int] | None = None, algorithm: str = "auto"
) -> Tensor:
    """The arrays of all ranks, combined; of the result each rank gets its own block along `dim`.

    Args:
        x: this rank's array, of the same shape and dtype on every rank.
        dim: along which the result is cut; negative counts from the end.
        op: "sum", "mean", "product", "max" or "min"; see reductions.py for which dtypes have which.
        group: see `group_of`. An idle rank gets a zero-volume tensor and sends nothing.
        sizes: the extent of every rank's block along `dim`, zeros included. Default: `split_sizes(x.shape[dim], p)`.
        algorithm: "auto" or one of `algorithms("reduce_scatter")`. "auto" takes, by the bytes of x: direct on up to 8 ranks,
            else recursive_halving up to 256 KiB, else ring (see auto.py).

    Returns:
        A new contiguous tensor of x's shape with sizes[position] along `dim`, no part of the graph.

    Raises ValueError or TypeError, before any message, for what does not fit. Bytes sent by each rank: n(p−1)/p, n bytes of x
    (by recursive_halving up to n, where p is no power of two).
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4.3.
    """
    check_algorithm("reduce_scatter", algorithm, ALGORITHMS)
    x, reduction, members = tensor_of(x), reduction_of(op, x), group_of(group)
    dim = dim_of(x, dim)
    if members.position is None:
        return nothing(x)
    comm = comm_of(members, x.device, "reduce_scatter")
    sizes = cut_sizes(x, dim, split_sizes(x.shape[dim], comm.size) if sizes is None else sizes, members)
    if comm.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    blocks = Blocks(flat_of(x, dim), [size * row_of(x, dim) for size in sizes])
    out = x.new_empty(blocks.sizes[comm.rank])
    choose("reduce_scatter", algorithm, ALGORITHMS, x.nbytes, comm.size)(blocks, out, reduction, comm)
    reduction.finish(out, comm.size)
    return shaped(out, [*x.shape[:dim], sizes[comm.rank], *x.shape[dim + 1 :]], dim)
