"""Odd but correct solutions of homework 8, exercise 22: they keep full points."""

import torch
import torch.distributed as dist


def places():
    return dist.get_rank(), dist.get_world_size()


# ---- 22a ----


def table_of(counts):
    """The counts of all ranks: row i has those of rank i. Every rank tells every other all."""
    rank, n = places()
    rows = [torch.zeros(n, dtype=torch.int64) for _ in range(n)]
    rows[rank] = torch.tensor(counts)
    others = [r for r in range(n) if r != rank]
    works = [dist.isend(rows[rank], r) for r in others] + [dist.irecv(rows[r], r) for r in others]
    for work in works:
        work.wait()
    return torch.stack(rows)


class RowByRow(torch.autograd.Function):
    """Each row is a message of its own, straight into its place in y."""

    @staticmethod
    def forward(ctx, x, table):
        rank, _ = places()
        ctx.table = table
        sent, received = table[rank].tolist(), table[:, rank].tolist()
        y = x.new_empty(sum(received), x.shape[1])
        into = [list(block) for block in y.split(received)]
        works = []
        for r, block in enumerate(x.contiguous().split(sent)):
            if r == rank:
                for place, row in zip(into[rank], block):
                    place.copy_(row)
            else:
                works += [dist.isend(row, r) for row in block]
                works += [dist.irecv(place, r) for place in into[r]]
        for work in works:
            work.wait()
        return y

    @staticmethod
    def backward(ctx, g):
        return RowByRow.forward(ctx, g, ctx.table.T), None


def exchange_rows__row_by_row(x, counts):
    table = table_of(counts)
    return RowByRow.apply(x, table), table[:, dist.get_rank()]


def pairwise(rows, sent, received):
    """One partner after the other, blocking; the lower rank of a pair sends first."""
    rank, n = places()
    blocks, found = rows.detach().split(sent), {}
    for step in range(1 << (n - 1).bit_length()):
        other = rank ^ step
        if other == rank:
            found[rank] = blocks[rank]
        elif other < n:
            found[other] = rows.new_empty(received[other], rows.shape[1])
            for sending in (rank < other, rank > other):
                if sending and sent[other]:
                    dist.send(blocks[other].contiguous(), other)
                elif not sending and received[other]:
                    dist.recv(found[other], other)
    return torch.cat([found[r] for r in range(n)])


# ---- 22b ----


class Pairwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = received, sent
        return pairwise(rows, sent, received)

    @staticmethod
    def backward(ctx, g):
        return pairwise(g, *ctx.counts), None, None


def owners_of(choice, sizes):
    """The rank of each expert in `choice`; −1 where it was dropped."""
    ends = torch.tensor(sizes).cumsum(0)
    return torch.where(choice < 0, -1, torch.searchsorted(ends, choice.clamp(min=0), right=True))


def mixture_of_experts__each_token_once(x, choice, gate, experts, sizes):
    """A token goes to a rank once, with its gates there, and comes back as one sum."""
    rank, n = places()
    owner, start = owners_of(choice, sizes), sum(sizes[:rank])
    tokens = [(owner == r).any(1).nonzero()[:, 0] for r in range(n)]
    sent = [len(part) for part in tokens]
    received = table_of(sent)[:, rank].tolist()
    order = torch.cat(tokens)
    weights = torch.cat([gate[part] * (owner[part] == r) for r, part in enumerate(tokens)])
    rows = Pairwise.apply(torch.cat([x[order], weights], 1), sent, received)
    numbers = pairwise(choice[order], sent, received)
    rows, weights = rows[:, : x.shape[1]], rows[:, x.shape[1] :]
    result = 0 * rows
    for e, expert in enumerate(experts, start=start):
        mine, slot = (numbers == e).nonzero(as_tuple=True)
        result = result.index_add(0, mine, expert(rows[mine]) * weights[mine, slot][:, None])
    back = Pairwise.apply(result, received, sent)
    return (0 * x).index_add(0, order, back)
