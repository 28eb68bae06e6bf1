"""All-to-all: every rank has a block for every other rank. It transposes who has what.

rank 0  [a0 a1 a2]        [a0 b0 c0]     direct, pairwise: every block goes straight to its owner
rank 1  [b0 b1 b2]   →    [a1 b1 c1]     Bruck: lg p steps, but a block is sent lg p / 2 times on
rank 2  [c0 c1 c2]        [a2 b2 c2]         average
                                         torus: on a mesh, along one axis after the other; all axes
                                             work at the same time
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel101.collectives.auto import check_algorithm, choose
from parallel101.collectives.blocks import Blocks
from parallel101.collectives.checks import (
    begin,
    block_sizes,
    dim_of,
    nothing,
    shard_sizes,
    sizes_of,
    tensor_of,
)
from parallel101.collectives.comm import Comm, Work, wait_all
from parallel101.collectives.torus import all_to_all as torus
from parallel101.mesh import GroupLike, group_of

Count = Callable[[int, int], int]  # (source, destination) → elements of the block between them


def direct(outgoing: Blocks, incoming: Blocks, count: Count, comm: Comm) -> None:
    """Post all messages at once: p − 1 steps if each rank has one link.

    In each step, every rank has another partner.
    """
    p, rank = comm.size, comm.rank
    messages: list[Work] = []
    for step in range(1, p):
        source, to = (rank - step) % p, (rank + step) % p
        messages += comm.irecv(incoming[source], source), comm.isend(outgoing[to], to)
    incoming[rank].copy_(outgoing[rank])  # while the messages are in flight
    wait_all(messages)


def pairwise(outgoing: Blocks, incoming: Blocks, count: Count, comm: Comm) -> None:
    """Exchange blocks with one partner at a time: p − 1 steps, one message in flight to a rank."""
    p = comm.size
    incoming[comm.rank].copy_(outgoing[comm.rank])
    for step in range(1, p):
        source, to = (comm.rank - step) % p, (comm.rank + step) % p
        wait_all([comm.irecv(incoming[source], source), comm.isend(outgoing[to], to)])


def bruck(outgoing: Blocks, incoming: Blocks, count: Count, comm: Comm) -> None:
    """Move the block for the rank j to the right by the powers of two that add up to j.

    All blocks that move by 2ᵏ are one message.
    """
    p, rank = comm.size, comm.rank
    # slot j: the block for the rank j to the right
    slots = [outgoing[(rank + j) % p] for j in range(p)]
    distance = 1
    while distance < p:
        moving = [j for j in range(p) if j & distance]
        # what arrives in slot j has moved by j % distance + distance
        sources = [(rank - distance - j % distance) % p for j in moving]
        counts = [count(source, (source + j) % p) for source, j in zip(sources, moving)]
        inbox = incoming.flat.new_empty(sum(counts))
        received = comm.irecv(inbox, source=(rank - distance) % p)
        sent = comm.isend(torch.cat([slots[j] for j in moving]), to=(rank + distance) % p)
        wait_all([received, sent])
        for j, block in zip(moving, inbox.split_with_sizes(counts)):
            slots[j] = block
        distance *= 2
    torch.cat([slots[(rank - source) % p] for source in range(p)], out=incoming.flat)


ALGORITHMS = {f.__name__: f for f in (direct, pairwise, bruck)}
ON_A_MESH = {"torus": torus}


def all_to_all(
    x: Tensor,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    group: GroupLike = None,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """Send the j-th block of x to position j, and return the blocks that arrive, joined.

    Moves values only; `parallel101.autograd.all_to_all` describes the arguments and adds the
    gradient.
    Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems" (1997); Thakur, Rabenseifner, Gropp (2005),
    section 4.
    """
    x, members = tensor_of(x), group_of(group)
    check_algorithm("all_to_all", algorithm, members, ALGORITHMS, ON_A_MESH)
    split_dim, concat_dim = dim_of(x, split_dim, "split_dim"), dim_of(x, concat_dim, "concat_dim")
    if members.position is None:
        return nothing(x)
    p, rank, one_dim = members.size, members.position, split_dim == concat_dim
    cut = block_sizes(x, split_dim, split_sizes, members, "split_sizes")
    # if the dims are one, a rank knows only the sizes of its own blocks
    own_sizes = one_dim and concat_sizes is not None
    if one_dim and concat_sizes is not None:
        joined = sizes_of(concat_sizes, members, "concat_sizes")
    elif one_dim:
        joined = [cut[rank]] * p
    else:
        joined = shard_sizes(x, concat_dim, concat_sizes, members, "concat_sizes")
    if one_dim and joined[rank] != cut[rank]:
        raise ValueError(
            f"position {rank}'s own block has size {cut[rank]} in split_sizes, but "
            f"{joined[rank]} in concat_sizes"
        )
    if own_sizes and algorithm in ("bruck", "torus"):
        raise ValueError(
            f"algorithm={algorithm!r} passes on blocks whose sizes these concat_sizes do not "
            "give: use 'direct' or 'pairwise'"
        )
    dims = {"split_dim": split_dim, "concat_dim": concat_dim, "algorithm": algorithm}
    sizes = None if one_dim else (cut, joined)
    comm = begin("all_to_all", members, x, uneven=concat_dim, sizes=sizes, **dims)
    if own_sizes and algorithm == "auto":
        algorithm = "direct"

    row = math.prod(extent for d, extent in enumerate(x.shape) if d not in (split_dim, concat_dim))
    sent, kept = (1, 1) if one_dim else (joined[rank], cut[rank])  # along the other dim
    blocks = x.split(cut, split_dim)
    packed = torch.cat([block.reshape(-1) for block in blocks]) if split_dim else x.contiguous()
    outgoing = Blocks(packed.view(-1), [row * size * sent for size in cut])
    arriving = [row * size * kept for size in joined]
    incoming = Blocks(x.new_empty(sum(arriving)), arriving)

    def count(source: int, to: int) -> int:
        return row * cut[to] * (1 if one_dim else joined[source])

    # all ranks must choose the same algorithm
    mean = x.nbytes if one_dim else row * sum(cut) * sum(joined) // p * x.element_size()
    run = choose("all_to_all", algorithm, ALGORITHMS | ON_A_MESH, mean, p)
    run(outgoing, incoming, count, comm)
    shape = list(x.shape)
    shape[split_dim] = cut[rank]
    before, after = shape[:concat_dim], shape[concat_dim + 1 :]
    if not before:
        return incoming.flat.view(sum(joined), *after)
    arrived = [incoming[source].view(*before, size, *after) for source, size in enumerate(joined)]
    return torch.cat(arrived, concat_dim)
