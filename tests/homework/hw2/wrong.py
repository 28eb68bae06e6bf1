"""Wrong solutions of homework 2. EXPECTED: the misconception that the grader must name for each."""

import torch
import torch.distributed as dist

EXPECTED = {
    "reduce__divides_everywhere": "mean divides on every rank",
    "reduce__sum_for_mean": "sum for mean",
    "reduce__clobbers": "clobbers its input",
    "reduce__root_twice": "counted twice",
    "reduce__last_one_only": "ranks left out",
    "reduce__root_0": "root hard-coded to 0",
    "reduce__wait_forgotten": "receive's wait forgotten",
    "ring_all_gather__gather_broadcast": "gather then broadcast",
    "ring_all_gather__slot_by_step": "slot by step in place of origin",
    "ring_all_gather__slot_by_step_2": "slot by step in place of origin",
    "ring_all_gather__reversed": "joined in the wrong order",
    "ring_all_gather__own_every_time": "sends its own x every time",
    "ring_all_gather__sends_first": "everyone sends first",
    "ring_all_gather__wait_forgotten": "receive's wait forgotten",
    "ring_all_gather__thrown_away": "works thrown away",
    "ring_reduce_scatter__all_reduce": "all-reduce then slice",
    "ring_reduce_scatter__one_rank": "reduce then scatter",
    "ring_reduce_scatter__next_chunk": "owner off by one",
    "ring_reduce_scatter__in_place": "clobbers its input",
    "ring_reduce_scatter__copies": "ranks left out",
    "ring_reduce_scatter__wait_forgotten": "receive's wait forgotten",
    "ring_all_reduce__divided_twice": "scaled",
    "ring_all_reduce__by_four": "scaled",
    "ring_all_reduce__op_ignored": "scaled",
    "ring_all_reduce__sum_for_mean": "sum for mean",
    "ring_all_reduce__whole": "whole tensor round the ring",
    "ring_all_reduce__remainder": "remainder dropped",
    "ring_all_reduce__equal_chunks": "works only if n divides the size",
    "ring_all_reduce__reduce_broadcast": "reduce then broadcast",
    "ring_all_reduce__adds_sums": "counted twice",
    "ring_all_reduce__changed_while_sent": "changed while it is sent",
    "ring_all_reduce__in_place": "clobbers its input",
    "doubling_all_reduce__powers_of_two": "breaks at n = 3",
    "doubling_all_reduce__same_buffer": "changed while it is sent",
    "doubling_all_reduce__ring": "ring in place of doubling",
    "doubling_all_reduce__everyone": "everything to everyone",
    "doubling_all_reduce__sends_first": "everyone sends first",
    "all_to_all__not_transposed": "blocks not transposed",
    "all_to_all__by_step": "joined in the wrong order",
    "all_to_all__whole": "whole tensor shipped",
    "all_to_all__wait_forgotten": "receive's wait forgotten",
}


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


# ---- reduce ----


def reduce__divides_everywhere(x, root, op):
    n = dist.get_world_size()
    total = flat_sum(x / n if op == "mean" else x, root)
    return total if total is None or op == "sum" else total / n


def reduce__sum_for_mean(x, root, op):
    return flat_sum(x, root)


def reduce__clobbers(x, root, op):
    """Adds into x."""
    rank, n = me()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    inbox = like(x)
    for other in range(n):
        if other != root:
            dist.recv(inbox, other)
            x += inbox
    return x / n if op == "mean" else x


def reduce__root_twice(x, root, op):
    total = flat_sum(x, root)
    if total is None:
        return None
    total = total + x
    return total / (dist.get_world_size() + 1) if op == "mean" else total


def reduce__last_one_only(x, root, op):
    """Each receive overwrites the sum."""
    rank, n = me()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    total = like(x)
    for other in range(n):
        if other != root:
            dist.recv(total, other)
    if n == 1:
        return x.clone()
    total = total + x
    return total / n if op == "mean" else total


def reduce__root_0(x, root, op):
    total = flat_sum(x, 0)
    return total if total is None or op == "sum" else total / dist.get_world_size()


def reduce__wait_forgotten(x, root, op):
    rank, n = me()
    if rank != root:
        dist.send(x.contiguous(), root)
        return None
    inboxes = [like(x) for other in range(n) if other != root]
    for inbox, other in zip(inboxes, [other for other in range(n) if other != root]):
        dist.irecv(inbox, other)
    total = sum(inboxes, x)
    return total / n if op == "mean" else total


# ---- ring all-gather ----


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


def ring_all_gather__slot_by_step(x):
    """The own x first, then what comes, as it comes."""
    rank, n = me()
    parts = [x.contiguous()]
    for _ in range(n - 1):
        inbox = like(x)
        exchange(parts[-1], (rank + 1) % n, inbox, (rank - 1) % n)
        parts.append(inbox)
    return torch.cat(parts)


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


def ring_all_gather__reversed(x):
    rank, n = me()
    blocks = [x.contiguous() if other == rank else like(x) for other in range(n)]
    gathered(blocks)
    return torch.cat(blocks[::-1])


def ring_all_gather__own_every_time(x):
    rank, n = me()
    blocks = [x.contiguous() if other == rank else like(x) for other in range(n)]
    for step in range(n - 1):
        exchange(x, (rank + 1) % n, blocks[(rank - step - 1) % n], (rank - 1) % n)
    return torch.cat(blocks)


def ring_all_gather__sends_first(x):
    rank, n = me()
    blocks = [x.contiguous() if other == rank else like(x) for other in range(n)]
    for step in range(n - 1):
        dist.send(blocks[(rank - step) % n], (rank + 1) % n)
        dist.recv(blocks[(rank - step - 1) % n], (rank - 1) % n)
    return torch.cat(blocks)


def ring_all_gather__wait_forgotten(x):
    """Passes on what has not arrived."""
    rank, n = me()
    blocks = [x.contiguous() if other == rank else like(x) for other in range(n)]
    for step in range(n - 1):
        dist.irecv(blocks[(rank - step - 1) % n], (rank - 1) % n)
        dist.isend(blocks[(rank - step) % n], (rank + 1) % n).wait()
    return torch.cat(blocks)


def ring_all_gather__thrown_away(x):
    rank, n = me()
    parts = [like(x) for _ in range(n)]
    parts[rank] = x.contiguous()
    for other in range(n):
        if other != rank:
            dist.isend(parts[rank], other)
            dist.irecv(parts[other], other)
    return torch.cat(parts)


# ---- ring reduce-scatter ----


def ring_reduce_scatter__all_reduce(x):
    rank, n = me()
    chunks = list(x.tensor_split(n))
    blocks = [like(chunk) for chunk in chunks]
    blocks[rank] = scattered_sum(chunks)
    gathered(blocks)
    return torch.cat(blocks).tensor_split(n)[rank].clone()


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


def ring_reduce_scatter__next_chunk(x):
    """The textbook's loop that starts with the own chunk: rank r ends with chunk r + 1."""
    rank, n = me()
    chunks = [chunk.contiguous().clone() for chunk in x.tensor_split(n)]
    for step in range(n - 1):
        inbox = like(chunks[(rank - step - 1) % n])
        exchange(chunks[(rank - step) % n], (rank + 1) % n, inbox, (rank - 1) % n)
        chunks[(rank - step - 1) % n] += inbox
    return chunks[(rank + 1) % n]


def ring_reduce_scatter__in_place(x):
    rank, n = me()
    chunks = x.tensor_split(n)
    for step in range(1, n):
        inbox = like(chunks[(rank - step - 1) % n])
        exchange(chunks[(rank - step) % n], (rank + 1) % n, inbox, (rank - 1) % n)
        chunks[(rank - step - 1) % n].add_(inbox)
    return chunks[rank].clone()


def ring_reduce_scatter__copies(x):
    """Copies what arrives, and adds nothing."""
    rank, n = me()
    partial = x.tensor_split(n)[rank - 1].contiguous()
    for step in range(1, n):
        inbox = like(x.tensor_split(n)[(rank - step - 1) % n])
        exchange(partial, (rank + 1) % n, inbox, (rank - 1) % n)
        partial = inbox
    return partial.clone()


def ring_reduce_scatter__wait_forgotten(x):
    rank, n = me()
    chunks = [chunk.contiguous().clone() for chunk in x.tensor_split(n)]
    for step in range(1, n):
        inbox = torch.zeros_like(chunks[(rank - step - 1) % n])
        dist.irecv(inbox, (rank - 1) % n)
        dist.isend(chunks[(rank - step) % n], (rank + 1) % n).wait()
        chunks[(rank - step - 1) % n] += inbox
    return chunks[rank]


# ---- ring all-reduce ----


def ring(x, chunks=None, finish=lambda chunk: chunk):
    """A right ring all-reduce of a flat tensor."""
    rank, n = me()
    chunks = list(x.tensor_split(n)) if chunks is None else chunks
    blocks = [like(chunk) for chunk in chunks]
    blocks[rank] = finish(scattered_sum(chunks))
    gathered(blocks)
    return torch.cat(blocks)


def ring_all_reduce__divided_twice(x, op):
    n = dist.get_world_size()
    if op == "mean":
        return ring(x.flatten(), finish=lambda chunk: chunk / n).reshape(x.shape) / n
    return ring(x.flatten()).reshape(x.shape)


def ring_all_reduce__by_four(x, op):
    total = ring(x.flatten()).reshape(x.shape)
    return total / 4 if op == "mean" else total


def ring_all_reduce__op_ignored(x, op):
    """It divides the sum, too. Whole numbers cannot be divided in place: there it raises."""
    return ring(x.flatten()).reshape(x.shape).div_(dist.get_world_size())


def ring_all_reduce__sum_for_mean(x, op):
    return ring(x.reshape(-1)).reshape(x.shape)


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


def ring_all_reduce__equal_chunks(x, op):
    """view(n, -1) raises an exception if n doesn't divide the size."""
    n = dist.get_world_size()
    total = ring(x, list(x.flatten().view(n, -1))).reshape(x.shape)
    return total / n if op == "mean" else total


def ring_all_reduce__reduce_broadcast(x, op):
    n = dist.get_world_size()
    total = flat_sum(x, 0)
    total = flat_broadcast(like(x) if total is None else total, 0)
    return total / n if op == "mean" else total


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


def ring_all_reduce__in_place(x, op):
    n = dist.get_world_size()
    x.copy_(ring(x.flatten()).reshape(x.shape))
    if op == "mean":
        x /= n
    return x


# ---- recursive doubling ----


def doubling_all_reduce__powers_of_two(x):
    rank, n = me()
    total, inbox, distance = x.contiguous().clone(), like(x), 1
    while distance < n:
        exchange(total, rank ^ distance, inbox, rank ^ distance)
        total += inbox
        distance *= 2
    return total


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


def doubling_all_reduce__ring(x):
    return ring(x.flatten()).reshape(x.shape)


def doubling_all_reduce__everyone(x):
    rank, n = me()
    inboxes = [like(x) for _ in range(n)]
    inboxes[rank] = x.contiguous()
    works = [dist.irecv(inboxes[other], other) for other in range(n) if other != rank]
    works += [dist.isend(inboxes[rank], (rank + step) % n) for step in range(1, n)]
    for work in works:
        work.wait()
    return torch.stack(inboxes).sum(0)


def doubling_all_reduce__sends_first(x):
    rank, n = me()
    total, inbox, distance = x.contiguous().clone(), like(x), 1
    while distance < n and rank ^ distance < n:
        dist.send(total, rank ^ distance)
        dist.recv(inbox, rank ^ distance)
        total += inbox
        distance *= 2
    return total


# ---- all-to-all ----


def all_to_all__not_transposed(x):
    """Sends everyone its own row `rank`."""
    rank, n = me()
    result = x.contiguous().clone()
    for step in range(1, n):
        exchange(x[rank], (rank + step) % n, result[(rank - step) % n], (rank - step) % n)
    return result


def all_to_all__by_step(x):
    rank, n = me()
    rows = [x[rank]]
    for step in range(1, n):
        inbox = like(x[0])
        exchange(x[(rank + step) % n], (rank + step) % n, inbox, (rank - step) % n)
        rows.append(inbox)
    return torch.stack(rows)


def all_to_all__whole(x):
    rank, n = me()
    result, inbox = x.contiguous().clone(), like(x)
    for step in range(1, n):
        exchange(x, (rank + step) % n, inbox, (rank - step) % n)
        result[(rank - step) % n] = inbox[rank]
    result[rank] = x[rank]
    return result


def all_to_all__wait_forgotten(x):
    rank, n = me()
    result = like(x)
    result[rank] = x[rank]
    works = []
    for other in range(n):
        if other != rank:
            works.append(dist.isend(x[other].contiguous(), other))
            dist.irecv(result[other], other)
    for work in works:
        work.wait()
    return result
