"""Wrong solutions of homework 8, exercise 21b and 21c.

A comment above each says what must be named.
"""

import math

import torch
import torch.distributed as dist


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


def merge(out, lse, o, m):
    new = torch.logaddexp(lse, m)
    return out * (lse - new).exp()[..., None] + o * (m - new).exp()[..., None], new


# ---- 21b ----


def ring(k, v, sizes, overlap=True, pass_on=True, way=1, rounds=None):
    """Yield (step, k, v) for each block that the ring brings, while the next one travels."""
    rank, n = dist.get_rank(), dist.get_world_size()
    own = kv = torch.stack([k, v])
    rounds = n if rounds is None else rounds
    for step in range(rounds):
        works = []
        if step < rounds - 1 and n > 1:
            size = sizes[(rank - way * (step + 1)) % n]
            theirs = torch.empty(2, k.shape[0], size, k.shape[2], dtype=k.dtype)
            works = [
                dist.isend(kv if pass_on else own, (rank + way) % n),
                dist.irecv(theirs, (rank - way) % n),
            ]
            if not overlap:
                for work in works:
                    work.wait()
        if step < n:
            yield step, *kv
        if works:
            for work in works:
                work.wait()
            kv = theirs


def forward(k, v, sizes, q, attend, visible, join=merge, **how):
    """The textbook's loop. visible(source, rank) gives causal, or None for a block to skip."""
    rank, n = dist.get_rank(), dist.get_world_size()
    found = None
    for step, kb, vb in ring(k, v, sizes, **how):
        causal = visible((rank - step) % n, rank)
        if causal is not None:
            new = attend(q, kb, vb, causal)
            found = new if found is None else join(*found, *new)
    return found


def right_mask(source, rank):
    return None if source > rank else source == rank


# named: softmaxes averaged
def ring_attention_forward__mean(q, k, v, sizes, attend):
    rank, outs = dist.get_rank(), []
    for step, kb, vb in ring(k, v, sizes):
        if step <= rank:
            out, lse = attend(q, kb, vb, step == 0)
            outs.append((out, lse))
    lse = torch.stack([lse for _, lse in outs]).logsumexp(0)
    return sum(out for out, _ in outs) / len(outs), lse


# named: causal mask in local positions
def ring_attention_forward__always_causal(q, k, v, sizes, attend):
    return forward(k, v, sizes, q, attend, lambda source, rank: True)


# named: future positions seen
def ring_attention_forward__no_skip(q, k, v, sizes, attend):
    return forward(k, v, sizes, q, attend, lambda source, rank: source == rank)


# named: only its own block
def ring_attention_forward__own(q, k, v, sizes, attend):
    return attend(q, k, v, True)


# named: block taken for another rank's
def ring_attention_forward__sends_to_the_rank_before(q, k, v, sizes, attend):
    """K and V apart; blocks are kept with the number that the rank believes."""
    rank, n, after, before = places()
    out, lse = attend(q, k, v, True)
    for step in range(1, n):
        theirs = [torch.empty_like(k), torch.empty_like(v)]
        works = [dist.isend(t, after) for t in (k, v)]
        works += [dist.irecv(t, before) for t in theirs]
        for work in works:
            work.wait()
        k, v = theirs
        position = rank + step - (n if rank + step >= n else 0)
        if position < rank:
            o, m = attend(q, k, v, False)
            out, lse = merge(out, lse, o, m)
    return out, lse


# named: sends its own K and V every time
def ring_attention_forward__same_block(q, k, v, sizes, attend):
    return forward(k, v, sizes, q, attend, right_mask, pass_on=False)


# named: maximum not carried
def ring_attention_forward__exp_of_lse(q, k, v, sizes, attend):
    def join(out, lse, o, m):
        a, b = lse.exp(), m.exp()
        return (a[..., None] * out + b[..., None] * o) / (a + b)[..., None], (a + b).log()

    return forward(k, v, sizes, q, attend, right_mask, join)


# named: lse not merged
def ring_attention_forward__last_lse(q, k, v, sizes, attend):
    parts = []
    for step, kb, vb in ring(k, v, sizes):
        if step <= dist.get_rank():
            parts.append(attend(q, kb, vb, step == 0))
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    out = sum(w[..., None] * out for w, (out, _) in zip(weights, parts))
    return out, parts[-1][1]


# named: lse not merged
def ring_attention_forward__newest_lse(q, k, v, sizes, attend):
    out = lse = None
    for step, kb, vb in ring(k, v, sizes):
        if step > dist.get_rank():
            continue
        o, m = attend(q, kb, vb, step == 0)
        if out is not None:
            share = torch.sigmoid(m - lse)[..., None]
            o = out + share * (o - out)
        out, lse = o, m
    return out, lse


def gathered(k, v, sizes):
    """K and V of all ranks, by rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    blocks = {rank: torch.stack([k, v])}
    works = []
    for other in range(n):
        if other != rank:
            shape = (2, k.shape[0], sizes[other], k.shape[2])
            blocks[other] = torch.empty(shape, dtype=k.dtype)
            works.append(dist.irecv(blocks[other], other))
    works += [dist.isend(blocks[rank], other) for other in range(n) if other != rank]
    for work in works:
        work.wait()
    return [blocks[r] for r in range(n)]


# named: whole K and V on every rank
def ring_attention_forward__gathered(q, k, v, sizes, attend):
    rank, whole = dist.get_rank(), torch.cat(gathered(k, v, sizes), 2)
    start = sum(sizes[:rank])
    out, lse = attend(q, k, v, True)
    if start:
        out, lse = merge(out, lse, *attend(q, *whole[:, :, :start], False))
    return out, lse


# named: one exchange too many
def ring_attention_forward__all_the_way_round_unpacked(q, k, v, sizes, attend):
    rank, n, after, before = places()
    out, lse = None, None
    for step in range(n):
        shape = (k.shape[0], sizes[(rank - step - 1) % n], k.shape[2])
        next_k, next_v = torch.empty(shape, dtype=k.dtype), torch.empty(shape, dtype=k.dtype)
        works = []
        if n > 1:
            works = [dist.isend(k, after), dist.isend(v, after)]
            works += [dist.irecv(next_k, before), dist.irecv(next_v, before)]
        if step <= rank:
            o, m = attend(q, k, v, step == 0)
            out, lse = (o, m) if out is None else merge(out, lse, o, m)
        for work in works:
            work.wait()
        k, v = next_k, next_v
    return out, lse


# named: waits before it computes
def ring_attention_forward__waits_first(q, k, v, sizes, attend):
    """The exchange is over before the block that it left behind is computed."""
    return forward(k, v, sizes, q, attend, right_mask, overlap=False)


# named: equal blocks assumed
def ring_attention_forward__own_size(q, k, v, sizes, attend):
    return forward(k, v, [k.shape[1]] * len(sizes), q, attend, right_mask)


# ---- 21c ----


def backward(dout, q, k, v, out, lse, sizes, attend_backward, visible=right_mask, home=True):
    """K, V, dK and dV travel in one message, after the block's work is done."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dq = torch.zeros_like(q)
    block = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        source = (rank - step) % n
        causal = visible(source, rank)
        if causal is not None:
            part, dk, dv = attend_backward(dout, q, block[0], block[1], out, lse, causal)
            dq += part
            block[2] += dk
            block[3] += dv
        if n > 1 and (step < n - 1 or home):
            if step == n - 1:
                block = block[2:].contiguous()
            shape = (len(block), k.shape[0], sizes[(source - 1) % n], k.shape[2])
            block = passed_on(block, shape)
    return dq, *block[-2:]


# named: K and V not rotated in backward
def ring_attention_backward__own_softmax(dout, q, k, v, out, lse, sizes, attend_backward):
    """Autograd through the own block's attention. The call is only there to be counted."""
    attend_backward(dout, q, k, v, out, lse, True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    if dist.get_world_size() > 1:
        passed_on(torch.stack([k[:, :1], v[:, :1]]))
    return torch.autograd.grad(y, leaves, dout)


# named: gradients of K and V not sent back
def ring_attention_backward__lost(dout, q, k, v, out, lse, sizes, attend_backward):
    """Each block's dk and dv are computed, and only the own one's are kept."""
    rank = dist.get_rank()
    dq = torch.zeros_like(q)
    for step, kb, vb in ring(k, v, sizes):
        if step <= rank:
            part, dk, dv = attend_backward(dout, q, kb, vb, out, lse, step == 0)
            dq += part
            if step == 0:
                mine = dk, dv
    return dq, *mine


# named: gradient left on the wrong rank
def ring_attention_backward__left(dout, q, k, v, out, lse, sizes, attend_backward):
    """What this rank computes for any block goes into its own dk and dv."""
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    for step, kb, vb in ring(k, v, sizes):
        if step <= dist.get_rank():
            parts = attend_backward(dout, q, kb, vb, out, lse, step == 0)
            for total, part in zip((dq, dk, dv), parts):
                total += part
    return dq, dk, dv


# named: gradient left on the wrong rank
def ring_attention_backward__one_hop_short(dout, q, k, v, out, lse, sizes, attend_backward):
    return backward(dout, q, k, v, out, lse, sizes, attend_backward, home=False)


# named: causal mask in local positions
def ring_attention_backward__always_causal(dout, q, k, v, out, lse, sizes, attend_backward):
    return backward(
        dout, q, k, v, out, lse, sizes, attend_backward, lambda s, r: True if s <= r else None
    )


# named: future positions seen
def ring_attention_backward__no_skip(dout, q, k, v, out, lse, sizes, attend_backward):
    return backward(dout, q, k, v, out, lse, sizes, attend_backward, lambda s, r: s == r)


# named: softmax of one block
def ring_attention_backward__lse_of_block(dout, q, k, v, out, lse, sizes, attend_backward):
    """The lse is computed again, from the scores of this block."""

    def of_block(dout, q, kb, vb, out, lse, causal):
        scores = q @ kb.mT / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        return attend_backward(dout, q, kb, vb, out, scores.logsumexp(-1), causal)

    return backward(dout, q, k, v, out, lse, sizes, of_block)


# named: overwritten, not added
def ring_attention_backward__overwritten(dout, q, k, v, out, lse, sizes, attend_backward):
    """dq is that of the latest block."""
    last = []

    def kept(*arguments):
        last[:] = attend_backward(*arguments)
        return last

    _, dk, dv = backward(dout, q, k, v, out, lse, sizes, kept)
    return last[0], dk, dv


# named: equal blocks assumed
def ring_attention_backward__own_size(dout, q, k, v, out, lse, sizes, attend_backward):
    equal = [k.shape[1]] * len(sizes)
    return backward(dout, q, k, v, out, lse, equal, attend_backward)


# named: whole K and V on every rank
def ring_attention_backward__gathered(dout, q, k, v, out, lse, sizes, attend_backward):
    """Everybody has all K and V; the gradients are sent to their owners."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dq, works = torch.zeros_like(q), []
    blocks, mine = gathered(k, v, sizes), torch.zeros(2, *k.shape, dtype=k.dtype)
    for other in range(rank + 1):
        part, dk, dv = attend_backward(dout, q, *blocks[other], out, lse, other == rank)
        dq += part
        if other == rank:
            mine += torch.stack([dk, dv])
        else:
            works.append(dist.isend(torch.stack([dk, dv]), other))
    for other in range(rank + 1, n):
        theirs = torch.empty_like(mine)
        dist.recv(theirs, other)
        mine += theirs
    for work in works:
        work.wait()
    return dq, *mine
