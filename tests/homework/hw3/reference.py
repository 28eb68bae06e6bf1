"""Homework 3, solved: the adjoint of each collective is another collective."""

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
