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


class Passed(torch.autograd.Function):
    """What another rank sends; its adjoint goes the other way. Autograd does the cutting."""

    @staticmethod
    def forward(ctx, x, to, source):
        ctx.ranks = to, source
        came = torch.empty(x.shape, dtype=x.dtype)
        ops = [dist.P2POp(dist.irecv, came, source), dist.P2POp(dist.isend, x.contiguous(), to)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return came

    @staticmethod
    def backward(ctx, g):
        to, source = ctx.ranks
        return Passed.apply(g.contiguous(), source, to), None, None


def shift__a_function_for_the_message_alone(x, k, dim):
    rank, n = dist.get_rank(), dist.get_world_size()
    kept, last = x.split([x.shape[dim] - k, k], dim)
    if n > 1 and k:
        last = Passed.apply(last, (rank + 1) % n, (rank - 1) % n)
    return torch.cat((last, kept), dim)


def shift__dim_first(x, k, dim):
    def exchanged(x, to, source):
        came = torch.full(x.shape, torch.nan, dtype=x.dtype)
        works = [dist.irecv(came[:1], source)] + ([dist.irecv(came[1:], source)] if k > 1 else [])
        dist.send(x[:1].contiguous(), to)
        if k > 1:
            dist.send(x[1:].contiguous(), to)
        [work.wait() for work in works]
        return came

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(x):
            rank, n = dist.get_rank(), dist.get_world_size()
            if n == 1 or not k:
                return x.roll(k, dim)
            x = x.movedim(dim, 0)
            came = exchanged(x[len(x) - k :], (rank + 1) % n, (rank - 1) % n)
            return torch.cat([came, x[: len(x) - k]]).movedim(0, dim)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            rank, n = dist.get_rank(), dist.get_world_size()
            if n == 1 or not k:
                return g.roll(-k, dim)
            g = g.movedim(dim, 0)
            came = exchanged(g[:k], (rank - 1) % n, (rank + 1) % n)
            return torch.cat([g[k:], came]).movedim(0, dim)

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


def all_gather_uneven__one_root_after_the_other(x, sizes):
    rank, n = dist.get_rank(), dist.get_world_size()

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            blocks = [torch.empty(size, *x.shape[1:], dtype=x.dtype) for size in sizes]
            blocks[rank] = x.clone()
            for root, block in enumerate(blocks):
                for other in range(n):
                    if rank == root != other:
                        dist.send(block, other)
                    elif rank == other != root:
                        dist.recv(block, root)
            return torch.vstack(blocks)

        @staticmethod
        def backward(ctx, g):
            gradient = 0
            for root, block in enumerate(torch.split(g, sizes)):
                if rank != root:
                    dist.send(block.clone(), root)
                    continue
                gradient, part = block.clone(), torch.empty_like(block)
                for other in range(n):
                    if other != root:
                        dist.recv(part, other)
                        gradient = gradient + part
            return gradient

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


def halo_exchange__to_the_right_then_to_the_left(x, width, sizes):
    class Halo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            rank, n = dist.get_rank(), dist.get_world_size()
            y = torch.nn.functional.pad(x, (0, 0, width, width))
            works = [dist.isend(x[-width:].clone(), rank + 1)] if rank + 1 < n else []
            works += [dist.irecv(y[:width], rank - 1)] if rank else []
            works += [dist.isend(x[:width].clone(), rank - 1)] if rank else []
            works += [dist.irecv(y[-width:], rank + 1)] if rank + 1 < n else []
            [work.wait() for work in works]
            return y

        @staticmethod
        def backward(ctx, g):
            rank, n = dist.get_rank(), dist.get_world_size()
            gradient, halo = g[width:-width].clone(), torch.empty_like(g[:width])
            if rank:
                dist.send(g[:width].clone(), rank - 1)
            if rank + 1 < n:
                dist.recv(halo, rank + 1)
                gradient[-width:] += halo
                dist.send(g[-width:].clone(), rank + 1)
            if rank:
                dist.recv(halo, rank - 1)
                gradient[:width] += halo
            return gradient

    if sorted(sizes)[0] < width:
        raise ValueError
    return Halo.apply(x)


def halo_exchange__into_the_result(x, width, sizes):
    rank, n = dist.get_rank(), dist.get_world_size()
    if not all(size >= width for size in sizes):
        raise ValueError("every block needs a whole halo")
    there = [(-1, slice(0, width), slice(width, 2 * width))] * (rank > 0)
    there += [(1, slice(-width, None), slice(-2 * width, -width))] * (rank + 1 < n)

    class Halo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.new_zeros(len(x) + 2 * width, *x.shape[1:])
            y[width:-width] = x
            edges = [y[edge].clone() for _, _, edge in there]
            works = [dist.irecv(y[halo], rank + side) for side, halo, _ in there]
            works += [dist.isend(edge, rank + side) for (side, _, _), edge in zip(there, edges)]
            [work.wait() for work in reversed(works)]
            return y

        @staticmethod
        def backward(ctx, g):
            total = g.clone()
            parts = [torch.empty_like(g[halo]) for _, halo, _ in there]
            works = [dist.irecv(part, rank + side) for (side, _, _), part in zip(there, parts)]
            works += [dist.isend(g[halo].contiguous(), rank + side) for side, halo, _ in there]
            [work.wait() for work in works]
            for (_, _, edge), part in zip(there, parts):
                total[edge] += part
            return total[width:-width]

    return Halo.apply(x)
