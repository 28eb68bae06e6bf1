"""Wrong solutions of homework 8, exercise 21a.

EXPECTED: the misconception that the grader must name for each.
"""

import math

import torch
import torch.distributed as dist

EXPECTED = {
    "decode_attention__mean": "softmaxes averaged",
    "decode_attention__mean_by_length": "softmaxes averaged",
    "decode_attention__sum": "softmaxes averaged",
    "decode_attention__own": "results never merged",
    "decode_attention__own_sent_too": "results never merged",
    "decode_attention__local_maximum": "softmax maximum kept local",
    "decode_attention__local_maximum_packed": "softmax maximum kept local",
    "decode_attention__unscaled": "scale forgotten",
    "decode_attention__unscaled_and_own": "scale forgotten",
    "decode_attention__no_maximum": "maximum not carried",
    "decode_attention__exp_of_lse": "maximum not carried",
    "decode_attention__gathered": "keys and values sent",
    "decode_attention__gathered_at_root": "keys and values sent",
}


def places():
    """This rank, the number of ranks, and its neighbours."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


def passed_on(mine, shape=None):
    """What the rank before sends, while this rank sends its own to the next."""
    _, _, after, before = places()
    theirs = torch.empty(mine.shape if shape is None else shape, dtype=mine.dtype)
    sending = dist.isend(mine.contiguous(), after)
    dist.recv(theirs, before)
    sending.wait()
    return theirs


def from_all(mine):
    """The tensors of all ranks, all of one shape, by rank."""
    rank, n, _, _ = places()
    found = {rank: mine}
    for step in range(1, n):
        mine = passed_on(mine)
        found[(rank - step) % n] = mine
    return [found[r] for r in range(n)]


def scores_of(q, k):
    return torch.einsum("hd,htd->ht", q, k) / math.sqrt(q.shape[1])


def own_attention(q, k, v, scale=None):
    scale = q.shape[1] ** -0.5 if scale is None else scale
    weights = (scale * (k * q[:, None]).sum(-1)).softmax(1)
    return (weights[..., None] * v).sum(1)


def decode_attention__mean(q, k, v):
    return torch.stack(from_all(own_attention(q, k, v))).mean(0)


def decode_attention__mean_by_length(q, k, v):
    time = k.new_full((1, q.shape[1]), k.shape[1])
    found = torch.stack(from_all(torch.cat([k.shape[1] * own_attention(q, k, v), time])))
    total = found.sum(0)
    return total[:-1] / total[-1]


def decode_attention__sum(q, k, v):
    mine = total = own_attention(q, k, v)
    for _ in range(dist.get_world_size() - 1):
        mine = passed_on(mine)
        total = total + mine
    return total


def decode_attention__own(q, k, v):
    return own_attention(q, k, v)


def decode_attention__own_sent_too(q, k, v):
    """The exchange happens, and its result is dropped."""
    mine = scores_of(q, k).softmax(-1)[:, None] @ v
    from_all(mine)
    return mine[:, 0]


def decode_attention__local_maximum(q, k, v):
    scores = scores_of(q, k)
    weights = (scores - scores.max(1, keepdim=True).values).exp()
    top = (weights[..., None] * v).sum(1)
    return sum(from_all(top)) / sum(from_all(weights.sum(1)[:, None]))


def decode_attention__local_maximum_packed(q, k, v):
    scores = k @ q[:, :, None] * q.shape[1] ** -0.5
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    mine = torch.cat([(weights * v).sum(1), weights.sum(1)], 1)
    total = torch.stack(from_all(mine)).sum(0)
    return total[:, :-1] / total[:, -1:]


def decode_attention__unscaled(q, k, v):
    scores = torch.einsum("hd,htd->ht", q, k)
    lse = scores.logsumexp(1)
    out = torch.einsum("ht,htd->hd", (scores - lse[:, None]).exp(), v)
    found = torch.stack(from_all(torch.cat([out, lse[:, None]], 1)))
    return (found[..., -1:].softmax(0) * found[..., :-1]).sum(0)


def decode_attention__unscaled_and_own(q, k, v):
    return from_all(own_attention(q, k, v, scale=1.0))[dist.get_rank()]


def decode_attention__no_maximum(q, k, v):
    weights = scores_of(q, k).exp()
    mine = torch.cat([(weights[:, None] @ v)[:, 0], weights.sum(1, keepdim=True)], 1)
    total = sum(from_all(mine))
    return total[:, :-1] / total[:, -1:]


def decode_attention__exp_of_lse(q, k, v):
    scores = scores_of(q, k)
    share = scores.logsumexp(1, keepdim=True).exp()
    out = (scores.softmax(1)[:, None] @ v)[:, 0]
    outs, shares = from_all(out), from_all(share)
    return sum(o * s for o, s in zip(outs, shares)) / sum(shares)


def decode_attention__gathered(q, k, v):
    """The lengths first, then all keys and values."""
    rank, n, _, _ = places()
    lengths = [int(length) for length in from_all(torch.tensor([k.shape[1]]))]
    blocks = {rank: torch.stack([k, v])}
    for step in range(1, n):
        shape = (2, k.shape[0], lengths[(rank - step) % n], k.shape[2])
        blocks[(rank - step) % n] = passed_on(blocks[(rank - step + 1) % n], shape)
    ks, vs = torch.cat([blocks[r] for r in range(n)], 2)
    return own_attention(q, ks, vs)


def decode_attention__gathered_at_root(q, k, v):
    rank, n, _, _ = places()
    if rank:
        dist.send(torch.tensor(k.shape[1]), 0)
        dist.send(k.contiguous(), 0)
        dist.send(v.contiguous(), 0)
        result = torch.empty_like(q)
        dist.recv(result, 0)
        return result
    ks, vs = [k], [v]
    for r in range(1, n):
        length = torch.tensor(0)
        dist.recv(length, r)
        for blocks in (ks, vs):
            blocks.append(torch.empty(k.shape[0], int(length), k.shape[2], dtype=k.dtype))
            dist.recv(blocks[-1], r)
    result = own_attention(q, torch.cat(ks, 1), torch.cat(vs, 1))
    for r in range(1, n):
        dist.send(result, r)
    return result
