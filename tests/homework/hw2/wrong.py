"""Wrong solutions of homework 2. EXPECTED: the misconception that the grader must name for each.

None: it must name none.
"""

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
    "reduce__returns_total_elsewhere": "other ranks return something",
    "reduce__does_not_load": None,
    "ring_all_gather__direct": "not a ring",
    "ring_all_gather__one_buffer": "one buffer in all slots",
    "ring_all_gather__one_buffer_at_once": "one buffer in all slots",
    "ring_all_gather__index_off_by_one": "sends what was never written",
    "ring_all_gather__n_rounds": None,
    "ring_reduce_scatter__gathers_all": "whole tensor round the ring",
    "ring_all_reduce__gather_then_sum": "whole tensor round the ring",
    "ring_all_reduce__everyone": "everything to everyone",
    "ring_all_reduce__rows": "chunks of rows",
    "doubling_all_reduce__two_trees": "reduce then broadcast",
    "doubling_all_reduce__whole_ring": "whole tensor round the ring",
    "doubling_all_reduce__one_extra": "one extra rank only",
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
    "chain_broadcast__by_turns": "sends and receives by turns",
    "chain_broadcast__waits_in_the_loop": "sends and receives by turns",
    "chain_broadcast__all_first": "passes on after the last segment",
    "chain_broadcast__two_loops": "passes on after the last segment",
    "chain_broadcast__one_message": "whole tensor in one message",
    "chain_broadcast__m_ignored": "whole tensor in one message",
    "chain_broadcast__flat": "flat in place of a chain",
    "chain_broadcast__flat_segments": "flat in place of a chain",
    "chain_broadcast__root_0": "root hard-coded to 0",
    "chain_broadcast__reversed": "segments in the wrong place",
    "chain_broadcast__prepended": "segments in the wrong place",
    "chain_broadcast__remainder": "remainder dropped",
    "chain_broadcast__equal_segments": "remainder dropped",
    "chain_broadcast__wait_forgotten": "receive's wait forgotten",
    "chain_broadcast__send_wait_forgotten": "send's wait forgotten",
    "chain_broadcast__clobbers": "clobbers its input",
    "two_level_all_reduce__flat_ring": "flat ring over all ranks",
    "two_level_all_reduce__flat_ring_other_way": "flat ring over all ranks",
    "two_level_all_reduce__leaders": "one rank talks for its node",
    "two_level_all_reduce__last_of_the_node": "one rank talks for its node",
    "two_level_all_reduce__inside_first": "whole tensor between nodes",
    "two_level_all_reduce__between_first": "whole tensor between nodes",
    "two_level_all_reduce__node_only": "sum of one node only",
    "two_level_all_reduce__leaves_one_node_out": "ranks left out",
    "two_level_all_reduce__adds_twice": "counted twice",
    "two_level_all_reduce__equal_chunks": "works only if n divides the size",
    "two_level_all_reduce__in_place": "clobbers its input",
    "two_level_all_reduce__sends_first": "everyone sends first",
    "choose_broadcast__always_a_tree": "always the same algorithm",
    "choose_broadcast__always_a_chain": "always the same algorithm",
    "choose_broadcast__no_latency": "always the same algorithm",
    "choose_broadcast__sizes": "chosen by size alone",
    "choose_broadcast__two_sizes": "chosen by size alone",
    "choose_broadcast__bits": "bits taken for bytes",
    "choose_broadcast__bits_2": "bits taken for bytes",
    "choose_broadcast__one_segment": "number of segments",
    "choose_broadcast__as_many_as_ranks": "number of segments",
    "choose_broadcast__root_forgotten": "number of segments",
}


POINTS = {
    "ring_all_gather__direct": 7,
    "ring_all_gather__gather_broadcast": 5,
    "ring_all_gather__n_rounds": 6,
    "ring_reduce_scatter__all_reduce": 4,
    "ring_all_reduce__gather_then_sum": 10,
    "ring_all_reduce__rows": 10,
    "doubling_all_reduce__ring": 5,
    "doubling_all_reduce__two_trees": 5,
    "doubling_all_reduce__everyone": 3,
    "chain_broadcast__by_turns": 5,
    "two_level_all_reduce__flat_ring": 5.5,
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


def reduce__returns_total_elsewhere(x, root, op):
    total = flat_sum(x, root)
    if total is None:
        return x.clone()
    return total / dist.get_world_size() if op == "mean" else total


def reduce__does_not_load(x, root, op):
    """Nothing is known of what it would do with a root."""
    if dist.get_world_size() > 0:
        raise ImportError("no module named numpy2")


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


def ring_all_gather__one_buffer(x):
    rank, n = me()
    inbox, passing = like(x), x.contiguous()
    blocks = [inbox] * n
    blocks[rank] = passing
    for _ in range(n - 1):
        exchange(passing, (rank + 1) % n, inbox, (rank - 1) % n)
        passing = inbox.clone()
    return torch.cat(blocks)


def ring_all_gather__one_buffer_at_once(x):
    """All receives are posted into views of one tensor, by mistake the same view."""
    rank, n = me()
    whole = torch.empty((n, *x.shape), dtype=x.dtype)
    slot, passing = like(x), x.contiguous()
    for _ in range(n - 1):
        exchange(passing, (rank - 1) % n, slot, (rank + 1) % n)
        passing = torch.clone(slot)
    whole[:] = slot
    whole[rank] = x
    return whole.flatten(0, 1)


def ring_all_gather__index_off_by_one(x):
    """Sends the block that is about to come."""
    rank, n = me()
    blocks = [x.clone().contiguous() if other == rank else like(x) for other in range(n)]
    for step in range(n - 1):
        arriving = blocks[(rank - step - 2) % n]
        exchange(blocks[(rank - step - 1) % n], (rank + 1) % n, arriving, (rank - 1) % n)
    return torch.cat(blocks)


def ring_all_gather__n_rounds(x):
    """One round too many: each rank gets its own x back."""
    rank, n = me()
    blocks = [x.contiguous().clone() if other == rank else like(x) for other in range(n)]
    for step in range(n if n > 1 else 0):
        outgoing = blocks[(rank - step) % n]
        exchange(outgoing, (rank + 1) % n, blocks[(rank - step - 1) % n], (rank - 1) % n)
    return torch.cat(blocks)


# ---- ring reduce-scatter ----


def ring_reduce_scatter__gathers_all(x):
    rank, n = me()
    total, passing = x.clone(), x.contiguous()
    for _ in range(n - 1):
        inbox = like(x)
        exchange(passing, (rank + 1) % n, inbox, (rank - 1) % n)
        total, passing = total + inbox, inbox
    return total.tensor_split(n)[rank].clone()


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


def ring_all_reduce__gather_then_sum(x, op):
    """Two ring all-gathers would be cheaper, but this one gathers whole tensors, then adds."""
    rank, n = me()
    blocks = [x.contiguous() if other == rank else like(x) for other in range(n)]
    gathered(blocks)
    total = torch.stack(blocks).sum(0)
    return total / n if op == "mean" else total


def ring_all_reduce__everyone(x, op):
    total = doubling_all_reduce__everyone(x)
    return total / dist.get_world_size() if op == "mean" else total


def ring_all_reduce__rows(x, op):
    """Chunks of rows, round the ring."""
    rank, n = me()
    blocks = [like(chunk) for chunk in x.tensor_split(n)]
    blocks[rank] = scattered_sum(x.tensor_split(n))
    if op == "mean":
        blocks[rank] /= n
    gathered(blocks)
    return torch.cat(blocks)


# ---- recursive doubling ----


def doubling_all_reduce__whole_ring(x):
    return ring_all_reduce__whole(x, "sum")


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


# ---- a broadcast along a chain ----


def neighbours(root):
    """My place in the chain, and the ranks before and after me."""
    rank, n = me()
    return (rank - root) % n, (rank - 1) % n, (rank + 1) % n


def chain_broadcast__by_turns(x, root, m):
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    result = x.contiguous().clone()
    for segment in result.view(-1).tensor_split(m):
        if place:
            dist.recv(segment, left)
        if place < n - 1:
            dist.send(segment, right)
    return result


def chain_broadcast__waits_in_the_loop(x, root, m):
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    parts = [part.clone() for part in x.flatten().tensor_split(m)]
    for part in parts:
        works = []
        if place:
            dist.irecv(part, left).wait()
        if place < n - 1:
            works.append(dist.isend(part, right))
        [work.wait() for work in works]
    return torch.cat(parts).reshape(x.shape)


def chain_broadcast__all_first(x, root, m):
    """All segments are received, then all are sent."""
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    result = x.contiguous().clone()
    segments = result.view(-1).tensor_split(m)
    if place:
        for work in [dist.irecv(segment, left) for segment in segments]:
            work.wait()
    if place < n - 1:
        for work in [dist.isend(segment, right) for segment in segments]:
            work.wait()
    return result


def chain_broadcast__two_loops(x, root, m):
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    segments = [segment.clone() for segment in x.reshape(-1).tensor_split(m)]
    for segment in segments:
        if place != 0:
            dist.recv(segment, left)
    for segment in segments:
        if place != n - 1:
            dist.send(segment, right)
    return torch.cat(segments).view(x.shape)


def chain_broadcast__one_message(x, root, m):
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    result = x.contiguous().clone()
    if place:
        dist.recv(result, left)
    if place < n - 1:
        dist.send(result, right)
    return result


def chain_broadcast__m_ignored(x, root, m):
    """Cuts segments only on the root, for its own use, and joins them before it sends."""
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    whole = torch.cat(x.flatten().tensor_split(m))
    if place:
        dist.irecv(whole, left).wait()
    if place < n - 1:
        dist.isend(whole, right).wait()
    return whole.reshape(x.shape)


def chain_broadcast__flat(x, root, m):
    return flat_broadcast(x.contiguous().clone(), root)


def chain_broadcast__flat_segments(x, root, m):
    rank, n = me()
    result = x.contiguous().clone()
    works = []
    for segment in result.view(-1).tensor_split(m):
        if rank == root:
            works += [dist.isend(segment, other) for other in range(n) if other != root]
        else:
            works.append(dist.irecv(segment, root))
    for work in works:
        work.wait()
    return result


def chained(segments, root, then=None):
    """A right chain over these segments, which are received into."""
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    works = []
    for segment in segments:
        if place:
            dist.recv(segment, left)
        if place < n - 1:
            works.append(dist.isend(segment, right))
    for work in works:
        work.wait()


def chain_broadcast__root_0(x, root, m):
    result = x.contiguous().clone()
    chained(result.view(-1).tensor_split(m), 0)
    return result


def chain_broadcast__reversed(x, root, m):
    """The segments are joined from the last to the first, but on the root."""
    parts = [part.clone() for part in x.flatten().tensor_split(m)]
    chained(parts, root)
    if dist.get_rank() != root:
        parts.reverse()
    return torch.cat(parts).reshape(x.shape)


def chain_broadcast__prepended(x, root, m):
    """What comes is put in front of what came before."""
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    if not place:
        chained([part.clone() for part in x.flatten().tensor_split(m)], root)
        return x.clone()
    result, works = x.new_empty(0), []
    for part in x.flatten().tensor_split(m):
        inbox = like(part)
        dist.recv(inbox, left)
        if place < n - 1:
            works.append(dist.isend(inbox, right))
        result = torch.cat([inbox, result])
    [work.wait() for work in works]
    return result.reshape(x.shape)


def chain_broadcast__remainder(x, root, m):
    """m segments of numel // m elements; the rest is not sent."""
    flat = x.flatten().clone()
    size = flat.numel() // m
    if dist.get_rank() != root:
        flat.zero_()
    chained([flat[i * size : (i + 1) * size] for i in range(m)], root)
    return flat.reshape(x.shape)


def chain_broadcast__equal_segments(x, root, m):
    """Makes a new tensor of m equal segments, which may be shorter than x."""
    size = x.numel() // m
    segments = list(x.flatten()[: m * size].clone().reshape(m, size))
    chained(segments, root)
    joined = torch.cat(segments)
    return joined.reshape(x.shape) if joined.numel() == x.numel() else joined


def chain_broadcast__wait_forgotten(x, root, m):
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    parts, works = [torch.zeros_like(part) for part in x.flatten().tensor_split(m)], []
    if not place:
        parts = [part.clone() for part in x.flatten().tensor_split(m)]
    for part in parts:
        if place:
            dist.irecv(part, left)
        if place < n - 1:
            works.append(dist.isend(part, right))
    [work.wait() for work in works]
    return torch.cat(parts).reshape(x.shape)


def chain_broadcast__send_wait_forgotten(x, root, m):
    n, (place, left, right) = dist.get_world_size(), neighbours(root)
    result = x.contiguous().clone()
    for segment in result.view(-1).tensor_split(m):
        if place:
            dist.recv(segment, left)
        if place < n - 1:
            dist.isend(segment, right)
    return result


def chain_broadcast__clobbers(x, root, m):
    """Receives into x; where x is strided, into a copy that is written back."""
    flat = x.contiguous()
    chained(flat.view(-1).tensor_split(m), root)
    x.copy_(flat)
    return x.clone()


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


def two_level_all_reduce__flat_ring(x, k):
    return total_in(list(range(dist.get_world_size())), x.flatten()).reshape(x.shape)


def two_level_all_reduce__flat_ring_other_way(x, k):
    ranks = list(range(dist.get_world_size()))[::-1]
    return total_in(ranks, x.reshape(-1).clone()).view(x.shape)


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


def two_level_all_reduce__leaders(x, k):
    return leader_of_the_node(x, k, 0)


def two_level_all_reduce__last_of_the_node(x, k):
    return leader_of_the_node(x, k, k - 1)


def two_level_all_reduce__inside_first(x, k):
    """An all-reduce inside, then every rank all-reduces the whole sum between the nodes."""
    inside, rail = rings(k)
    return total_in(rail, total_in(inside, x.flatten())).reshape(x.shape)


def two_level_all_reduce__between_first(x, k):
    """The two levels the other way round: the whole x is reduce-scattered between the nodes."""
    inside, rail = rings(k)
    blocks = [like(chunk) for chunk in x.flatten().tensor_split(len(rail))]
    place = rail.index(dist.get_rank())
    blocks[place] = total_in(inside, sum_round(rail, x.flatten().tensor_split(len(rail))))
    copy_round(rail, blocks)
    return torch.cat(blocks).reshape(x.shape)


def two_level_all_reduce__node_only(x, k):
    return total_in(rings(k)[0], x.flatten()).reshape(x.shape)


def two_levels(x, k, between):
    """Right, if `between` is: it takes the rail and my share, and returns the sum of the shares."""
    inside, rail = rings(k)
    shares = x.flatten().tensor_split(k)
    blocks = [like(share) for share in shares]
    blocks[dist.get_rank() % k] = between(rail, sum_round(inside, shares))
    copy_round(inside, blocks)
    return torch.cat(blocks).reshape(x.shape)


def two_level_all_reduce__leaves_one_node_out(x, k):
    """The loop over the other nodes ends one too early."""
    rank = dist.get_rank()

    def between(rail, mine):
        total, place, p = mine.clone(), rail.index(rank), len(rail)
        for step in range(1, p - 1 if p > 1 else 1):
            inbox = like(mine)
            exchange(mine, rail[(place + step) % p], inbox, rail[(place - step) % p])
            total += inbox
        return total

    return two_levels(x, k, between)


def two_level_all_reduce__adds_twice(x, k):
    """Between the nodes it adds what it has added already."""

    def between(rail, mine):
        total, place, p = mine.clone(), rail.index(dist.get_rank()), len(rail)
        for _ in range(p - 1):
            inbox = like(total)
            exchange(total, rail[(place + 1) % p], inbox, rail[(place - 1) % p])
            total = total + inbox + (mine if p == 2 else 0)
        return total

    return two_levels(x, k, between)


def two_level_all_reduce__equal_chunks(x, k):
    """Views of equal size: an error where they can't be made."""
    n = dist.get_world_size()
    x.reshape(k, n // k, -1)
    return two_levels(x, k, total_in)


def two_level_all_reduce__in_place(x, k):
    result = two_levels(x, k, total_in)
    x.copy_(result)
    return result


def two_level_all_reduce__sends_first(x, k):
    def between(rail, mine):
        total, place, p = mine.clone(), rail.index(dist.get_rank()), len(rail)
        passing = mine
        for _ in range(p - 1):
            inbox = like(mine)
            dist.send(passing, rail[(place + 1) % p])
            dist.recv(inbox, rail[(place - 1) % p])
            total, passing = total + inbox, inbox
        return total

    return two_levels(x, k, between)


# ---- choose an algorithm ----


def costs(n, nbytes, latency, bandwidth, m):
    lg = (n - 1).bit_length()
    return {
        "binomial": lg * (latency + nbytes / bandwidth),
        "scatter_all_gather": (lg + n - 1) * latency + 2 * (n - 1) / n * nbytes / bandwidth,
        "pipelined_chain": (n - 2 + m) * (latency + nbytes / m / bandwidth),
    }


def root_of(number):
    return max(1, round(number**0.5))


def best(n, nbytes, latency, bandwidth):
    """A right choice."""
    m = root_of((n - 2) * nbytes / (latency * bandwidth))
    found = costs(n, nbytes, latency, bandwidth, m)
    return min(found, key=found.get), m


def choose_broadcast__always_a_tree(n, nbytes, latency, bandwidth):
    return "binomial", 1


def choose_broadcast__always_a_chain(n, nbytes, latency, bandwidth):
    return "pipelined_chain", root_of((n - 2) * nbytes / (latency * bandwidth))


def choose_broadcast__no_latency(n, nbytes, latency, bandwidth):
    """The one with the fewest bytes."""
    found = costs(n, nbytes, 0.0, bandwidth, 64)
    return min(found, key=found.get), 64


def choose_broadcast__sizes(n, nbytes, latency, bandwidth):
    """As the package's own rules do."""
    return ("binomial" if nbytes <= 100_000 else "scatter_all_gather"), 1


def choose_broadcast__two_sizes(n, nbytes, latency, bandwidth):
    m = root_of((n - 2) * nbytes / (latency * bandwidth))
    if nbytes < 30_000:
        return "binomial", m
    return ("scatter_all_gather", m) if nbytes < 300_000 else ("pipelined_chain", m)


def choose_broadcast__bits(n, nbytes, latency, bandwidth):
    return best(n, nbytes, latency, bandwidth / 8)


def choose_broadcast__bits_2(n, nbytes, latency, bandwidth):
    return best(n, nbytes / 8, latency, bandwidth)


def choose_broadcast__one_segment(n, nbytes, latency, bandwidth):
    return best(n, nbytes, latency, bandwidth)[0], 1


def choose_broadcast__as_many_as_ranks(n, nbytes, latency, bandwidth):
    return best(n, nbytes, latency, bandwidth)[0], n


def choose_broadcast__root_forgotten(n, nbytes, latency, bandwidth):
    """(n − 2) n β/α, without the square root."""
    name, _ = best(n, nbytes, latency, bandwidth)
    return name, max(1, round((n - 2) * nbytes / (latency * bandwidth)))
