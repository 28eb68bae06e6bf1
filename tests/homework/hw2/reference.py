"""The reference solutions of homework 2."""

import torch
import torch.distributed as dist


def like(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of x's shape and dtype, to receive into."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def exchange(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    """Send to one rank and receive from another, both at the same time."""
    sending = dist.isend(outgoing.contiguous(), to)
    dist.recv(incoming, source)
    sending.wait()


def reduce(x: torch.Tensor, root: int, op: str) -> torch.Tensor | None:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    total, arriving = x.clone(), like(x)
    for other in range(n):
        if other != root:
            dist.recv(arriving, other)
            total += arriving
    return total / n if op == "mean" else total


def ring_all_gather(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    blocks = [x.contiguous() if other == rank else like(x) for other in range(n)]
    gather_round_the_ring(blocks)
    return torch.cat(blocks)


def gather_round_the_ring(blocks: list[torch.Tensor]) -> None:
    """Rank r has block r, and gets the others: each step passes on the block that came last."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        exchange(
            blocks[(rank - step) % n], (rank + 1) % n, blocks[(rank - step - 1) % n], (rank - 1) % n
        )


def ring_reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = torch.tensor_split(x, n)
    partial = chunks[(rank - 1) % n].clone()
    # the sum of a chunk starts at the rank after its owner, and arrives at the owner last
    for step in range(1, n):
        mine = chunks[(rank - step - 1) % n]
        arriving = like(mine)
        exchange(partial, (rank + 1) % n, arriving, (rank - 1) % n)
        partial = arriving + mine
    return partial


def ring_all_reduce(x: torch.Tensor, op: str) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = x.flatten()
    mine = ring_reduce_scatter(flat)
    if op == "mean":
        mine = mine / n
    total = like(flat)
    blocks = list(torch.tensor_split(total, n))
    blocks[rank].copy_(mine)
    gather_round_the_ring(blocks)
    return total.view(x.shape)


def doubling_all_reduce(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    m = 1 << (n.bit_length() - 1)  # the largest power of two up to n
    total, arriving = x.contiguous().clone(), like(x)
    if rank >= m:
        dist.send(total, rank - m)
        dist.recv(total, rank - m)
        return total
    if rank + m < n:
        dist.recv(arriving, rank + m)
        total += arriving
    distance = 1
    while distance < m:
        exchange(total, rank ^ distance, arriving, rank ^ distance)
        total += arriving
        distance *= 2
    if rank + m < n:
        dist.send(total, rank + m)
    return total


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    result = like(x)
    result[rank] = x[rank]
    for step in range(1, n):
        to, source = (rank + step) % n, (rank - step) % n
        exchange(x[to], to, result[source], source)
    return result
