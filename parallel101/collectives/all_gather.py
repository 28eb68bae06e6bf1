"""All-gather: every rank has a shard, and every rank gets all of them, in order.

rank 0  [a . .]        [a b c]
rank 1  [. b .]   →    [a b c]
rank 2  [. . c]        [a b c]

Each rank must receive n(p−1)/p bytes, whatever the algorithm. The algorithms differ in the number
of steps, and in which ranks send to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallel101.collectives.blocks import Blocks, flat_of
from parallel101.collectives.checks import Sizes, nothing, prepare
from parallel101.collectives.comm import Comm, blocking, wait_all
from parallel101.collectives.power_of_two import copy_from_core, nearest_power_of_two
from parallel101.collectives.torus import all_gather as torus


def direct_steps(blocks: Blocks, comm: Comm) -> Iterator[None]:
    """Send this rank's block to every other rank: p − 1 steps, each with another partner."""
    p, rank, mine = comm.size, comm.rank, blocks[comm.rank]
    sent = [comm.isend(mine, to=(rank + step) % p) for step in range(1, p)]
    received = [
        comm.irecv(blocks[(rank - step) % p], source=(rank - step) % p) for step in range(1, p)
    ]
    comm.flush()
    yield  # an asynchronous caller computes here
    wait_all(sent + received)  # on gloo, waiting for sends first is 10 % faster


direct = blocking(direct_steps)


def ring(blocks: Blocks, comm: Comm) -> None:
    """Pass to the right, in each step, the block last received from the left: p − 1 steps."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    for step in range(p - 1):
        received = comm.irecv(blocks[(rank - step - 1) % p], source=left)
        sent = comm.isend(blocks[(rank - step) % p], to=right)
        wait_all([received, sent])


def bidirectional_ring(blocks: Blocks, comm: Comm) -> None:
    """Use two rings at once; each block travels half-way round in both directions.

    ⌊p/2⌋ steps on links that carry both directions.
    """
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    for step in range(p // 2):
        works = [
            comm.irecv(blocks[(rank - step - 1) % p], source=left),
            comm.isend(blocks[(rank - step) % p], to=right),
        ]
        # if p is even, the block from the opposite side of the ring comes from the left only
        if step < (p - 1) // 2:
            works += [
                comm.irecv(blocks[(rank + step + 1) % p], source=right),
                comm.isend(blocks[(rank + step) % p], to=left),
            ]
        wait_all(works)


def recursive_doubling(blocks: Blocks, comm: Comm) -> None:
    """Exchange everything with a partner at distance 1, 2, 4, …: lg p steps.

    If p isn't a power of two, ⌊lg p⌋ + 2 steps (power_of_two.py).
    """
    core, partner, cuts = nearest_power_of_two(comm)
    if partner is not None and core:
        comm.irecv(blocks[partner], source=partner).wait()
    elif partner is not None:
        comm.isend(blocks[comm.rank], to=partner).wait()
    if core:
        double(blocks.merged(cuts), core)
    copy_from_core(blocks[:], comm, partner)


def double(blocks: Blocks, comm: Comm) -> None:
    """Run recursive doubling on ranks whose number is a power of two."""
    width = 1
    while width < comm.size:
        # I have the blocks mine … mine + width − 1, my partner the next or previous `width`
        mine = comm.rank // width * width
        theirs, partner = mine ^ width, comm.rank ^ width
        received = comm.irecv(blocks[theirs : theirs + width], source=partner)
        sent = comm.isend(blocks[mine : mine + width], to=partner)
        wait_all([received, sent])
        width *= 2


def bruck(blocks: Blocks, comm: Comm) -> None:
    """Send everything 1, 2, 4, … ranks to the left: doubling in ⌈lg p⌉ steps for any p.

    Until the end, the blocks are stored rotated.
    """
    p, rank = comm.size, comm.rank
    # rotated[i] is block rank + i
    rotated = Blocks(
        torch.empty_like(blocks.flat), [blocks.sizes[(rank + i) % p] for i in range(p)]
    )
    rotated[0].copy_(blocks[rank])
    have = 1
    while have < p:
        more = min(have, p - have)
        received = comm.irecv(rotated[have : have + more], source=(rank + have) % p)
        sent = comm.isend(rotated[:more], to=(rank - have) % p)
        wait_all([received, sent])
        have += more
    blocks[rank:].copy_(rotated[: p - rank])
    blocks[:rank].copy_(rotated[p - rank :])


ALGORITHMS = {f.__name__: f for f in (direct, ring, bidirectional_ring, recursive_doubling, bruck)}
ON_A_MESH = {"torus": torus}


def all_gather(x: Tensor, dim: int = 0, *, sizes: Sizes = None, **options: Any) -> Tensor:
    """Return the shards of all ranks joined along `dim` in the order of the group, on every rank.

    Moves values only; `parallel101.autograd.all_gather` describes the arguments and adds the
    gradient.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.1.
    """
    own = {"dim": dim, "shards": sizes}
    call = prepare("all_gather", x, own, ALGORITHMS, ON_A_MESH, **options)
    if call is None:
        return nothing(x)
    blocks = Blocks(call.x.new_empty(sum(call.elements)), call.elements)
    blocks[call.comm.rank].copy_(flat_of(call.x, call.dim))
    call.run(blocks, call.comm)
    return call.shaped(blocks.flat, sum(call.sizes))
