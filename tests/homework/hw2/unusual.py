"""Odd but correct solutions of homework 2: they keep full points."""

import torch
import torch.distributed as dist


def me():
    return dist.get_rank(), dist.get_world_size()


def like(x):
    return torch.empty(x.shape, dtype=x.dtype)


def batch(*calls):
    """Each call: isend or irecv, tensor, peer."""
    for work in dist.batch_isend_irecv([dist.P2POp(*call) for call in calls]):
        work.wait()


def reduce__tree(x, root, op):
    rank, n = me()
    position, total, distance = (rank - root) % n, x.clone(memory_format=torch.contiguous_format), 1
    while distance < n:
        if position % (2 * distance) == distance:
            dist.send(total, (rank - distance) % n)
            return None
        if position + distance < n:
            arriving = like(x)
            dist.recv(arriving, (rank + distance) % n)
            total = total + arriving
        distance *= 2
    return total / n if op == "mean" else total


def ring_all_gather__leftwards(x):
    """The other way round the ring, in one tensor, in batches."""
    rank, n = me()
    whole = torch.empty((n, *x.shape), dtype=x.dtype)
    whole[rank] = x
    for step in range(n - 1):
        batch(
            (dist.isend, whole[(rank + step) % n], (rank - 1) % n),
            (dist.irecv, whole[(rank + step + 1) % n], (rank + 1) % n),
        )
    return whole.reshape(n * x.shape[0], *x.shape[1:])


def ring_reduce_scatter__direct(x):
    rank, n = me()
    chunks = [chunk.contiguous() for chunk in x.tensor_split(n)]
    inboxes, works = [like(chunks[rank]) for _ in range(n - 1)], []
    for step in range(1, n):
        works += [
            dist.isend(chunks[(rank + step) % n], (rank + step) % n),
            dist.irecv(inboxes[step - 1], (rank - step) % n),
        ]
    for work in works:
        work.wait()
    return sum(inboxes, chunks[rank].clone())


def ring_all_reduce__direct(x, op):
    """Each rank adds up its own chunk, and sends the sum to all: no ring, but no more bytes or
    steps.
    """
    rank, n = me()
    flat = x.reshape(-1)
    mine = flat.tensor_split(n)[rank].clone()
    inboxes, works = [], []
    for step in range(1, n):
        inboxes.append(torch.empty_like(mine))
        works += [
            dist.irecv(inboxes[-1], (rank - step) % n),
            dist.isend(flat.tensor_split(n)[(rank + step) % n].contiguous(), (rank + step) % n),
        ]
    [work.wait() for work in works]
    for inbox in inboxes:
        mine += inbox
    if op == "mean":
        mine /= n
    result = torch.empty(x.numel(), dtype=x.dtype)
    blocks = result.tensor_split(n)
    blocks[rank].copy_(mine)
    for step in range(1, n):
        batch(
            (dist.irecv, blocks[(rank - step) % n], (rank - step) % n),
            (dist.isend, mine, (rank + step) % n),
        )
    return result.reshape(x.shape)


def doubling_all_reduce__far_first(x):
    """From the largest distance to the smallest; the ranks above give to the last ranks below."""
    rank, n = me()
    m = 2 ** (len(bin(n)) - 3)
    extra = n - m
    total = x.clone(memory_format=torch.contiguous_format)
    if rank >= m:
        partner = rank - extra
        dist.send(total, partner)
        inbox = like(total)
        dist.irecv(inbox, partner).wait()
        return inbox
    if rank >= m - extra:
        inbox = like(total)
        dist.recv(inbox, rank + extra)
        total += inbox
    distance = m // 2
    while distance:
        inbox = like(total)
        batch((dist.isend, total, rank ^ distance), (dist.irecv, inbox, rank ^ distance))
        total = total + inbox
        distance //= 2
    if rank >= m - extra:
        dist.send(total, rank + extra)
    return total


def all_to_all__all_in_one_batch(x):
    """Every rank posts its messages in the order of the ranks, so at first all of them want to
    send to rank 0.
    """
    rank, n = me()
    rows, result = x.contiguous(), x.clone(memory_format=torch.contiguous_format)
    others = [other for other in range(n) if other != rank]
    if others:
        batch(
            *((dist.isend, rows[other], other) for other in others),
            *((dist.irecv, result[other], other) for other in others),
        )
    return result


def chain_broadcast__batches(x, root, m):
    """Each batch receives a segment and sends the one before; the chain goes down the ranks."""
    rank, n = me()
    place = (root - rank) % n
    flat = x.flatten().clone()
    parts = flat.tensor_split(m)
    for i in range(m + 1):
        messages = []
        if place and i < m:
            messages.append((dist.irecv, parts[i], (rank + 1) % n))
        if place < n - 1 and i:
            messages.append((dist.isend, parts[i - 1], (rank - 1) % n))
        if messages:
            batch(*messages)
    return flat.reshape(x.shape)


def two_level_all_reduce__direct(x, k):
    """No rings: inside and between the nodes, each rank sends every other its part."""
    rank, n = me()
    first = rank - rank % k
    node, rail = [first + i for i in range(k)], [rank % k + k * i for i in range(n // k)]
    result = x.flatten().clone()
    share = result.tensor_split(k)[rank % k]
    chunk = share.tensor_split(n // k)[rank // k]

    def add(ranks, pieces, mine):
        """Adds up my piece of those of `ranks`."""
        inboxes, works = [], []
        for other, piece in zip(ranks, pieces):
            if other != rank:
                inboxes.append(torch.empty_like(mine))
                works += [dist.irecv(inboxes[-1], other), dist.isend(piece, other)]
        [work.wait() for work in works]
        return sum(inboxes, mine.clone())

    def collect(ranks, pieces, mine):
        works = []
        for other, piece in zip(ranks, pieces):
            if other != rank:
                works += [dist.irecv(piece, other), dist.isend(mine, other)]
        [work.wait() for work in works]

    share.copy_(add(node, result.tensor_split(k), share))
    chunk.copy_(add(rail, share.tensor_split(n // k), chunk))
    collect(rail, share.tensor_split(n // k), chunk)
    collect(node, result.tensor_split(k), share)
    return result.reshape(x.shape)


def choose_broadcast__tries_all_segments(n, nbytes, latency, bandwidth):
    """No formula for m: the best of many is taken. A tuple with text that is not a literal."""
    lg = (n - 1).bit_length()
    tries = [(lg * (latency + nbytes / bandwidth), "bino" + "mial", 1)]
    tries += [
        ((lg + n - 1) * latency + 2 * (n - 1) / n * nbytes / bandwidth, "scatter_all_gather", 7)
    ]
    tries += [
        ((n - 2 + m) * (latency + nbytes / m / bandwidth), "pipelined_chain", m)
        for m in range(1, 100)
    ]
    return min(tries)[1:]
