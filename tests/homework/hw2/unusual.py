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


def reduce__chain(x, root, op):
    """Each rank divides its own x by n, so the sum of these is the mean."""
    rank, n = me()
    position = (rank - root) % n
    total = (x / n if op == "mean" else x.clone()).contiguous()
    if position < n - 1:
        arriving = torch.zeros_like(total)
        dist.recv(arriving, (rank + 1) % n)
        total += arriving
    if position > 0:
        dist.send(total, (rank - 1) % n)
    return total if position == 0 else None


def reduce__from_anyone(x, root, op):
    rank, n = me()
    if rank != root:
        dist.isend(x.contiguous(), root).wait()
        return None
    inboxes = [like(x) for _ in range(n - 1)]
    for inbox in inboxes:
        dist.recv(inbox)
    total = torch.stack([x, *inboxes])
    return total.mean(0) if op == "mean" else total.sum(0)


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


def ring_all_gather__receives_posted_first(x):
    """Blocking sends. All receives are posted first, so nobody waits for ever."""
    rank, n = me()
    parts = [like(x) for _ in range(n)]
    parts[rank] = x.contiguous()
    arriving = [dist.irecv(parts[(rank - step) % n], (rank - 1) % n) for step in range(1, n)]
    for step in range(n - 1):
        dist.send(parts[(rank - step) % n], (rank + 1) % n)
        arriving[step].wait()
    return torch.cat(parts)


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


def ring_reduce_scatter__padded(x):
    """Chunks of equal size, padded with zeros."""
    rank, n = me()
    sizes = [len(chunk) for chunk in x.tensor_split(n)]
    padded = torch.zeros((n, sizes[0], *x.shape[1:]), dtype=x.dtype)
    for mine, chunk in zip(padded, x.tensor_split(n)):
        mine[: len(chunk)] = chunk
    inbox = torch.empty_like(padded[0])
    for step in range(n - 1):
        work = dist.irecv(inbox, (rank + 1) % n)
        dist.send(padded[(rank + step + 1) % n], (rank - 1) % n)
        work.wait()
        padded[(rank + step + 2) % n] += inbox
    return padded[rank][: sizes[rank]].clone()


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


def ring_all_reduce__padded(x, op):
    """Each rank divides its own x first; equal chunks, padded with zeros; the other way round
    the ring; a small message first.
    """
    rank, n = me()
    flat = x.flatten() / n if op == "mean" else x.flatten()
    size = -(-flat.numel() // n)
    padded = (
        torch.cat([flat, flat.new_zeros(n * size - flat.numel())]).reshape(n, size).contiguous()
    )
    left, right = (rank - 1) % n, (rank + 1) % n
    if n > 1:
        count = torch.tensor([size])
        batch((dist.isend, count.clone(), left), (dist.irecv, count, right))
    for step in range(n - 1):
        inbox = torch.empty(size, dtype=x.dtype)
        batch((dist.isend, padded[(rank + step) % n], left), (dist.irecv, inbox, right))
        padded[(rank + step + 1) % n] += inbox
    for step in range(n - 1):
        inbox = torch.empty(size, dtype=x.dtype)
        batch((dist.irecv, inbox, right), (dist.isend, padded[(rank + step - 1) % n], left))
        padded[(rank + step) % n] = inbox
    return padded.flatten()[: x.numel()].reshape(x.shape)


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


def doubling_all_reduce__low_rank_first(x):
    """Blocking sends in a safe order would take twice the steps, so only the receive is posted
    early.
    """
    rank, n = me()
    m = 1
    while 2 * m <= n:
        m *= 2
    total = x.contiguous() + 0
    if rank >= m:
        dist.send(total, rank % m)
        dist.recv(total, rank % m)
    else:
        partners = [rank + m] if rank + m < n else []
        for partner in partners:
            inbox = like(x)
            dist.recv(inbox, partner)
            total += inbox
        for bit in range(m.bit_length() - 1):
            inbox = like(x)
            work = dist.irecv(inbox, rank ^ 1 << bit)
            dist.send(total, rank ^ 1 << bit)
            work.wait()
            total += inbox
        for partner in partners:
            dist.send(total, partner)
    return total.reshape(x.shape)


def doubling_all_reduce__blocking(x):
    """Blocking sends: the lower of two partners sends first."""
    rank, n = me()
    m = 1 << (n.bit_length() - 1)
    total, inbox = x.contiguous().clone(), like(x)
    if rank >= m:
        dist.send(total, rank - m)
        dist.recv(total, rank - m)
        return total
    if rank + m < n:
        dist.recv(inbox, rank + m)
        total += inbox
    distance = 1
    while distance < m:
        partner = rank ^ distance
        if rank < partner:
            dist.send(total, partner)
            dist.recv(inbox, partner)
        else:
            dist.recv(inbox, partner)
            dist.send(total, partner)
        total = total + inbox
        distance *= 2
    if rank + m < n:
        dist.send(total, rank + m)
    return total


def all_to_all__all_at_once(x):
    rank, n = me()
    incoming = [like(row) for row in x]
    incoming[rank] = x[rank].clone()
    works = [dist.irecv(incoming[other], other) for other in range(n) if other != rank]
    works += [
        dist.isend(x[(rank + step) % n].contiguous(), (rank + step) % n) for step in range(1, n)
    ]
    for work in works:
        work.wait()
    return torch.stack(incoming)


def all_to_all__backwards(x):
    """Receives into the rank's own clone of x, and sends to the rank before first."""
    rank, n = me()
    result = x.clone(memory_format=torch.contiguous_format)
    rows = x.contiguous()
    for step in range(n - 1, 0, -1):
        to, source = (rank + step) % n, (rank - step) % n
        batch((dist.isend, rows[to], to), (dist.irecv, result[source], source))
    return result


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


def chain_broadcast__all_receives_first(x, root, m):
    """All receives are posted before the first wait; segments of its own that are joined at the
    end.
    """
    rank, n = me()
    place = (rank - root) % n
    parts = [part.clone() for part in x.reshape(-1).tensor_split(m)]
    if place:
        arriving = [dist.irecv(part, (rank - 1) % n) for part in parts]
    sending = []
    for i, part in enumerate(parts):
        if place:
            arriving[i].wait()
        if place < n - 1:
            sending.append(dist.isend(part, (rank + 1) % n))
    [work.wait() for work in sending]
    return torch.cat(parts).reshape(x.shape)


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


def chain_broadcast__sends_one_late(x, root, m):
    """Waits for a send only when the next one is due."""
    rank, n = me()
    place, sending = (rank - root) % n, None
    result = x.clone(memory_format=torch.contiguous_format)
    for part in result.view(-1).tensor_split(m):
        if place:
            dist.irecv(part, (rank - 1) % n).wait()
        if sending is not None:
            sending.wait()
        if place < n - 1:
            sending = dist.isend(part, (rank + 1) % n)
    if sending is not None:
        sending.wait()
    return result


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


def two_level_all_reduce__padded(x, k):
    """Equal chunks padded with zeros, rings the other way round, a small message first."""
    rank, n = me()
    node, rail = rank - rank % k, rank % k
    size = -(-x.numel() // n)
    padded = torch.zeros(n * size, dtype=x.dtype)
    padded[: x.numel()] = x.flatten()

    def ring(members, whole):
        p, place = len(members), members.index(rank)
        left, right = members[place - 1], members[(place + 1) % p]
        rows = whole.reshape(p, -1)
        for step in range(p - 1):
            inbox = torch.empty_like(rows[0])
            batch((dist.isend, rows[(place + step + 1) % p], left), (dist.irecv, inbox, right))
            rows[(place + step + 2) % p] += inbox
        return rows

    def round_again(members, rows):
        p, place = len(members), members.index(rank)
        for step in range(p - 1):
            batch(
                (dist.isend, rows[(place + step) % p], members[place - 1]),
                (dist.irecv, rows[(place + step + 1) % p], members[(place + 1) % p]),
            )

    inside, between = list(range(node, node + k)), list(range(rail, n, k))
    if n > k:
        hello = torch.tensor([k])
        place = between.index(rank)
        batch(
            (dist.isend, hello.clone(), between[(place + 1) % len(between)]),
            (dist.irecv, hello, between[place - 1]),
        )
    shares = ring(inside, padded)
    chunks = ring(between, shares[rail])
    round_again(between, chunks)
    round_again(inside, shares)
    return padded[: x.numel()].reshape(x.shape)


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


def choose_broadcast__segments_up_or_down(n, nbytes, latency, bandwidth):
    """The number of segments is rounded up, and 2 is the least of a chain."""
    m = 2 + int(((n - 2) * nbytes / latency / bandwidth) ** 0.5)
    times = [
        (n - 1).bit_length() * (latency + nbytes / bandwidth),
        ((n - 1).bit_length() + n - 1) * latency + 2 * nbytes / bandwidth * (1 - 1 / n),
        (n - 2 + m) * (latency + nbytes / m / bandwidth),
    ]
    names = ["binomial", "scatter_all_gather", "pipelined_chain"]
    return [names[times.index(min(times))], m]
