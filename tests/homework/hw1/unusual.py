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


def ring_shift__polls(x):
    rank, n = me()
    received = x.clone().contiguous()
    if n > 1:
        works = [
            dist.isend(x.clone().contiguous(), (rank + 1) % n, tag=5),
            dist.irecv(received, (rank - 1) % n, tag=5),
        ]
        while not all(work.is_completed() for work in works):
            pass
    return received


def ring_shift__in_two_halves(x):
    """Two messages, under way at the same time in one link's turns: that would be two steps, so
    both halves are joined to one message.
    """
    rank, n = me()
    if n == 1:
        return x.clone()
    packed = torch.cat([half.reshape(-1) for half in x.tensor_split(2)])
    received = torch.empty_like(packed)
    receiving = dist.irecv(received, (rank - 1) % n)
    dist.isend(packed, (rank + 1) % n).wait()
    receiving.wait()
    return received.reshape(x.shape)


def flat_broadcast__all_at_once(x, root):
    rank, n = me()
    if rank == root:
        data = x.contiguous()
        for work in [dist.isend(data, other) for other in reversed(range(n)) if other != root]:
            work.wait()
        return x.clone()
    received = torch.empty(x.shape, dtype=x.dtype)
    dist.irecv(received, root).wait()
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


def tree_broadcast__halves_recursively(x, root):
    rank, n = me()
    result = (
        x.clone(memory_format=torch.contiguous_format)
        if rank == root
        else torch.empty(x.shape, dtype=x.dtype)
    )

    def spread(ranks):
        if len(ranks) > 1:
            middle = (len(ranks) + 1) // 2
            if rank == ranks[0]:
                dist.send(result, ranks[middle])
            elif rank == ranks[middle]:
                dist.recv(result, ranks[0])
            spread(ranks[:middle] if rank in ranks[:middle] else ranks[middle:])

    spread([root] + [other for other in range(n) if other != root])
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


def scatter__nothing_to_say_no_message(x, root):
    """Empty chunks are not sent."""
    rank, n = me()
    mine = x.tensor_split(n)[rank].clone().contiguous()
    if rank == root:
        for other, chunk in enumerate(x.tensor_split(n)):
            if other != root and chunk.numel():
                dist.send(chunk.contiguous(), other)
    elif mine.numel():
        dist.recv(mine, src=root)
    return mine


def scatter__along_a_chain(x, root):
    """Each rank passes on what the ranks after it need. No rank sends more than the root."""
    rank, n = me()
    position = (rank - root) % n
    chunks = [x.tensor_split(n)[(root + p) % n] for p in range(position, n)]
    packed = torch.cat([chunk.reshape(-1) for chunk in chunks]) if chunks else x.new_empty(0)
    if position > 0:
        packed = torch.empty_like(packed)
        dist.recv(packed, (rank - 1) % n)
    count = chunks[0].numel()
    if position < n - 1:
        dist.send(packed[count:], (rank + 1) % n)
    return packed[:count].reshape(chunks[0].shape).clone()


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


def gather__into_one_tensor(x, root):
    rank, n = me()
    if rank == root:
        whole = torch.empty((n, *x.shape), dtype=x.dtype)
        whole[rank] = x
        for work in [
            dist.irecv(whole[other], other) for other in range(n - 1, -1, -1) if other != root
        ]:
            work.wait()
        return whole.flatten(0, 1)
    dist.isend(x.contiguous(), root).wait()
    return None


def gather__along_a_chain(x, root):
    """Each rank adds its part to what the rank after it has sent."""
    rank, n = me()
    position = (rank - root) % n
    parts = torch.empty((n - position, *x.shape), dtype=x.dtype)
    parts[0] = x
    if position < n - 1:
        dist.recv(parts[1:], (rank + 1) % n)
    if position > 0:
        dist.send(parts, (rank - 1) % n)
        return None
    return parts.roll(root, 0).reshape(n * x.shape[0], *x.shape[1:])
