"""Odd but correct solutions of homework 8, exercise 21: they keep full points."""

import torch
import torch.distributed as dist


def places():
    return dist.get_rank(), dist.get_world_size()


# ---- 21a ----


def decode_attention__fraction_at_a_root(q, k, v):
    """Numerator, denominator and maximum go to the last rank, which sends the result to all."""
    rank, n = places()
    scores = torch.einsum("hd,htd->ht", q, k) / q.shape[1] ** 0.5
    top = scores.amax(1, keepdim=True)
    weights = (scores - top).exp()
    mine = torch.cat([torch.einsum("ht,htd->hd", weights, v), weights.sum(1, True), top], 1)
    if rank < n - 1:
        dist.send(mine, n - 1)
        result = torch.empty_like(q)
        dist.recv(result, n - 1)
        return result
    found = [mine]
    for other in range(n - 1):
        found.append(torch.empty_like(mine))
        dist.recv(found[-1], other)
    parts = torch.stack(found)
    factors = (parts[..., -1:] - parts[..., -1:].amax(0)).exp()
    total = (parts[..., :-1] * factors).sum(0)
    result = total[:, :-1] / total[:, -1:]
    for other in range(n - 1):
        dist.send(result, other)
    return result


def decode_attention__chain(q, k, v):
    """The softmax so far is passed along the ranks, as if they were blocks of one loop."""
    rank, n = places()
    so_far = torch.cat([torch.zeros_like(q), torch.full((len(q), 1), -torch.inf).to(q)], 1)
    if rank:
        dist.recv(so_far, rank - 1)
    out, lse = so_far[:, :-1], so_far[:, -1]
    for key, value in zip(k.unbind(1), v.unbind(1)):
        score = (q * key).sum(1) / q.shape[1] ** 0.5
        new = torch.logaddexp(lse, score)
        out = out * (lse - new).exp()[:, None] + value * (score - new).exp()[:, None]
        lse = new
    if rank < n - 1:
        dist.send(torch.cat([out, lse[:, None]], 1), rank + 1)
        out = torch.empty_like(q)
        dist.recv(out, rank + 1)
    if rank:
        dist.send(out.contiguous(), rank - 1)
    return out


# ---- 21b ----


def merged(parts):
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum((part - lse).exp()[..., None] * out for out, part in parts), lse


def ring_attention_forward__other_way_unpacked(q, k, v, sizes, attend):
    """To the rank before, with K and V in messages of their own. All parts are merged at the end.

    Blocks of the future are computed with a mask that hides every key: as lse of minus infinity.
    """
    rank, n = places()
    parts = []
    for step in range(n):
        source, works = (rank + step) % n, []
        if step < n - 1:
            size = sizes[(source + 1) % n]
            theirs = [t.new_empty(t.shape[0], size, t.shape[2]) for t in (k, v)]
            works = [dist.isend(t, (rank - 1) % n) for t in (k, v)]
            works += [dist.irecv(t, (rank + 1) % n) for t in theirs]
        out, lse = attend(q, k, v, source == rank)
        parts.append((out, lse if source <= rank else torch.full_like(lse, -torch.inf)))
        for work in works:
            work.wait()
        if works:
            k, v = theirs
    return merged(parts)


def ring_attention_forward__only_later_ranks(q, k, v, sizes, attend):
    """Every block goes only to ranks that need it: the last rank passes nothing on."""
    rank, n = places()
    kv, parts = torch.stack([k, v]), []
    for source in range(rank, -1, -1):
        works = []
        if rank < n - 1:
            works.append(dist.isend(kv, rank + 1))
        if source:
            theirs = kv.new_empty(2, k.shape[0], sizes[source - 1], k.shape[2])
            works.append(dist.irecv(theirs, rank - 1))
        parts.append(attend(q, *kv, source == rank))
        for work in works:
            work.wait()
        if source:
            kv = theirs
    return merged(parts)


def ring_attention_forward__batches_and_halves(q, k, v, sizes, attend):
    """Two buffers of the largest size take turns, and each block is computed in two halves."""
    rank, n = places()
    buffers = torch.zeros(2, 2, k.shape[0], max(sizes), k.shape[2], dtype=k.dtype)
    buffers[0, 0, :, : k.shape[1]], buffers[0, 1, :, : k.shape[1]] = k, v
    out, lse = attend(q, k, v, True)
    for step in range(n):
        source, works = (rank - step) % n, []
        if step < n - 1:
            here, there = buffers[step % 2], buffers[(step + 1) % 2]
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, here, (rank + 1) % n),
                    dist.P2POp(dist.irecv, there, (rank - 1) % n),
                ]
            )
        if source < rank:
            whole = buffers[step % 2, :, :, : sizes[source]]
            for half in whole.chunk(2, 2):
                o, m = attend(q, half[0], half[1], False)
                share = torch.sigmoid(m - lse)[..., None]
                out, lse = out + share * (o - out), torch.logaddexp(lse, m)
        for work in works:
            work.wait()
    return out, lse


# ---- 21c ----


def both(send, to, receive, source):
    works = [dist.isend(send, to), dist.irecv(receive, source)]
    for work in works:
        work.wait()
    return receive


def ring_attention_backward__one_message(dout, q, k, v, out, lse, sizes, attend_backward):
    """K, V, dK and dV travel in one tensor; in the last exchange, dK and dV alone."""
    rank, n = places()
    dq = torch.zeros_like(q)
    block = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        source = (rank - step) % n
        if source <= rank:
            parts = attend_backward(dout, q, block[0], block[1], out, lse, source == rank)
            dq += parts[0]
            block[2:] += torch.stack(parts[1:])
        if n > 1:
            block = block if step < n - 1 else block[2:].clone()
            theirs = q.new_empty(len(block), len(q), sizes[(source - 1) % n], q.shape[2])
            block = both(block, (rank + 1) % n, theirs, (rank - 1) % n)
    return dq, block[-2], block[-1]


def ring_attention_backward__queries_travel(dout, q, k, v, out, lse, sizes, attend_backward):
    """K and V stay, with their gradients. q, dout, out and lse go round, and dq goes home."""
    rank, n = places()
    _, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    packed = torch.cat([dout, q, out, lse[..., None]], 2)
    dq = torch.zeros_like(q)
    for step in range(n):
        source = (rank - step) % n
        if source >= rank:
            *tensors, row = packed.split([q.shape[2]] * 3 + [1], 2)
            one, two, three = (t.contiguous() for t in tensors)
            parts = attend_backward(one, two, k, v, three, row[..., 0], source == rank)
            dq, dk, dv = dq + parts[0], dk + parts[1], dv + parts[2]
        size = sizes[(source - 1) % n]
        if n > 1:
            dq = both(dq, (rank + 1) % n, q.new_empty(len(q), size, q.shape[2]), (rank - 1) % n)
        if step < n - 1:
            theirs = q.new_empty(len(q), size, packed.shape[2])
            packed = both(packed, (rank + 1) % n, theirs, (rank - 1) % n)
    return dq, dk, dv


def ring_attention_backward__straight_home(dout, q, k, v, out, lse, sizes, attend_backward):
    """K and V go round; each part of dK and dV goes straight to its owner."""
    rank, n = places()
    kv, homeward = torch.stack([k, v]), []
    dq, dk, dv = attend_backward(dout, q, k, v, out, lse, True)
    for step in range(1, n):
        source = (rank - step) % n
        theirs = k.new_empty(2, k.shape[0], sizes[source], k.shape[2])
        kv = both(kv, (rank + 1) % n, theirs, (rank - 1) % n)
        if source < rank:
            part, *gradients = attend_backward(dout, q, *kv, out, lse, False)
            dq = dq + part
            homeward.append(dist.isend(torch.stack(gradients), source))
    for other in range(rank + 1, n):
        theirs = torch.empty(2, *k.shape, dtype=k.dtype)
        dist.recv(theirs, other)
        dk, dv = dk + theirs[0], dv + theirs[1]
    for work in homeward:
        work.wait()
    return dq, dk, dv
