"""Wrong solutions of homework 3. A comment above each says what must be named."""

import torch
import torch.distributed as dist


def summed(g):
    total = g.clone()
    dist.all_reduce(total)
    return total


def mine(whole):
    return whole.chunk(dist.get_world_size())[dist.get_rank()].clone()


def in_its_place(x, g):
    whole = torch.zeros_like(x)
    whole.chunk(dist.get_world_size())[dist.get_rank()].copy_(g)
    return whole


# named: all-reduce as the adjoint of everything
def broadcast_backward__all_reduce(x, g, root):
    return summed(g)


# named: gradient where x was not used
def broadcast_backward__reduce_only(x, g, root):
    total = g.clone()
    dist.reduce(total, root)
    return total


# named: None in place of a gradient
def broadcast_backward__none_elsewhere(x, g, root):
    total = broadcast_backward__reduce_only(x, g, root)
    return total if dist.get_rank() == root else None


# named: None in place of a gradient
def gather_backward__none_elsewhere(x, g, root):
    """As a gather gives None to the other ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.empty_like(x)
    dist.scatter(mine, [part.clone() for part in g.chunk(n)] if rank == root else None, src=root)
    return mine if rank == root else None


# named: gradient without the other ranks
def broadcast_backward__own(x, g, root):
    return g.clone() if dist.get_rank() == root else torch.zeros_like(x)


# named: all-reduce as the adjoint of everything
def reduce_backward__all_reduce(x, g, root):
    return summed(torch.zeros_like(x) if g is None else g)


# named: gradient without the other ranks
def reduce_backward__only_root(x, g, root):
    return torch.zeros_like(x) if g is None else g.clone()


# named: all-reduce as the adjoint of everything
def scatter_backward__all_reduce(x, g, root):
    whole = torch.zeros(dist.get_world_size(), *g.shape, dtype=g.dtype)
    whole[dist.get_rank()] = g
    dist.all_reduce(whole)
    return whole.flatten(0, 1) if dist.get_rank() == root else None


# named: all-reduce as the adjoint of everything
def gather_backward__all_reduce(x, g, root):
    n = dist.get_world_size()
    return mine(summed(torch.zeros(n * len(x), *x.shape[1:], dtype=x.dtype) if g is None else g))


# named: slice of the gradient without the sum
def all_gather_backward__slice(x, g):
    return mine(g)


# named: all-reduce as the adjoint of everything
def all_gather_backward__all_reduce(x, g):
    return summed(g)


# named: all-reduce then slice
def all_gather_backward__all_reduce_then_slice(x, g):
    return mine(summed(g))


# named: all-reduce as the adjoint of everything
def reduce_scatter_backward__all_reduce(x, g):
    return summed(in_its_place(x, g))


# named: gradient without the other ranks
def reduce_scatter_backward__own(x, g):
    return in_its_place(x, g)


# named: gradient without the other ranks
def all_reduce_backward__own(x, g):
    return g.clone()


# named: gradient n times too large
def all_reduce_backward__n_times(x, g):
    return summed(g * dist.get_world_size())


# named: incoming gradient overwritten
def all_reduce_backward__in_place(x, g):
    dist.all_reduce(g)
    return g


# named: all-reduce as the adjoint of everything
def all_to_all_backward__all_reduce(x, g):
    return summed(g)


# named: gradient without the other ranks
def all_to_all_backward__own(x, g):
    return g.clone()


# ---- 9d to 9f: functions with a forward and a backward ----


def function_of(forward, backward):
    """The autograd function of a forward(*arguments) and a backward(g, *arguments)."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            ctx.arguments = arguments
            return forward(*(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments))

        @staticmethod
        def backward(ctx, g):
            gradient = backward(g, *ctx.arguments)
            return gradient, *(None for _ in ctx.arguments[1:])

    return Both.apply


def place():
    return dist.get_rank(), dist.get_world_size()


def swapped(outgoing, to, source):
    """What `source` sends, of the shape of what goes to rank `to`."""
    incoming = torch.empty_like(outgoing)
    if to == dist.get_rank() or not outgoing.numel():
        return outgoing.clone()
    works = [dist.isend(outgoing.contiguous(), to), dist.irecv(incoming, source)]
    for work in works:
        work.wait()
    return incoming


def to_the_right(x, k, dim):
    """The right shift by k."""
    rank, n = place()
    last = x.narrow(dim, x.shape[dim] - k, k).contiguous()
    first = swapped(last, (rank + 1) % n, (rank - 1) % n)
    return torch.cat([first, x.narrow(dim, 0, x.shape[dim] - k)], dim)


def to_the_left(x, k, dim):
    """Its adjoint."""
    rank, n = place()
    first = x.narrow(dim, 0, k).contiguous()
    last = swapped(first, (rank - 1) % n, (rank + 1) % n)
    return torch.cat([x.narrow(dim, k, x.shape[dim] - k), last], dim)


def gathered(x, sizes):
    """All blocks, by direct messages."""
    rank = dist.get_rank()
    blocks = [x.new_empty(size, *x.shape[1:]) for size in sizes]
    works = [dist.irecv(block, r) for r, block in enumerate(blocks) if r != rank and len(block)]
    works += [dist.isend(x, r) for r in range(len(sizes)) if r != rank and len(x)]
    for work in works:
        work.wait()
    blocks[rank] = x
    return blocks


def block_of_the_sum(g, sizes):
    """Its adjoint."""
    rank, blocks = dist.get_rank(), [block.contiguous() for block in g.split(sizes)]
    parts = [torch.empty_like(blocks[rank]) for _ in sizes]
    works = [dist.irecv(part, r) for r, part in enumerate(parts) if r != rank and part.numel()]
    works += [dist.isend(b, r) for r, b in enumerate(blocks) if r != rank and b.numel()]
    for work in works:
        work.wait()
    parts[rank] = blocks[rank]
    return torch.stack(parts).sum(0)


def edges(to_left, to_right, ring=False):
    """What both neighbours send; zeros without a neighbour."""
    rank, n = place()
    came, works = [torch.zeros_like(to_left), torch.zeros_like(to_right)], []
    left, right = rank - 1, rank + 1
    if ring and n > 1:
        left, right = left % n, right % n
    for tag, (there, outgoing, incoming) in enumerate(
        ((left, to_left, came[0]), (right, to_right, came[1]))
    ):
        if 0 <= there < n and there != rank:
            works.append(dist.isend(outgoing.contiguous(), there, tag=tag))
            works.append(dist.irecv(incoming, there, tag=1 - tag))
    for work in works:
        work.wait()
    return came


def halos_around(x, width, sizes, ring=False):
    before, after = edges(x[:width], x[len(x) - width :], ring)
    return torch.cat([before, x, after])


def halos_added(g, width, sizes, ring=False):
    before, after = edges(g[:width], g[len(g) - width :], ring)
    gradient = g[width : len(g) - width].clone()
    gradient[:width] += before
    gradient[len(gradient) - width :] += after
    return gradient


def checked(sizes, width):
    if min(sizes) < width:
        raise ValueError("a block is too short")


# ---- 9d ----


# named: shifted the same way in backward
def shift__same_way_back_whole_gathered(x, k, dim):
    def backward(g, x, k, dim):
        rank, n = place()
        blocks = gathered(g, [len(g)] * n)
        return torch.roll(torch.cat(blocks, dim), k, dim).chunk(n, dim)[rank].contiguous()

    return function_of(to_the_right, backward)(x, k, dim)


# named: shifted the wrong way
def shift__to_the_left(x, k, dim):
    return function_of(to_the_left, lambda g, x, k, dim: to_the_right(g, k, dim))(x, k, dim)


# named: shifted within the block
def shift__within_the_block(x, k, dim):
    return torch.roll(x, k, dim)


# named: gradient of what was sent dropped
def shift__sent_without_gradient(x, k, dim):
    kept = x.narrow(dim, 0, x.shape[dim] - k)
    with torch.no_grad():
        came = to_the_right(x, k, dim).narrow(dim, 0, k).clone()
    return torch.cat([came, kept], dim)


# named: ends not joined
def shift__not_a_ring(x, k, dim):
    def line(outgoing, to, source):
        incoming, works = torch.zeros_like(outgoing), []
        if 0 <= to < dist.get_world_size() and outgoing.numel():
            works.append(dist.isend(outgoing, to))
        if 0 <= source < dist.get_world_size() and outgoing.numel():
            works.append(dist.irecv(incoming, source))
        for work in works:
            work.wait()
        return incoming

    def forward(x, k, dim):
        rank, length = dist.get_rank(), x.shape[dim]
        came = line(x.narrow(dim, length - k, k).contiguous(), rank + 1, rank - 1)
        return torch.cat([came, x.narrow(dim, 0, length - k)], dim)

    def backward(g, x, k, dim):
        rank, length = dist.get_rank(), x.shape[dim]
        came = line(g.narrow(dim, 0, k).contiguous(), rank - 1, rank + 1)
        return torch.cat([g.narrow(dim, k, length - k), came], dim)

    return function_of(forward, backward)(x, k, dim)


# named: autograd not told
def shift__no_function(x, k, dim):
    with torch.no_grad():
        return to_the_right(x, k, dim)


# named: result shares memory with its input
def shift__x_if_alone(x, k, dim):
    def forward(x, k, dim):
        if dist.get_world_size() == 1:
            return x.roll(k, dim)
        return to_the_right(x, k, dim) if k else x

    return function_of(forward, lambda g, x, k, dim: to_the_left(g, k, dim))(x, k, dim)


# ---- 9e ----


def filled_up(x, rows):
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


# named: padding not removed
def all_gather_uneven__padded_in_messages(x, sizes):
    def forward(x, sizes):
        same = [max(sizes)] * len(sizes)
        larger = torch.full((max(sizes), *x.shape[1:]), -1.0, dtype=x.dtype)
        larger[: len(x)] = x
        return torch.cat(gathered(larger, same))

    def backward(g, x, sizes):
        return block_of_the_sum(g, [max(sizes)] * len(sizes))[: len(x)].clone()

    return function_of(forward, backward)(x, sizes)


# named: blocks in the wrong order
def all_gather_uneven__own_first(x, sizes):
    def forward(x, sizes):
        rank, blocks = dist.get_rank(), gathered(x, sizes)
        return torch.cat(blocks[rank:] + blocks[:rank])

    return function_of(forward, lambda g, x, sizes: block_of_the_sum(g, sizes))(x, sizes)


# named: slice of the gradient without the sum
def all_gather_uneven__slice(x, sizes):
    def backward(g, x, sizes):
        return g.split(sizes)[dist.get_rank()].clone()

    return function_of(lambda x, sizes: torch.cat(gathered(x, sizes)), backward)(x, sizes)


# named: mean for sum
def all_gather_uneven__mean(x, sizes):
    def backward(g, x, sizes):
        return block_of_the_sum(g, sizes) / len(sizes)

    return function_of(lambda x, sizes: torch.cat(gathered(x, sizes)), backward)(x, sizes)


# named: gradient n times too large
def all_gather_uneven__n_times(x, sizes):
    def backward(g, x, sizes):
        return block_of_the_sum(g * dist.get_world_size(), sizes)

    return function_of(lambda x, sizes: torch.cat(gathered(x, sizes)), backward)(x, sizes)


# named: equal blocks assumed
def all_gather_uneven__equal_buffers(x, sizes):
    def forward(x, sizes):
        return torch.cat(gathered(x, [len(x)] * len(sizes)))

    return function_of(forward, lambda g, x, sizes: block_of_the_sum(g, sizes))(x, sizes)


# named: padding is sent
def all_gather_uneven__padding_sent(x, sizes):
    def forward(x, sizes):
        blocks = gathered(filled_up(x, max(sizes)), [max(sizes)] * len(sizes))
        return torch.cat([block[:size] for block, size in zip(blocks, sizes)])

    return function_of(forward, lambda g, x, sizes: block_of_the_sum(g, sizes))(x, sizes)


# named: all-reduce then slice
def all_gather_uneven__all_reduce_then_slice(x, sizes):
    def backward(g, x, sizes):
        total = torch.cat(gathered(block_of_the_sum(g, sizes), sizes))
        return total.split(sizes)[dist.get_rank()].clone()

    return function_of(lambda x, sizes: torch.cat(gathered(x, sizes)), backward)(x, sizes)


# ---- 9f ----


# named: halo gradient dropped
def halo_exchange__gathered_and_cut_back(x, width, sizes):
    checked(sizes, width)

    def forward(x, width, sizes):
        rank, zeros = dist.get_rank(), x.new_zeros(width, *x.shape[1:])
        whole = torch.cat([zeros, *gathered(x, sizes), zeros])
        start = sum(sizes[:rank])
        return whole[start : start + len(x) + 2 * width].clone()

    return function_of(forward, lambda g, x, width, sizes: g.narrow(0, width, len(x)).clone())(
        x, width, sizes
    )


# named: halo gradient overwrites
def halo_exchange__overwritten(x, width, sizes):
    checked(sizes, width)

    def backward(g, x, width, sizes):
        rank, n = place()
        before, after = edges(g[:width], g[len(g) - width :])
        gradient = g[width : len(g) - width].clone()
        if rank > 0:
            gradient[:width] = before
        if rank < n - 1:
            gradient[len(gradient) - width :] = after
        return gradient

    return function_of(halos_around, backward)(x, width, sizes)


# named: boundary wrapped
def halo_exchange__ring(x, width, sizes):
    checked(sizes, width)
    return function_of(
        lambda x, width, sizes: halos_around(x, width, sizes, ring=True),
        lambda g, x, width, sizes: halos_added(g, width, sizes, ring=True),
    )(x, width, sizes)


# named: other edge sent
def halo_exchange__far_edge(x, width, sizes):
    checked(sizes, width)

    def forward(x, width, sizes):
        before, after = edges(x[len(x) - width :], x[:width])
        return torch.cat([before, x, after])

    return function_of(forward, lambda g, x, width, sizes: halos_added(g, width, sizes))(
        x, width, sizes
    )


# named: only some ranks refuse
def halo_exchange__neighbours_only(x, width, sizes):
    rank = dist.get_rank()
    if min(sizes[max(rank - 1, 0) : rank + 2]) < width:
        raise ValueError("a block beside mine, or mine, is too short")
    return function_of(halos_around, lambda g, x, width, sizes: halos_added(g, width, sizes))(
        x, width, sizes
    )


# named: short block not refused
def halo_exchange__never_refused(x, width, sizes):
    return function_of(halos_around, lambda g, x, width, sizes: halos_added(g, width, sizes))(
        x, width, sizes
    )


# named: short block not refused
def halo_exchange__empty_only(x, width, sizes):
    if 0 in sizes:
        raise ValueError("a block is empty")
    return halo_exchange__never_refused(x, width, sizes)


# named: whole blocks sent
def halo_exchange__gathered(x, width, sizes):
    checked(sizes, width)

    def forward(x, width, sizes):
        start = sum(sizes[: dist.get_rank()])
        whole = torch.cat(gathered(x, sizes))
        whole = torch.nn.functional.pad(whole, (0, 0, width, width))
        return whole[start : start + len(x) + 2 * width].clone()

    def backward(g, x, width, sizes):
        start = sum(sizes[: dist.get_rank()])
        whole = g.new_zeros(sum(sizes) + 2 * width, g.shape[1])
        whole[start : start + len(g)] = g
        return block_of_the_sum(whole[width : len(whole) - width], sizes)

    return function_of(forward, backward)(x, width, sizes)


# named: incoming gradient overwritten
def halo_exchange__in_place(x, width, sizes):
    checked(sizes, width)

    def backward(g, x, width, sizes):
        before, after = edges(g[:width], g[len(g) - width :])
        gradient = g[width : len(g) - width]
        gradient[:width] += before
        gradient[len(gradient) - width :] += after
        return gradient

    return function_of(halos_around, backward)(x, width, sizes)
