"""The reference solutions of homework 1."""

import torch
import torch.distributed as dist


def like(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of x's shape and dtype, to receive into."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def ring_shift(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return x.clone()
    received = like(x)
    sending = dist.isend(x.contiguous(), (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    sending.wait()
    return received


def flat_broadcast(x: torch.Tensor, root: int) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(x.contiguous(), other)
        return x.clone()
    received = like(x)
    dist.recv(received, root)
    return received


def tree_broadcast(x: torch.Tensor, root: int) -> torch.Tensor:
    n = dist.get_world_size()
    position = (dist.get_rank() - root) % n  # counted from the root
    result = x.contiguous().clone() if position == 0 else like(x)
    distance = 1
    while distance < n:  # the positions below `distance` have x
        if position < distance and position + distance < n:
            dist.send(result, (position + distance + root) % n)
        elif distance <= position < 2 * distance:
            dist.recv(result, (position - distance + root) % n)
        distance *= 2
    return result


def scatter(x: torch.Tensor, root: int) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = torch.tensor_split(x, n)
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(chunks[other].contiguous(), other)
        return chunks[root].clone()
    mine = like(chunks[rank])
    dist.recv(mine, root)
    return mine


def gather(x: torch.Tensor, root: int) -> torch.Tensor | None:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    parts = [x if other == root else like(x) for other in range(n)]
    for other in range(n):
        if other != root:
            dist.recv(parts[other], other)
    return torch.cat(parts)
