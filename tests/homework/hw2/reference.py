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


def chain_broadcast(x: torch.Tensor, root: int, m: int) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    position = (rank - root) % n
    result = x.contiguous().clone()
    sending = []
    for segment in torch.tensor_split(result.view(-1), m):
        if position > 0:
            dist.recv(segment, (rank - 1) % n)
        if position < n - 1:
            sending.append(dist.isend(segment, (rank + 1) % n))
    for work in sending:
        work.wait()
    return result


def scatter_round(ring: list[int], chunks: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the chunk that has my place in this ring of ranks."""
    p, me = len(ring), ring.index(dist.get_rank())
    partial = chunks[(me - 1) % p].clone()
    for step in range(1, p):
        mine = chunks[(me - step - 1) % p]
        arriving = like(mine)
        exchange(partial, ring[(me + 1) % p], arriving, ring[(me - 1) % p])
        partial = arriving + mine
    return partial


def gather_round(ring: list[int], chunks: list[torch.Tensor]) -> None:
    """The chunk of my place is there, and the others are received."""
    p, me = len(ring), ring.index(dist.get_rank())
    for step in range(p - 1):
        exchange(
            chunks[(me - step) % p],
            ring[(me + 1) % p],
            chunks[(me - step - 1) % p],
            ring[(me - 1) % p],
        )


def two_level_all_reduce(x: torch.Tensor, k: int) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    first = rank - rank % k
    inside, rail = list(range(first, first + k)), list(range(rank % k, n, k))
    total = x.contiguous().clone()
    shares = list(torch.tensor_split(total.view(-1), k))
    mine = shares[rank % k]
    mine.copy_(scatter_round(inside, shares))
    chunks = list(torch.tensor_split(mine, n // k))
    chunks[rank // k].copy_(scatter_round(rail, chunks))
    gather_round(rail, chunks)
    gather_round(inside, shares)
    return total


def choose_broadcast(n: int, nbytes: int, latency: float, bandwidth: float) -> tuple[str, int]:
    lg = (n - 1).bit_length()
    m = max(1, round(((n - 2) * nbytes / (latency * bandwidth)) ** 0.5))
    seconds = {
        "binomial": lg * (latency + nbytes / bandwidth),
        "scatter_all_gather": (lg + n - 1) * latency + 2 * (n - 1) / n * nbytes / bandwidth,
        "pipelined_chain": (n - 2 + m) * (latency + nbytes / m / bandwidth),
    }
    return min(seconds, key=seconds.get), m
