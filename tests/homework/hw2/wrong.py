"""Wrong solutions of homework 2. A comment above each says what must be named.

None: it must name none.
"""

import torch
import torch.distributed as dist


def me():
    return dist.get_rank(), dist.get_world_size()


def like(x):
    return torch.empty(x.shape, dtype=x.dtype)


def exchange(outgoing, to, incoming, source):
    sending = dist.isend(outgoing.contiguous(), to)
    dist.recv(incoming, source)
    sending.wait()


def flat_sum(x, root):
    """The right sum on the root."""
    rank, n = me()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    total, inbox = x.contiguous().clone(), like(x)
    for other in range(n):
        if other != root:
            dist.recv(inbox, other)
            total += inbox
    return total


def flat_broadcast(x, root):
    rank, n = me()
    for other in range(n):
        if rank == root != other:
            dist.send(x, other)
    if rank != root:
        dist.recv(x, root)
    return x


def scattered_sum(chunks):
    """A right ring reduce-scatter of a list of chunks."""
    rank, n = me()
    partial = chunks[rank - 1].contiguous().clone()
    for step in range(1, n):
        mine = chunks[(rank - step - 1) % n]
        inbox = like(mine)
        exchange(partial, (rank + 1) % n, inbox, (rank - 1) % n)
        partial = inbox + mine
    return partial


def gathered(blocks):
    """A right ring all-gather: block `rank` is there, the others are written."""
    rank, n = me()
    for step in range(n - 1):
        exchange(
            blocks[(rank - step) % n], (rank + 1) % n, blocks[(rank - step - 1) % n], (rank - 1) % n
        )


# ---- ring all-gather ----


# named: gather then broadcast (5 points)
def ring_all_gather__gather_broadcast(x):
    rank, n = me()
    whole = torch.empty((n, *x.shape), dtype=x.dtype)
    whole[rank] = x
    if rank == 0:
        for other in range(1, n):
            dist.recv(whole[other], other)
    else:
        dist.send(x.contiguous(), 0)
    return flat_broadcast(whole, 0).flatten(0, 1)


# named: slot by step in place of origin
def ring_all_gather__slot_by_step_2(x):
    """Writes into slot `step`; the own x goes into its own slot, and may be overwritten."""
    rank, n = me()
    whole = torch.empty((n, *x.shape), dtype=x.dtype)
    whole[rank] = x
    passing = x.contiguous()
    for step in range(n - 1):
        inbox = like(x)
        exchange(passing, (rank + 1) % n, inbox, (rank - 1) % n)
        whole[step] = inbox
        passing = inbox
    return whole.flatten(0, 1)


# named: not a ring (7 points)
def ring_all_gather__direct(x):
    """To everyone at once: as many bytes and steps, but not round a ring."""
    rank, n = me()
    parts = [x.clone(memory_format=torch.contiguous_format) for _ in range(n)]
    works = []
    for step in range(1, n):
        works.append(dist.irecv(parts[(rank - step) % n], (rank - step) % n))
        works.append(dist.isend(parts[rank], (rank + step) % n))
    for work in works:
        work.wait()
    return torch.cat(parts, dim=0)


# named: one buffer in all slots
def ring_all_gather__one_buffer(x):
    rank, n = me()
    inbox, passing = like(x), x.contiguous()
    blocks = [inbox] * n
    blocks[rank] = passing
    for _ in range(n - 1):
        exchange(passing, (rank + 1) % n, inbox, (rank - 1) % n)
        passing = inbox.clone()
    return torch.cat(blocks)


# ---- ring reduce-scatter ----


# named: whole tensor round the ring
def ring_reduce_scatter__gathers_all(x):
    rank, n = me()
    total, passing = x.clone(), x.contiguous()
    for _ in range(n - 1):
        inbox = like(x)
        exchange(passing, (rank + 1) % n, inbox, (rank - 1) % n)
        total, passing = total + inbox, inbox
    return total.tensor_split(n)[rank].clone()


# named: all-reduce then slice (4 points)
def ring_reduce_scatter__all_reduce(x):
    rank, n = me()
    chunks = list(x.tensor_split(n))
    blocks = [like(chunk) for chunk in chunks]
    blocks[rank] = scattered_sum(chunks)
    gathered(blocks)
    return torch.cat(blocks).tensor_split(n)[rank].clone()


# named: reduce then scatter
def ring_reduce_scatter__one_rank(x):
    rank, n = me()
    total = flat_sum(x, 0)
    chunks = (like(x) if total is None else total).tensor_split(n)
    mine = chunks[rank].clone()
    if rank == 0:
        for other in range(1, n):
            dist.send(chunks[other].contiguous(), other)
    else:
        dist.recv(mine, 0)
    return mine


# ---- ring all-reduce ----


def ring(x, chunks=None, finish=lambda chunk: chunk):
    """A right ring all-reduce of a flat tensor."""
    rank, n = me()
    chunks = list(x.tensor_split(n)) if chunks is None else chunks
    blocks = [like(chunk) for chunk in chunks]
    blocks[rank] = finish(scattered_sum(chunks))
    gathered(blocks)
    return torch.cat(blocks)


# named: whole tensor round the ring
def ring_all_reduce__whole(x, op):
    """Passes every rank's x round the ring."""
    rank, n = me()
    total, passing = x.clone(), x.contiguous()
    for _ in range(n - 1):
        inbox = like(x)
        exchange(passing, (rank + 1) % n, inbox, (rank - 1) % n)
        total = total + inbox
        passing = inbox
    return total / n if op == "mean" else total


# named: remainder dropped
def ring_all_reduce__remainder(x, op):
    """Equal chunks; the rest keeps the rank's own values."""
    n = dist.get_world_size()
    result = x.flatten().clone()
    size = x.numel() // n
    if size:
        result[: n * size] = ring(result[: n * size], list(result[: n * size].split(size)))
    if op == "mean":
        result = result / n
    return result.reshape(x.shape)


# named: reduce then broadcast
def ring_all_reduce__reduce_broadcast(x, op):
    n = dist.get_world_size()
    total = flat_sum(x, 0)
    total = flat_broadcast(like(x) if total is None else total, 0)
    return total / n if op == "mean" else total


# named: counted twice
def ring_all_reduce__adds_sums(x, op):
    """The lesson's bug: in the second round finished chunks are added, not copied."""
    rank, n = me()
    chunks = [chunk.clone() for chunk in x.flatten().tensor_split(n)]
    for step in range(2 * (n - 1)):
        shift = step + 1 if step < n - 1 else step - (n - 1)
        inbox = like(chunks[(rank - shift - 1) % n])
        exchange(chunks[(rank - shift) % n], (rank + 1) % n, inbox, (rank - 1) % n)
        chunks[(rank - shift - 1) % n] += inbox
    total = torch.cat(chunks).reshape(x.shape)
    return total / n if op == "mean" else total


# named: changed while it is sent
def ring_all_reduce__changed_while_sent(x, op):
    """Adds to the chunk that is being sent."""
    rank, n = me()
    chunks = [chunk.clone() for chunk in x.flatten().tensor_split(n)]
    if n > 1:
        sending = []
        for step in range(1, n):
            inbox = like(chunks[(rank - step - 1) % n])
            sending.append(dist.isend(chunks[(rank - step) % n], (rank + 1) % n))
            dist.recv(inbox, (rank - 1) % n)
            chunks[(rank - step - 1) % n] += inbox
        gather_into = chunks[rank - 1]
        gather_into.zero_()
        [work.wait() for work in sending]
    gathered(chunks)
    total = torch.cat(chunks).reshape(x.shape)
    return total / n if op == "mean" else total


# named: whole tensor round the ring (10 points)
def ring_all_reduce__gather_then_sum(x, op):
    """Two ring all-gathers would be cheaper, but this one gathers whole tensors, then adds."""
    rank, n = me()
    blocks = [x.contiguous() if other == rank else like(x) for other in range(n)]
    gathered(blocks)
    total = torch.stack(blocks).sum(0)
    return total / n if op == "mean" else total


# named: everything to everyone
def ring_all_reduce__everyone(x, op):
    total = doubling_all_reduce__everyone(x)
    return total / dist.get_world_size() if op == "mean" else total


# ---- recursive doubling ----


# named: whole tensor round the ring
def doubling_all_reduce__whole_ring(x):
    return ring_all_reduce__whole(x, "sum")


# named: reduce then broadcast (5 points)
def doubling_all_reduce__two_trees(x):
    """A sum along a tree to rank 0, and a broadcast along the same tree."""
    rank, n = me()
    total, inbox, distance = x.contiguous().clone(), like(x), 1
    while distance < n and rank % distance == 0:
        if rank % (2 * distance):
            dist.send(total, rank - distance)
            dist.recv(total, rank - distance)
            break
        if rank + distance < n:
            dist.recv(inbox, rank + distance)
            total += inbox
        distance *= 2
    for step in reversed(range((n - 1).bit_length())):
        if 2**step < distance and rank + 2**step < n:
            dist.send(total, rank + 2**step)
    return total


# named: one extra rank only
def doubling_all_reduce__one_extra(x):
    """Only the last rank is taken in and given the result."""
    rank, n = me()
    m = 1 << (n.bit_length() - 1)
    total, inbox = x.contiguous().clone(), like(x)
    if rank == n - 1 >= m:
        dist.send(total, 0)
        dist.recv(total, 0)
        return total
    if rank == 0 and n > m:
        dist.recv(inbox, n - 1)
        total += inbox
    distance = 1
    while distance < m and rank < m:
        exchange(total, rank ^ distance, inbox, rank ^ distance)
        total += inbox
        distance *= 2
    if rank == 0 and n > m:
        dist.send(total, n - 1)
    return total


# named: changed while it is sent
def doubling_all_reduce__same_buffer(x):
    rank, n = me()
    total, distance = x.contiguous().clone(), 1
    while distance < n:
        if rank ^ distance < n:
            before = total.clone()
            sending = dist.isend(total, rank ^ distance)
            dist.recv(total, rank ^ distance)
            total += before
            sending.wait()
        distance *= 2
    return total


# named: ring in place of doubling (5 points)
def doubling_all_reduce__ring(x):
    return ring(x.flatten()).reshape(x.shape)


# named: everything to everyone (3 points)
def doubling_all_reduce__everyone(x):
    rank, n = me()
    inboxes = [like(x) for _ in range(n)]
    inboxes[rank] = x.contiguous()
    works = [dist.irecv(inboxes[other], other) for other in range(n) if other != rank]
    works += [dist.isend(inboxes[rank], (rank + step) % n) for step in range(1, n)]
    for work in works:
        work.wait()
    return torch.stack(inboxes).sum(0)


# ---- all-reduce over two levels ----


def rings(k):
    """The ranks of my node, and those of my rail."""
    rank, n = me()
    first = rank - rank % k
    return list(range(first, first + k)), list(range(rank % k, n, k))


def sum_round(ring, chunks):
    """A right reduce-scatter in a ring of ranks."""
    p, place = len(ring), ring.index(dist.get_rank())
    partial = chunks[(place - 1) % p].contiguous().clone()
    for step in range(1, p):
        mine = chunks[(place - step - 1) % p]
        inbox = like(mine)
        exchange(partial, ring[(place + 1) % p], inbox, ring[(place - 1) % p])
        partial = inbox + mine
    return partial


def copy_round(ring, chunks):
    """A right all-gather in a ring of ranks."""
    p, place = len(ring), ring.index(dist.get_rank())
    for step in range(p - 1):
        exchange(
            chunks[(place - step) % p],
            ring[(place + 1) % p],
            chunks[(place - step - 1) % p],
            ring[(place - 1) % p],
        )


def total_in(ring, flat):
    """A right all-reduce of a flat tensor in a ring of ranks."""
    chunks = flat.tensor_split(len(ring))
    blocks = [like(chunk) for chunk in chunks]
    blocks[ring.index(dist.get_rank())] = sum_round(ring, chunks)
    copy_round(ring, blocks)
    return torch.cat(blocks)


def leader_of_the_node(x, k, leader):
    """The leader adds up its node, the leaders all-reduce, and send the sum to their nodes."""
    rank, n = me()
    inside, _ = rings(k)
    first = inside[leader]
    total = x.contiguous().clone()
    if rank != first:
        dist.send(total, first)
        dist.recv(total, first)
        return total
    inbox = like(total)
    for other in inside:
        if other != first:
            dist.recv(inbox, other)
            total += inbox
    total = total_in(list(range(leader, n, k)), total.flatten()).reshape(x.shape)
    for other in inside:
        if other != first:
            dist.send(total, other)
    return total


# named: one rank talks for its node
def two_level_all_reduce__leaders(x, k):
    return leader_of_the_node(x, k, 0)


# named: everyone sends first
def doubling_all_reduce__sends_first(x):
    rank, n = me()
    total, inbox, distance = x.contiguous().clone(), like(x), 1
    while distance < n and rank ^ distance < n:
        dist.send(total, rank ^ distance)
        dist.recv(inbox, rank ^ distance)
        total += inbox
        distance *= 2
    return total
