"""Wrong solutions of homework 1. EXPECTED: the misconception that the grader must name for each."""

import torch
import torch.distributed as dist

EXPECTED = {
    "ring_shift__sends_first": "everyone sends first",
    "ring_shift__receives_first": "everyone receives first",
    "ring_shift__wait_forgotten": "receive's wait forgotten",
    "ring_shift__thrown_away": "works thrown away",
    "ring_shift__send_wait_forgotten": "send's wait forgotten",
    "ring_shift__one_buffer": "changed while it is sent",
    "ring_shift__backwards": "shifted the wrong way",
    "ring_shift__into_x": "clobbers its input",
    "flat_broadcast__root_0": "root hard-coded to 0",
    "flat_broadcast__into_x": "clobbers its input",
    "flat_broadcast__wait_forgotten": "receive's wait forgotten",
    "tree_broadcast__root_0": "root hard-coded to 0",
    "tree_broadcast__powers_of_two": "non-power-of-two loses ranks",
    "tree_broadcast__powers_of_two_2": "non-power-of-two loses ranks",
    "tree_broadcast__flat": "flat in place of a tree",
    "tree_broadcast__chain": "chain in place of a tree",
    "tree_broadcast__heap": "ranks stop sending",
    "tree_broadcast__sends_what_it_has_not": "sends what was never written",
    "scatter__chunk": "chunk in place of tensor_split",
    "scatter__whole": "whole tensor shipped",
    "scatter__root_0": "root hard-coded to 0",
    "scatter__next_chunk": "chunks in the wrong order",
    "scatter__thrown_away": "works thrown away",
    "gather__arrival_order": "arrival order kept in place of rank order",
    "gather__returns_x_elsewhere": "other ranks return something",
    "gather__whole": "whole tensor shipped",
    "gather__everyone": "everyone gathers",
    "gather__wait_forgotten": "receive's wait forgotten",
}


POINTS = {
    "tree_broadcast__heap": 5,
    "tree_broadcast__flat": 3,
    "tree_broadcast__chain": 5,
    "scatter__whole": 6,
    "gather__whole": 6,
}


def me():
    return dist.get_rank(), dist.get_world_size()


def neighbours():
    rank, n = me()
    return (rank + 1) % n, (rank - 1) % n


def like(x):
    return torch.empty(x.shape, dtype=x.dtype)


# ---- ring shift ----


def ring_shift__sends_first(x):
    after, before = neighbours()
    received = like(x)
    dist.send(x.contiguous(), after)
    dist.recv(received, before)
    return received


def ring_shift__receives_first(x):
    after, before = neighbours()
    if after == dist.get_rank():
        return x.clone()
    received = like(x)
    dist.recv(received, before)
    dist.send(x.contiguous(), after)
    return received


def ring_shift__wait_forgotten(x):
    after, before = neighbours()
    received = like(x)
    dist.irecv(received, before)
    dist.isend(x.contiguous(), after).wait()
    return received


def ring_shift__thrown_away(x):
    after, before = neighbours()
    received = like(x)
    dist.isend(x.contiguous(), after)
    dist.irecv(received, before)
    return received


def ring_shift__send_wait_forgotten(x):
    after, before = neighbours()
    if after == dist.get_rank():
        return x.clone()
    received = like(x)
    dist.isend(x.contiguous(), after)
    dist.recv(received, before)
    return received


def ring_shift__one_buffer(x):
    after, before = neighbours()
    buffer = x.contiguous().clone()
    if after == dist.get_rank():
        return buffer
    sending = dist.isend(buffer, after)
    dist.recv(buffer, before)
    sending.wait()
    return buffer


def ring_shift__backwards(x):
    before, after = neighbours()
    if after == dist.get_rank():
        return x.clone()
    received = like(x)
    sending = dist.isend(x.contiguous(), after)
    dist.recv(received, before)
    sending.wait()
    return received


def ring_shift__into_x(x):
    after, before = neighbours()
    if after == dist.get_rank():
        return x
    sending = dist.isend(x.contiguous().clone(), after)
    received = like(x)
    dist.recv(received, before)
    sending.wait()
    x.copy_(received)
    return x


# ---- broadcast ----


def flat_broadcast__root_0(x, root):
    rank, n = me()
    result = x.contiguous().clone()
    if rank == 0:
        for other in range(1, n):
            dist.send(result, other)
    else:
        dist.recv(result, 0)
    return result


def flat_broadcast__into_x(x, root):
    """On the ranks that receive, x is the buffer."""
    rank, n = me()
    buffer = like(x)
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(x.contiguous(), other)
    else:
        dist.recv(buffer, root)
        x.copy_(buffer)
    return x


def flat_broadcast__wait_forgotten(x, root):
    rank, n = me()
    if rank == root:
        for other in range(n):
            if other != root:
                dist.isend(x.contiguous(), other).wait()
        return x.clone()
    received = like(x)
    dist.irecv(received, root)
    return received


def tree_broadcast__root_0(x, root):
    rank, n = me()
    result, distance = x.contiguous().clone(), 1
    while distance < n:
        if rank < distance and rank + distance < n:
            dist.send(result, rank + distance)
        elif distance <= rank < 2 * distance:
            dist.recv(result, rank - distance)
        distance *= 2
    return result


def tree_broadcast__powers_of_two(x, root):
    """Only ⌊log₂ n⌋ steps."""
    rank, n = me()
    position = (rank - root) % n
    result = x.contiguous().clone() if position == 0 else like(x)
    for step in range(n.bit_length() - 1):
        distance = 2**step
        if position < distance:
            dist.send(result, (rank + distance) % n)
        elif position < 2 * distance:
            dist.recv(result, (rank - distance) % n)
    return result


def tree_broadcast__powers_of_two_2(x, root):
    """Sends to positions that do not exist."""
    rank, n = me()
    position = (rank - root) % n
    result = x.contiguous().clone() if position == 0 else like(x)
    distance = 1
    while distance < n:
        if position < distance:
            dist.send(result, (position + distance + root) % n)
        elif position < 2 * distance:
            dist.recv(result, (position - distance + root) % n)
        distance <<= 1
    return result


def tree_broadcast__flat(x, root):
    rank, n = me()
    result = x.contiguous().clone()
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(result, other)
    else:
        dist.recv(result, root)
    return result


def tree_broadcast__chain(x, root):
    rank, n = me()
    position = (rank - root) % n
    result = x.contiguous().clone()
    if position > 0:
        dist.recv(result, (rank - 1) % n)
    if position < n - 1:
        dist.send(result, (rank + 1) % n)
    return result


def tree_broadcast__heap(x, root):
    """Rank p sends to 2p + 1 and 2p + 2. Up to n = 6 that takes no longer."""
    rank, n = me()
    position = (rank - root) % n
    result = x.contiguous().clone()
    if position:
        dist.recv(result, ((position - 1) // 2 + root) % n)
    for child in (2 * position + 1, 2 * position + 2):
        if child < n:
            dist.send(result, (child + root) % n)
    return result


def tree_broadcast__sends_what_it_has_not(x, root):
    """The root copies x too late: the others get what torch.empty gave."""
    rank, n = me()
    position = (rank - root) % n
    result, distance = like(x), 1
    while distance < n:
        if position < distance and position + distance < n:
            dist.send(result, (position + distance + root) % n)
        elif distance <= position < 2 * distance:
            dist.recv(result, (position - distance + root) % n)
        distance *= 2
    return x.clone() if rank == root else result


# ---- scatter ----


def scatter__chunk(x, root):
    rank, n = me()
    chunks = x.chunk(n)
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(chunks[other].contiguous(), other)
        return chunks[root].clone()
    mine = like(chunks[rank])
    dist.recv(mine, root)
    return mine


def scatter__whole(x, root):
    rank, n = me()
    whole = x.contiguous().clone()
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(whole, other)
    else:
        dist.recv(whole, root)
    return torch.tensor_split(whole, n)[rank].clone()


def scatter__root_0(x, root):
    rank, n = me()
    chunks = torch.tensor_split(x, n)
    mine = chunks[rank].contiguous().clone()
    if rank == 0:
        for other in range(1, n):
            dist.send(chunks[other].contiguous(), other)
    else:
        dist.recv(mine, 0)
    return mine


def scatter__next_chunk(x, root):
    """Deals the chunks out in the order of the loop: the first to the root, the others to the
    others.
    """
    rank, n = me()
    chunks = torch.tensor_split(x, n)
    order = [root] + [other for other in range(n) if other != root]
    mine = like(chunks[order.index(rank)])
    if rank == root:
        for chunk, other in list(zip(chunks, order))[1:]:
            dist.send(chunk.contiguous(), other)
        return chunks[0].clone()
    dist.recv(mine, root)
    return mine


def scatter__thrown_away(x, root):
    rank, n = me()
    chunks = torch.tensor_split(x, n)
    if rank == root:
        for other in range(n):
            if other != root:
                dist.isend(chunks[other].contiguous(), other)
        return chunks[rank].clone()
    mine = like(chunks[rank])
    dist.irecv(mine, root)
    return mine


# ---- gather ----


def gather__arrival_order(x, root):
    rank, n = me()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    parts = [x]
    for _ in range(n - 1):
        parts.append(like(x))
        dist.recv(parts[-1])
    return torch.cat(parts)


def gather__returns_x_elsewhere(x, root):
    rank, n = me()
    if rank != root:
        dist.send(x.contiguous(), root)
        return x
    parts = [x if other == root else like(x) for other in range(n)]
    for other in range(n):
        if other != root:
            dist.recv(parts[other], other)
    return torch.cat(parts)


def gather__whole(x, root):
    rank, n = me()
    whole = torch.zeros((n, *x.shape), dtype=x.dtype)
    whole[rank] = x
    if rank != root:
        dist.send(whole, root)
        return None
    for other in range(n):
        if other != root:
            inbox = torch.empty_like(whole)
            dist.recv(inbox, other)
            whole[other] = inbox[other]
    return whole.flatten(0, 1)


def gather__everyone(x, root):
    rank, n = me()
    parts = [like(x) for _ in range(n)]
    parts[rank] = x.contiguous()
    works = [dist.isend(parts[rank], other) for other in range(n) if other != rank]
    works += [dist.irecv(parts[other], other) for other in range(n) if other != rank]
    for work in works:
        work.wait()
    return torch.cat(parts) if rank == root else None


def gather__wait_forgotten(x, root):
    rank, n = me()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    parts = [like(x) for _ in range(n)]
    parts[rank] = x
    works = [dist.irecv(parts[other], other) for other in range(n) if other != root]
    for work in works[:-1]:
        work.wait()
    return torch.cat(parts)
