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


def all_to_all_backward__lists(x, g):
    blocks = [torch.empty_like(block) for block in x.chunk(dist.get_world_size())]
    dist.all_to_all(blocks, list(g.chunk(dist.get_world_size())))
    return torch.cat(blocks)


# ---- 9d ----


def shift__blocking_in_a_safe_order(x, k, dim):
    def passed(x, to, source):
        came = torch.empty_like(x)
        if dist.get_rank() == 0:
            dist.send(x, to)
            dist.recv(came, source)
        else:
            dist.recv(came, source)
            dist.send(x, to)
        return came

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            rank, n = dist.get_rank(), dist.get_world_size()
            if n == 1 or k == 0:
                return x.roll(k, dim).clone()
            last = x.narrow(dim, x.shape[dim] - k, k).contiguous()
            y = torch.roll(x, k, dim).contiguous()
            y.narrow(dim, 0, k).copy_(passed(last, (rank + 1) % n, (rank - 1) % n))
            return y

        @staticmethod
        def backward(ctx, g):
            rank, n = dist.get_rank(), dist.get_world_size()
            gradient = g.roll(-k, dim)
            if n > 1 and k > 0:
                first = g.narrow(dim, 0, k).contiguous()
                came = passed(first, (rank - 1) % n, (rank + 1) % n)
                gradient.narrow(dim, g.shape[dim] - k, k).copy_(came)
            return gradient

    return Shift.apply(x)


# ---- 9e ----


def all_gather_uneven__ring(x, sizes):
    def passed(outgoing, incoming, step):
        rank, n = dist.get_rank(), dist.get_world_size()
        works = [dist.isend(outgoing.contiguous(), (rank + step) % n)]
        works.append(dist.irecv(incoming, (rank - step) % n))
        for work in works:
            work.wait()

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            rank, n = dist.get_rank(), dist.get_world_size()
            y = torch.empty(sum(sizes), *x.shape[1:], dtype=x.dtype)
            blocks = y.split(sizes)
            blocks[rank].copy_(x)
            for step in range(n - 1):
                passed(blocks[(rank - step) % n], blocks[(rank - step - 1) % n], 1)
            return y

        @staticmethod
        def backward(ctx, g):
            rank, n = dist.get_rank(), dist.get_world_size()
            blocks = list(g.clone().split(sizes))
            for step in reversed(range(n - 1)):
                inbox = torch.empty_like(blocks[(rank - step) % n])
                passed(blocks[(rank - step - 1) % n], inbox, -1)
                blocks[(rank - step) % n] += inbox
            return blocks[rank].clone()

    return Gather.apply(x)


# ---- 9f ----


class Neighbours(torch.autograd.Function):
    """Both edges go out, both halos come in. It is its own adjoint; autograd does the rest."""

    @staticmethod
    def forward(ctx, to_left, to_right):
        rank, n = dist.get_rank(), dist.get_world_size()
        halos = [torch.zeros_like(to_left), torch.zeros_like(to_right)]
        for parity in (0, 1):
            for low in range(parity, n - 1, 2):
                if rank == low:
                    dist.send(to_right.contiguous(), low + 1)
                    dist.recv(halos[1], low + 1)
                elif rank == low + 1:
                    dist.recv(halos[0], low)
                    dist.send(to_left.contiguous(), low)
        return tuple(halos)

    @staticmethod
    def backward(ctx, of_left, of_right):
        return Neighbours.apply(of_left, of_right)


def halo_exchange__a_function_for_the_messages_alone(x, width, sizes):
    if any(size < width for size in sizes):
        raise ValueError(f"width={width}, but the blocks have {sizes} rows")
    before, after = Neighbours.apply(x[:width], x[len(x) - width :])
    return torch.cat([before, x, after])
