"""Odd but correct solutions of homework 3: they keep full points."""

import torch
import torch.distributed as dist


def broadcast_backward__tree_of_messages(x, g, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    place, total, distance = (rank - root) % n, g.clone(), 1
    while distance < n:
        if place % (2 * distance):
            dist.send(total, (rank - distance) % n)
            break
        if place + distance < n:
            part = torch.empty_like(g)
            dist.recv(part, (rank + distance) % n)
            total += part
        distance *= 2
    return total if rank == root else torch.zeros_like(g)


def reduce_backward__flat(x, g, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(g, other)
        return g.clone()
    gradient = torch.empty_like(x)
    dist.recv(gradient, root)
    return gradient


def reduce_backward__shape_first(x, g, root):
    shape = torch.tensor(x.shape)
    dist.all_reduce(shape, op=dist.ReduceOp.MAX)
    gradient = torch.zeros(*shape.tolist(), dtype=x.dtype)
    if g is not None:
        gradient.copy_(g)
    dist.broadcast(gradient, src=root, async_op=True).wait()
    return gradient


def scatter_backward__messages_as_they_come(x, g, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(g, root)
        return None
    gradient = x.clone()
    blocks = gradient.split(len(x) // n)
    blocks[root].copy_(g)
    for block, work in [
        (block, dist.irecv(block, r)) for r, block in enumerate(blocks) if r != root
    ]:
        work.wait()
        assert len(block) == len(g)
    return gradient


def gather_backward__last_rank_first(x, g, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != root:
        gradient = torch.empty_like(x)
        dist.irecv(gradient, root).wait()
        return gradient
    blocks = g.view(n, *x.shape)
    for work in [dist.isend(blocks[r], r) for r in reversed(range(n)) if r != root]:
        work.wait()
    return blocks[root] + 0.0


def all_gather_backward__exchange_and_add(x, g):
    mine = torch.empty_like(g)
    dist.all_to_all_single(mine, g)
    return mine.view(dist.get_world_size(), *x.shape).flip(0).sum(0)


def reduce_scatter_backward__ring(x, g):
    rank, n = dist.get_rank(), dist.get_world_size()
    blocks = [g.clone() if r == rank else torch.empty_like(g) for r in range(n)]
    for step in range(n - 1):
        ops = [
            dist.P2POp(dist.isend, blocks[(rank - step) % n], (rank + 1) % n),
            dist.P2POp(dist.irecv, blocks[(rank - step - 1) % n], (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return torch.cat(blocks)


def all_reduce_backward__reduce_then_broadcast(x, g):
    total = g.clone()
    dist.reduce(total, 0)
    dist.broadcast(total, 0)
    return total


def all_reduce_backward__recursive_doubling_or_ring(x, g):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, moving = g.clone(), g.clone()
    if n & (n - 1) == 0:
        distance = 1
        while distance < n:
            arrived = torch.empty_like(total)
            work = dist.irecv(arrived, rank ^ distance)
            dist.send(total, rank ^ distance)
            work.wait()
            total, distance = total + arrived, 2 * distance
        return total
    for _ in range(n - 1):
        arrived = torch.empty_like(moving)
        sending = dist.isend(moving, (rank + 1) % n)
        dist.recv(arrived, (rank - 1) % n)
        sending.wait()
        moving = arrived
        total += moving
    return total


def all_to_all_backward__lists(x, g):
    blocks = [torch.empty_like(block) for block in x.chunk(dist.get_world_size())]
    dist.all_to_all(blocks, list(g.chunk(dist.get_world_size())))
    return torch.cat(blocks)
