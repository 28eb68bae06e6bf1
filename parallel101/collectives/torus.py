"""All-gather, reduce-scatter and all-to-all over all links of a torus at the same time.

The array is cut into one part per axis and direction. Each part goes along all axes, but begins
with another axis, or goes the other way:

    mesh (2, 3)    0 1 2     part 0   → along axis 1, then ↓ along axis 0
                   3 4 5     part 1   ← along axis 1, then ↑ along axis 0
                             part 2   ↓ along axis 0, then → along axis 1
                             part 3   ↑ along axis 0, then ← along axis 1

So on k axes of one length, the n(p−1)/p bytes that a rank sends leave over 2k links. If lengths
differ, parts meet on the longer axes. An all-to-all has one part per axis, because its messages go
both ways round anyway. These are algorithms for a group that is a DeviceMesh; they do not choose or
build the mesh. See `torus` and `two_level` of all_reduce.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel101.collectives.blocks import Blocks
from parallel101.collectives.comm import Comm, Work, wait_all
from parallel101.collectives.reductions import Reduction
from parallel101.mesh import split_sizes


def all_gather(blocks: Blocks, comm: Comm) -> None:
    """Gather each part along one axis after the other, all parts at once: Σ (pᵢ − 1) steps."""
    routes = routes_of(comm)
    if not routes:  # one rank alone
        return
    pieces = cut(blocks, len(routes))
    # so far only my own block is valid
    parts = joined(pieces, routes)
    at_once([gather_steps(part, route) for part, route in zip(parts, routes)])
    for piece, part, route in zip(pieces, parts, routes):
        for place, position in enumerate(route.order):
            piece[position].copy_(part[place])


def reduce_scatter(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> None:
    """Sum each part along one axis after the other: the all-gather backwards.

    Begin with each part's last axis, where its share is largest.
    """
    routes = routes_of(comm)
    parts = joined(cut(blocks, len(routes)), routes)
    outs = out.split(split_sizes(out.numel(), len(routes)))
    at_once([scatter_steps(part, out, op, route) for part, out, route in zip(parts, outs, routes)])


def all_to_all(
    outgoing: Blocks, incoming: Blocks, count: Callable[[int, int], int], comm: Comm
) -> None:
    """Exchange each part along one axis after the other, all parts at the same time.

    A rank sends Σ (pᵢ − 1) messages for each part.
    """
    axes = [axis for axis, length in enumerate(comm.shape) if length > 1] or [0]
    parts = [list(pieces) for pieces in cut(outgoing, len(axes))]
    orders = [axes[i:] + axes[:i] for i in range(len(axes))]
    at_once([exchange_steps(parts[i], order, i, count, comm) for i, order in enumerate(orders)])
    for pieces, part in zip(cut(incoming, len(axes)), parts):
        for piece, arrived in zip(pieces, part):
            piece.copy_(arrived)


def cut(blocks: Blocks, parts: int) -> list[tuple[Tensor, ...]]:
    """Return every block cut into `parts` pieces, by part and position."""
    pieces = (blocks[i].split(split_sizes(size, parts)) for i, size in enumerate(blocks.sizes))
    return list(zip(*pieces))


def joined(pieces: Sequence[tuple[Tensor, ...]], routes: Sequence[Route]) -> list[Blocks]:
    """Return a copy of each part's pieces, one after the other in the order of its route."""
    ordered = [[piece[i] for i in route.order] for piece, route in zip(pieces, routes)]
    return [Blocks(torch.cat(part), [piece.numel() for piece in part]) for part in ordered]


# ── The route of one part


class Route(NamedTuple):
    """The way of one part: the lines that it goes along from here, and the order of its blocks.

    In that order the first line's coordinate runs fastest, so the blocks that a rank has gathered
    along the first lines are contiguous.
    """

    lines: list[Comm]
    order: list[int]
    place: int  # of this rank in the order

    def windows(self) -> list[tuple[Comm, list[slice]]]:
        """Return, for each line, the blocks that each of its ranks has gathered before it."""
        found, width = [], 1
        for line in self.lines:
            first = self.place // (width * line.size) * (width * line.size)
            starts = [first + i * width for i in range(line.size)]
            found.append((line, [slice(start, start + width) for start in starts]))
            width *= line.size
        return found


def routes_of(comm: Comm) -> list[Route]:
    """Return a route for each axis to begin with and each direction."""
    axes = [axis for axis, length in enumerate(comm.shape) if length > 1]
    routes = []
    for first in reversed(range(len(axes))):
        for direction in (1, -1):
            lines, order = [], [0]
            for axis in axes[first:] + axes[:first]:
                line, stride = comm.along(axis), math.prod(comm.shape[axis + 1 :])
                coordinates = range(line.size)[::direction]
                lines.append(line.in_order(coordinates))
                order = [i + stride * c for c in coordinates for i in order]
            routes.append(Route(lines, order, order.index(comm.rank)))
    return routes


# Yields the messages of each step. The caller asks for the next step when they have arrived.
Steps = Iterator[list[Work]]


def gather_steps(blocks: Blocks, route: Route) -> Steps:
    """Run a ring all-gather of everything gathered so far along one line after the other."""
    for line, windows in route.windows():
        p, rank = line.size, line.rank
        for step in range(p - 1):
            received = line.irecv(blocks[windows[(rank - step - 1) % p]], source=(rank - 1) % p)
            sent = line.isend(blocks[windows[(rank - step) % p]], to=(rank + 1) % p)
            yield [received, sent]


def scatter_steps(blocks: Blocks, out: Tensor, op: Reduction, route: Route) -> Steps:
    """Run a ring reduce-scatter along one line after the other, from the last to the first.

    Each one reduces the block that the one before it left.
    """
    for line, windows in reversed(route.windows()):
        p, rank = line.size, line.rank
        partial = blocks[windows[rank - 1]]
        for step in range(1, p):
            mine = blocks[windows[(rank - step - 1) % p]]
            inbox = torch.empty_like(mine)
            received = line.irecv(inbox, source=(rank - 1) % p)
            sent = line.isend(partial, to=(rank + 1) % p)
            yield [received, sent]
            partial = op(inbox, mine, out=inbox)
        blocks = Blocks(partial, blocks.sizes, first=windows[rank].start)
    out.copy_(blocks[route.place])


def exchange_steps(
    slots: list[Tensor], axes: list[int], part: int, count: Callable[[int, int], int], comm: Comm
) -> Steps:
    """Run a direct all-to-all along one line after the other.

    At first, slot j holds the block for position j, and at the end the block from j. In between,
    the i-th rank of a line gets its neighbours' blocks for i, in the slots whose blocks it
    sent.
    """
    sources, targets = [comm.rank] * comm.size, list(range(comm.size))  # of the block in each slot
    for axis in axes:
        line, stride = comm.along(axis), math.prod(comm.shape[axis + 1 :])
        moving: list[list[int]] = [[] for _ in range(line.size)]  # slots, by place on the line
        for j in range(comm.size):
            place = j // stride % line.size
            moving[place].append(j)
            sources[j] += (place - line.rank) * stride
            targets[j] -= (place - line.rank) * stride
        whole = [count(source, target) for source, target in zip(sources, targets)]
        counts = [split_sizes(n, len(axes))[part] for n in whole]
        inboxes, works = {}, list[Work]()
        for step in range(1, line.size):
            source, to = (line.rank - step) % line.size, (line.rank + step) % line.size
            inboxes[source] = slots[0].new_empty(sum(counts[j] for j in moving[source]))
            outbox = torch.cat([slots[j] for j in moving[to]])
            works += line.irecv(inboxes[source], source), line.isend(outbox, to)
        yield works
        for place, inbox in inboxes.items():
            for j, block in zip(moving[place], inbox.split([counts[j] for j in moving[place]])):
                slots[j] = block


def at_once(parts: list[Steps]) -> None:
    """Run the parts side by side: post one step of each, and wait for all of them."""
    while works := [work for part in parts for work in next(part, [])]:
        wait_all(works)
