"""Wrong solutions of homework 3. EXPECTED: the misconception that the grader must name for each."""

import torch
import torch.distributed as dist

EXPECTED = {
    "broadcast_backward__all_reduce": "all-reduce as the adjoint of everything",
    "broadcast_backward__reduce_only": "gradient where x was not used",
    "broadcast_backward__own": "gradient without the other ranks",
    "broadcast_backward__root_zero": "root hard-coded to 0",
    "reduce_backward__all_reduce": "all-reduce as the adjoint of everything",
    "reduce_backward__n_times": "gradient n times too large",
    "reduce_backward__only_root": "gradient without the other ranks",
    "scatter_backward__all_reduce": "all-reduce as the adjoint of everything",
    "gather_backward__all_reduce": "all-reduce as the adjoint of everything",
    "all_gather_backward__slice": "slice of the gradient without the sum",
    "all_gather_backward__all_reduce": "all-reduce as the adjoint of everything",
    "all_gather_backward__all_reduce_then_slice": "all-reduce then slice",
    "all_gather_backward__mean": "mean for sum",
    "reduce_scatter_backward__n_times": "gradient n times too large",
    "reduce_scatter_backward__all_reduce": "all-reduce as the adjoint of everything",
    "reduce_scatter_backward__own": "gradient without the other ranks",
    "all_reduce_backward__own": "gradient without the other ranks",
    "all_reduce_backward__n_times": "gradient n times too large",
    "all_reduce_backward__in_place": "incoming gradient overwritten",
    "all_reduce_backward__not_waited": "collective's wait forgotten",
    "all_to_all_backward__all_reduce": "all-reduce as the adjoint of everything",
    "all_to_all_backward__own": "gradient without the other ranks",
}


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


def broadcast_backward__all_reduce(x, g, root):
    return summed(g)


def broadcast_backward__reduce_only(x, g, root):
    total = g.clone()
    dist.reduce(total, root)
    return total


def broadcast_backward__own(x, g, root):
    return g.clone() if dist.get_rank() == root else torch.zeros_like(x)


def broadcast_backward__root_zero(x, g, root):
    total = g.clone()
    dist.reduce(total, 0)
    return total if dist.get_rank() == 0 else torch.zeros_like(x)


def reduce_backward__all_reduce(x, g, root):
    return summed(torch.zeros_like(x) if g is None else g)


def reduce_backward__n_times(x, g, root):
    gradient = torch.empty_like(x) if g is None else g * dist.get_world_size()
    dist.broadcast(gradient, root)
    return gradient


def reduce_backward__only_root(x, g, root):
    return torch.zeros_like(x) if g is None else g.clone()


def scatter_backward__all_reduce(x, g, root):
    whole = torch.zeros(dist.get_world_size(), *g.shape, dtype=g.dtype)
    whole[dist.get_rank()] = g
    dist.all_reduce(whole)
    return whole.flatten(0, 1) if dist.get_rank() == root else None


def gather_backward__all_reduce(x, g, root):
    n = dist.get_world_size()
    return mine(summed(torch.zeros(n * len(x), *x.shape[1:], dtype=x.dtype) if g is None else g))


def all_gather_backward__slice(x, g):
    return mine(g)


def all_gather_backward__all_reduce(x, g):
    return summed(g)


def all_gather_backward__all_reduce_then_slice(x, g):
    return mine(summed(g))


def all_gather_backward__mean(x, g):
    gradient = torch.empty_like(x)
    dist.reduce_scatter_tensor(gradient, g)
    return gradient / dist.get_world_size()


def reduce_scatter_backward__n_times(x, g):
    gradient = torch.empty_like(x)
    dist.all_gather_into_tensor(gradient, g)
    return gradient * dist.get_world_size()


def reduce_scatter_backward__all_reduce(x, g):
    return summed(in_its_place(x, g))


def reduce_scatter_backward__own(x, g):
    return in_its_place(x, g)


def all_reduce_backward__own(x, g):
    return g.clone()


def all_reduce_backward__n_times(x, g):
    return summed(g * dist.get_world_size())


def all_reduce_backward__in_place(x, g):
    dist.all_reduce(g)
    return g


def all_reduce_backward__not_waited(x, g):
    total = g.clone()
    dist.all_reduce(total, async_op=True)
    return total


def all_to_all_backward__all_reduce(x, g):
    return summed(g)


def all_to_all_backward__own(x, g):
    return g.clone()
