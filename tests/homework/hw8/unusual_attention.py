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
