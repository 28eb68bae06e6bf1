"""Homework 8, solved."""

import math
import statistics
from collections import Counter

import torch
import torch.distributed as dist


def neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


def exchange(mine, shape):
    """Start to send a tensor to the next rank, and to receive one from the rank before."""
    _, _, after, before = neighbours()
    theirs = mine.new_empty(shape)
    return theirs, [dist.irecv(theirs, before), dist.isend(mine, after)]


def wait(works):
    for work in works:
        work.wait()


def merge(out, lse, o, m):
    new = torch.logaddexp(lse, m)
    return out * (lse - new).exp()[..., None] + o * (m - new).exp()[..., None], new


# ---- 21 ----


def decode_attention(q, k, v):
    _, n, _, _ = neighbours()
    scores = (k @ q[..., None])[..., 0] / q.shape[-1] ** 0.5
    lse = scores.logsumexp(-1)
    out = ((scores - lse[:, None]).exp()[:, None] @ v)[:, 0]
    packed = torch.cat([out, lse[:, None]], 1)
    for _ in range(n - 1):
        theirs, works = exchange(packed, packed.shape)
        wait(works)
        packed = theirs
        out, lse = merge(out, lse, packed[:, :-1], packed[:, -1])
    return out


def ring_attention_forward(q, k, v, sizes, attend):
    rank, n, _, _ = neighbours()
    kv, out, lse, works = torch.stack([k, v]), None, None, []
    for step in range(n):
        source = (rank - step) % n
        if step < n - 1:  # the next block travels while this one is computed
            shape = (2, k.shape[0], sizes[(source - 1) % n], k.shape[2])
            next_kv, works = exchange(kv, shape)
        if source == rank:
            out, lse = attend(q, k, v, True)
        elif source < rank:
            out, lse = merge(out, lse, *attend(q, *kv, False))
        if step < n - 1:
            wait(works)
            kv = next_kv
    return out, lse


def ring_attention_backward(dout, q, k, v, out, lse, sizes, attend_backward):
    rank, n, _, _ = neighbours()
    kv, dkv = torch.stack([k, v]), torch.zeros(2, *k.shape, dtype=k.dtype)
    dq, works, grad_works = torch.zeros_like(q), [], []
    for step in range(n):
        source = (rank - step) % n
        if step < n - 1:
            shape = (2, k.shape[0], sizes[(source - 1) % n], k.shape[2])
            next_kv, works = exchange(kv, shape)
        part = None
        if source <= rank:
            part = attend_backward(dout, q, *kv, out, lse, source == rank)
        wait(grad_works)  # the gradients of this block have arrived
        if part is not None:
            dq += part[0]
            dkv = dkv + torch.stack(part[1:])
        if n > 1:  # and go on to the next rank, the last time home
            shape = (2, k.shape[0], sizes[(source - 1) % n], k.shape[2])
            dkv, grad_works = exchange(dkv, shape)
        if step < n - 1:
            wait(works)
            kv = next_kv
    wait(grad_works)
    return dq, *dkv


# ---- 22 ----


def told(numbers):
    """Send one list of numbers to each rank, as long as that rank wants. Returns theirs."""
    rank, n, _, _ = neighbours()
    found = [torch.tensor(mine) for mine in numbers]
    theirs = [torch.empty(len(numbers[rank]), dtype=torch.int64) for _ in range(n)]
    theirs[rank] = found[rank]
    others = [r for r in range(n) if r != rank]
    works = [dist.irecv(theirs[r], r) for r in others] + [dist.isend(found[r], r) for r in others]
    wait(works)
    return [t.tolist() for t in theirs]


def move(rows, sent, received):
    rank, n, _, _ = neighbours()
    blocks = rows.split(sent)
    buffers = [rows.new_empty(count, rows.shape[1]) for count in received]
    buffers[rank] = blocks[rank]
    others = [r for r in range(n) if r != rank]
    works = [dist.irecv(buffers[r], r) for r in others if received[r]]
    works += [dist.isend(blocks[r].contiguous(), r) for r in others if sent[r]]
    wait(works)
    return torch.cat(buffers)


class Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = received, sent
        return move(rows, sent, received)

    @staticmethod
    def backward(ctx, g):
        return move(g, *ctx.counts), None, None


def exchange_rows(x, counts):
    received = [numbers[0] for numbers in told([[count] for count in counts])]
    return Move.apply(x, counts, received), received


def mixture_of_experts(x, choice, gate, experts, sizes):
    flat = choice.flatten()
    slots = (flat >= 0).nonzero()[:, 0]
    slots = slots[flat[slots].argsort(stable=True)]
    tokens = slots // choice.shape[1]
    of_expert = torch.bincount(flat[slots], minlength=sum(sizes)).split(sizes)
    theirs = told([counts.tolist() for counts in of_expert])  # rows for each of my experts, by rank
    sent, received = [int(c.sum()) for c in of_expert], [sum(counts) for counts in theirs]
    rows = Move.apply(x[tokens], sent, received)
    number = torch.cat(
        [torch.arange(len(experts)).repeat_interleave(torch.tensor(c)) for c in theirs]
    )
    computed = torch.zeros_like(rows)
    for e, expert in enumerate(experts):
        mine = (number == e).nonzero()[:, 0]
        computed = computed.index_add(0, mine, expert(rows[mine]))
    back = Move.apply(computed, received, sent)
    return torch.zeros_like(x).index_add(0, tokens, back * gate.flatten()[slots, None])


# ---- 23 ----


def group_along(sizes, axes):
    """The group of the ranks that differ from this one only along these axes."""
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    names = list(sizes)
    last = [names.index(axis) for axis in axes]
    rows = ranks.movedim(last, list(range(-len(last), 0))).reshape(
        -1, math.prod(sizes[axis] for axis in axes)
    )
    mine = None
    for row in rows.tolist():
        group = dist.new_group(row)
        if dist.get_rank() in row:
            mine = group
    return mine


def train_on_mesh(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    data, tensor = group_along(sizes, ("dp", "cp")), group_along(sizes, ("tp",))
    rank = dist.get_rank()
    dp, cp = rank // (sizes["cp"] * sizes["tp"]), rank // sizes["tp"] % sizes["cp"]
    norms = []
    for batch in batches:
        x, y = (t.chunk(sizes["dp"])[dp].chunk(sizes["cp"], 1)[cp] for t in batch)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        squares = torch.zeros(2, dtype=torch.float64)  # of whole parameters, and of parts
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=data)
            p.grad /= sizes["dp"] * sizes["cp"]
            if name in partial:
                dist.all_reduce(p.grad, group=tensor)
            squares[int(name in cut)] += p.grad.square().sum()
        dist.all_reduce(squares[1:], group=tensor)
        norms.append(math.sqrt(squares.sum()))
        for p in model.parameters():
            p.grad *= min(1.0, max_norm / norms[-1])
        optimizer.step()
    return norms


# ---- 24a ----


def bus_bandwidth(kind, start, given, result, clock, repeats):
    n = dist.get_world_size()
    start().wait()
    began = clock()
    for _ in range(repeats):
        start().wait()
    seconds = (clock() - began) / repeats
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1, "reduce": 1}.get(kind, (n - 1) / n)
    return factor * max(given.nbytes, result.nbytes) / seconds


# ---- 24b to 24d ----


def find_hang(record):
    n = len(record)

    def what(rank, k):
        row = record[rank][k]
        to = None if row["peer"] is None else (row["peer"] - rank) % n
        return row["line"], row["group"], to

    for k in range(max(map(len, record))):
        found = {rank: what(rank, k) for rank in range(n) if k < len(record[rank])}
        usual = Counter(found.values()).most_common(1)[0][0]
        for rank in range(n):
            if rank not in found and record[rank][-1]["end"] is not None:
                return rank, usual[0], "missing call"
            if rank in found and found[rank] != usual:
                line, group, _ = found[rank]
                if line != usual[0]:
                    return rank, usual[0], "missing call"
                return rank, line, "wrong peer" if group == usual[1] else "different order"


def find_slow(record):
    def totals(name, value):
        return [sum(value(row) for row in own if row["call"] == name) for own in record]

    def seconds(row):
        return row["end"] - row["posted"]

    for name, value, cause in (
        ("load", seconds, "slow compute"),
        ("forward", seconds, "slow compute"),
        ("send", lambda row: row["nbytes"], "large message"),
    ):
        by_rank = totals(name, value)
        rank = max(range(len(record)), key=by_rank.__getitem__)
        if by_rank[rank] > 1.5 * statistics.median(by_rank):
            return rank, next(row["line"] for row in record[rank] if row["call"] == name), cause
    for rank, own in enumerate(record):
        calls = [row["call"] for row in own]
        if calls.index("recv") < calls.index("send"):
            return rank, own[calls.index("send")]["line"], "late send"


def find_wrong(record):
    n = len(record)
    for k, rows in enumerate(zip(*record)):
        usual, agree = Counter(tuple(row["value"]) for row in rows).most_common(1)[0]
        odd = [rank for rank, row in enumerate(rows) if tuple(row["value"]) != usual]
        if agree == 1 or not odd:
            continue
        rank, row = odd[0], rows[odd[0]]
        before = [old for old in record[rank][:k] if old["name"] == row["name"]][-1]
        if row["name"] == "weights":
            return rank, row["line"], "skipped update"
        if row["value"] == record[rank][k - 1]["value"]:
            return rank, row["line"], "not summed"
        if row["value"] == before["value"]:
            return rank, row["line"], "stale gradient"
        assert math.isclose(n * row["value"][0], usual[0])
        return rank, row["line"], "divided twice"
