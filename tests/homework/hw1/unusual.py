"""Odd but correct solutions of homework 1: they keep full points."""

import torch
import torch.distributed as dist


def me():
    return dist.get_rank(), dist.get_world_size()


def ring_shift__batch(x):
    rank, n = me()
    if n == 1:
        return x.clone()
    received = torch.full(x.shape, 7, dtype=x.dtype)
    ops = [
        dist.P2POp(dist.irecv, received, (rank - 1) % n),
        dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % n),
    ]
    for work in reversed(dist.batch_isend_irecv(ops)):
        work.wait()
    return received


def flat_broadcast__tells_the_size_first(x, root):
    """An extra small message to each rank."""
    rank, n = me()
    size = torch.tensor([x.numel()], dtype=torch.int32)
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(size, other)
                dist.send(x.contiguous(), other)
        return x + 0
    dist.recv(size, root)
    received = torch.zeros(size.item(), dtype=x.dtype).reshape(x.shape)
    dist.recv(received, root)
    return received


def tree_broadcast__far_first(x, root):
    """The other way round: from the largest distance to the smallest."""
    rank, n = me()
    position = (rank - root) % n
    result = x.contiguous().clone() if rank == root else torch.empty(x.shape, dtype=x.dtype)
    distance = 1
    while distance < n:
        distance *= 2
    while distance > 1:
        half = distance // 2
        if position % distance == 0 and position + half < n:
            dist.send(result, (rank + half) % n)
        if position % distance == half:
            dist.recv(result, (rank - half) % n)
        distance = half
    return result


def scatter__all_at_once(x, root):
    rank, n = me()
    chunks = [chunk.contiguous() for chunk in x.tensor_split(n)]
    if rank == root:
        for work in [
            dist.isend(chunk, other) for other, chunk in enumerate(chunks) if other != root
        ][::-1]:
            work.wait()
    else:
        chunks[rank] = torch.empty_like(chunks[rank])
        dist.recv(chunks[rank], root)
    return chunks[rank].clone()


def gather__from_anyone(x, root):
    """Takes what comes first, and puts it in its rank's place."""
    rank, n = me()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    parts = {root: x}
    for _ in range(n - 1):
        inbox = torch.empty(x.shape, dtype=x.dtype)
        parts[dist.recv(inbox)] = inbox
    return torch.cat([parts[other] for other in sorted(parts)])
