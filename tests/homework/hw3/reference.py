"""Homework 3, solved: a backward has the forward's messages, each in the other direction."""

import torch
import torch.distributed as dist


def broadcast_backward(x, g, root):
    total = g.clone()
    dist.reduce(total, root)
    return total if dist.get_rank() == root else torch.zeros_like(x)


def reduce_backward(x, g, root):
    gradient = g.clone() if dist.get_rank() == root else torch.empty_like(x)
    dist.broadcast(gradient, root)
    return gradient


def scatter_backward(x, g, root):
    if dist.get_rank() != root:
        dist.gather(g, None, root)
        return None
    gradient = torch.empty_like(x)
    dist.gather(g, list(gradient.chunk(dist.get_world_size())), root)
    return gradient


def gather_backward(x, g, root):
    gradient = torch.empty_like(x)
    dist.scatter(
        gradient, list(g.chunk(dist.get_world_size())) if dist.get_rank() == root else None, root
    )
    return gradient


def all_gather_backward(x, g):
    gradient = torch.empty_like(x)
    dist.reduce_scatter(gradient, list(g.chunk(dist.get_world_size())))
    return gradient


def reduce_scatter_backward(x, g):
    gradient = torch.empty_like(x)
    dist.all_gather(list(gradient.chunk(dist.get_world_size())), g)
    return gradient


def all_reduce_backward(x, g):
    total = g.clone()
    dist.all_reduce(total)
    return total


def all_to_all_backward(x, g):
    gradient = torch.empty_like(x)
    dist.all_to_all_single(gradient, g)
    return gradient


# ---- 9d ----


def passed_on(x, k, dim, at_end, to, source):
    """The k entries at one end of x go to rank `to`; those from `source` come in at the other."""
    start, length = (x.shape[dim] - k if at_end else 0), x.shape[dim]
    leaving = x.narrow(dim, start, k).contiguous()
    kept = x.narrow(dim, 0 if at_end else k, length - k)
    came = leaving.clone()
    if dist.get_world_size() > 1 and k > 0:
        for work in [dist.irecv(came, source), dist.isend(leaving, to)]:
            work.wait()
    return torch.cat([came, kept] if at_end else [kept, came], dim)


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, dim):
        ctx.k, ctx.dim = k, dim
        rank, n = dist.get_rank(), dist.get_world_size()
        return passed_on(x, k, dim, True, to=(rank + 1) % n, source=(rank - 1) % n)

    @staticmethod
    def backward(ctx, g):
        rank, n = dist.get_rank(), dist.get_world_size()
        gradient = passed_on(g, ctx.k, ctx.dim, False, to=(rank - 1) % n, source=(rank + 1) % n)
        return gradient, None, None


def shift(x, k, dim):
    return Shift.apply(x, k, dim)


# ---- 9e ----


class AllGatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        y = x.new_empty(sum(sizes), *x.shape[1:])
        rank, works = dist.get_rank(), []
        for other, block in enumerate(y.split(sizes)):
            if other == rank:
                block.copy_(x)
                continue
            if len(block):
                works.append(dist.irecv(block, other))
            if len(x):
                works.append(dist.isend(x, other))
        for work in works:
            work.wait()
        return y

    @staticmethod
    def backward(ctx, g):
        rank, blocks = dist.get_rank(), g.contiguous().split(ctx.sizes)
        total = blocks[rank].clone()
        parts, works = [], []
        for other, block in enumerate(blocks):
            if other == rank:
                continue
            if len(total):
                parts.append(torch.empty_like(total))
                works.append(dist.irecv(parts[-1], other))
            if len(block):
                works.append(dist.isend(block, other))
        for work in works:
            work.wait()
        return sum(parts, total), None


def all_gather_uneven(x, sizes):
    return AllGatherUneven.apply(x, sizes)


# ---- 9f ----


def with_neighbours(to_left, to_right):
    """Send one tensor to each neighbour. Returns theirs, or zeros where there is no neighbour."""
    rank, n = dist.get_rank(), dist.get_world_size()
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    works = []
    if rank > 0:
        works += [dist.irecv(from_left, rank - 1), dist.isend(to_left.contiguous(), rank - 1)]
    if rank < n - 1:
        works += [dist.irecv(from_right, rank + 1), dist.isend(to_right.contiguous(), rank + 1)]
    for work in works:
        work.wait()
    return from_left, from_right


class HaloExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.width = width
        from_left, from_right = with_neighbours(x[:width], x[-width:])
        return torch.cat([from_left, x, from_right])

    @staticmethod
    def backward(ctx, g):
        width = ctx.width
        from_left, from_right = with_neighbours(g[:width], g[-width:])
        gradient = g[width:-width].clone()
        gradient[:width] += from_left
        gradient[-width:] += from_right
        return gradient, None


def halo_exchange(x, width, sizes):
    if min(sizes) < width:
        raise ValueError(f"a block has {min(sizes)} rows, fewer than the halo's {width}")
    return HaloExchange.apply(x, width)
