"""Wrong solutions of homework 8, exercise 22.

EXPECTED: the misconception that the grader must name for each.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

EXPECTED = {
    # 22a
    "exchange_rows__own_counts": "counts not exchanged",
    "exchange_rows__as_if_symmetric": "counts not exchanged",
    "exchange_rows__equal_blocks": "counts not exchanged",
    "exchange_rows__forward_counts_in_backward": "counts not exchanged",
    "exchange_rows__leaves_early": "rank without rows stays away",
    "exchange_rows__gets_nothing": "rank without rows stays away",
    "exchange_rows__own_gradient": "gradient not sent back",
    "exchange_rows__own_block_in_graph": "gradient not sent back",
    "exchange_rows__own_first": "joined in the wrong order",
    "exchange_rows__by_step": "joined in the wrong order",
    "exchange_rows__no_function": "autograd not told",
    "exchange_rows__detached": "autograd not told",
    "exchange_rows__all_to_everyone": "whole tensor shipped",
    "exchange_rows__ring_of_everything": "whole tensor shipped",
    "exchange_rows__padded": "blocks padded to the longest",
    # 22b
    "mixture_of_experts__sorted": "inverse permutation missing",
    "mixture_of_experts__sorted_gates": "inverse permutation missing",
    "mixture_of_experts__sorted_twice": "inverse permutation missing",
    "mixture_of_experts__gate_detached": "gradients of the gate lost",
    "mixture_of_experts__one_function": "gradients of the gate lost",
    "mixture_of_experts__minus_one": "dropped tokens counted",
    "mixture_of_experts__clamped": "dropped tokens counted",
    "mixture_of_experts__passed_through": "dropped tokens counted",
    "mixture_of_experts__no_gate": "gate forgotten",
    "mixture_of_experts__no_gate_sum": "gate forgotten",
    "mixture_of_experts__evenly": "experts taken as evenly cut",
    "mixture_of_experts__own_size": "experts taken as evenly cut",
    "mixture_of_experts__leaves_early": "rank without rows stays away",
    "mixture_of_experts__no_graph": "rank without rows stays away",
    "mixture_of_experts__cat_of_nothing": "empty expert fails",
    "mixture_of_experts__range_of_experts": "empty expert fails",
    "mixture_of_experts__own_counts": "counts not exchanged",
    "mixture_of_experts__symmetric_halves": "counts not exchanged",
    "mixture_of_experts__cut": "graph cut by a message",
    "mixture_of_experts__cut_on_the_way": "graph cut by a message",
    "mixture_of_experts__no_adjoint": "gradient stops at the message",
    "mixture_of_experts__zero_gradient": "gradient stops at the message",
    "mixture_of_experts__dense": "every row to every rank",
    "mixture_of_experts__gathered": "every row to every rank",
    "mixture_of_experts__all_experts": "every expert computes every row",
    "mixture_of_experts__loop_and_mask": "every expert computes every row",
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


# ---- 22a ----


def move(rows, sent, received, order=None):
    """The rows alone. order: of the ranks, in what is joined."""
    rank, n = dist.get_rank(), dist.get_world_size()
    blocks = [block.contiguous() for block in rows.detach().split(sent)]
    buffers = [torch.empty(count, rows.shape[1], dtype=rows.dtype) for count in received]
    buffers[rank] = blocks[rank].clone()
    works = []
    for other in range(n):
        if other != rank:
            works += [dist.isend(blocks[other], other), dist.irecv(buffers[other], other)]
    for work in works:
        work.wait()
    return torch.cat([buffers[r] for r in (order or range(n))])


def counts_of_others(counts):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
    works = []
    for other in range(n):
        if other == rank:
            received[rank][0] = counts[rank]
        else:
            works.append(dist.isend(torch.tensor([counts[other]]), other))
            works.append(dist.irecv(received[other], other))
    for work in works:
        work.wait()
    return [int(count) for count in received]


class Node(torch.autograd.Function):
    """A node of the graph from two functions."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.run = backward
        return forward(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.run(g), None, None


def moved(rows, sent, received, order=None):
    return Node.apply(
        rows, lambda x: move(x, sent, received, order), lambda g: move(g, received, sent)
    )


def exchange_rows__own_counts(x, counts):
    return moved(x, counts, counts), counts


def exchange_rows__equal_blocks(x, counts):
    """Every rank gets its n-th part of x, whatever the counts say."""
    n = dist.get_world_size()
    sizes = [len(block) for block in x.tensor_split(n)]
    return moved(x, sizes, [sizes[0]] * n), [sizes[0]] * n


class AsIfSymmetric(torch.autograd.Function):
    """It expects as many rows from a rank as it sends there, one rank after the other."""

    @staticmethod
    def forward(ctx, x, counts):
        ctx.counts = counts
        rank, n = dist.get_rank(), dist.get_world_size()
        result, start = x.clone(), [sum(counts[:r]) for r in range(n + 1)]
        for step in range(1, n):
            to, source = (rank + step) % n, (rank - step) % n
            sending = dist.isend(x[start[to] : start[to + 1]].contiguous(), to)
            dist.recv(result[start[source] : start[source + 1]], source)
            sending.wait()
        return result

    @staticmethod
    def backward(ctx, g):
        return AsIfSymmetric.forward(ctx, g, ctx.counts), None


def exchange_rows__as_if_symmetric(x, counts):
    return AsIfSymmetric.apply(x, counts), list(counts)


def exchange_rows__forward_counts_in_backward(x, counts):
    received = counts_of_others(counts)
    y = Node.apply(x, lambda x: move(x, counts, received), lambda g: move(g, counts, received))
    return y, received


def exchange_rows__leaves_early(x, counts):
    if len(x) == 0:
        return x, [0] * dist.get_world_size()
    received = counts_of_others(counts)
    return moved(x, counts, received), received


def exchange_rows__gets_nothing(x, counts):
    """Without rows to get, it makes y itself, and takes no part in backward."""
    received = counts_of_others(counts)
    y = moved(x, counts, received)
    return (y if sum(received) else x.new_zeros(0, x.shape[1])), received


def exchange_rows__padded(x, counts):
    n, received = dist.get_world_size(), counts_of_others(counts)
    longest = max(counts_of_others([max(counts)] * n))

    def moved(rows, sent, received):
        blocks = [F.pad(block, (0, 0, 0, longest - len(block))) for block in rows.split(sent)]
        found = move(torch.cat(blocks), [longest] * n, [longest] * n).split(longest)
        return torch.cat([block[:count] for block, count in zip(found, received)])

    forward, backward = (
        (lambda x: moved(x, counts, received)),
        (lambda g: moved(g, received, counts)),
    )
    return Node.apply(x, forward, backward), received


def exchange_rows__own_gradient(x, counts):
    received, rank = counts_of_others(counts), dist.get_rank()

    def backward(g):
        blocks = [g.new_zeros(count, g.shape[1]) for count in counts]
        blocks[rank] = g.split(received)[rank]
        return torch.cat(blocks)

    return Node.apply(x, lambda x: move(x, counts, received), backward), received


def exchange_rows__own_block_in_graph(x, counts):
    """The messages write into buffers; only the own block is joined with its graph."""
    rank, n = dist.get_rank(), dist.get_world_size()
    received = counts_of_others(counts)
    blocks, parts = x.split(counts), []
    for other in range(n):
        if other == rank:
            parts.append(blocks[rank])
            continue
        theirs = x.new_empty(received[other], x.shape[1])
        sending = dist.isend(blocks[other].detach().contiguous(), other)
        dist.recv(theirs, other)
        sending.wait()
        parts.append(theirs)
    return torch.cat(parts), received


def exchange_rows__own_first(x, counts):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = counts_of_others(counts)
    order = [rank, *(r for r in range(n) if r != rank)]

    def backward(g):
        blocks = dict(zip(order, g.split([received[r] for r in order])))
        return move(torch.cat([blocks[r] for r in range(n)]), received, counts)

    return Node.apply(x, lambda x: move(x, counts, received, order), backward), received


def exchange_rows__by_step(x, counts):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = counts_of_others(counts)
    return moved(x, counts, received, [(rank - step) % n for step in range(n)]), received


def exchange_rows__no_function(x, counts):
    received = counts_of_others(counts)
    return move(x, counts, received), received


def exchange_rows__detached(x, counts):
    received = counts_of_others(counts)
    with torch.no_grad():
        return moved(x, counts, received), received


def exchange_rows__all_to_everyone(x, counts):
    """All ranks get everything, and take their part."""
    rank, n = dist.get_rank(), dist.get_world_size()
    table = from_all(torch.tensor(counts))
    received = [int(row[rank]) for row in table]

    def everything(rows, lengths):
        return move(rows.repeat(n, 1), [len(rows)] * n, lengths).split(lengths)

    def forward(x):
        found = everything(x, [int(row.sum()) for row in table])
        return torch.cat([rows.split(row.tolist())[rank] for rows, row in zip(found, table)])

    return Node.apply(x, forward, lambda g: move(g, received, counts)), received


def exchange_rows__ring_of_everything(x, counts):
    """x goes round the ring with its counts, and so do the gradients."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def round_the_ring(rows, counts):
        table, found = from_all(torch.tensor(counts)), {rank: rows}
        for step in range(1, n):
            rows = passed_on(rows, (int(table[(rank - step) % n].sum()), x.shape[1]))
            found[(rank - step) % n] = rows
        mine = [found[r].split(table[r].tolist())[rank] for r in range(n)]
        return torch.cat(mine), [len(block) for block in mine]

    _, received = round_the_ring(x.detach(), counts)
    y = Node.apply(
        x, lambda x: round_the_ring(x, counts)[0], lambda g: round_the_ring(g, received)[0]
    )
    return y, received


# ---- 22b ----


class Layer:
    """A right layer in parts that can be spoiled."""

    def __init__(self, x, choice, gate, experts, sizes):
        self.x, self.choice, self.gate = x, choice, gate
        self.experts, self.sizes = experts, sizes
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.starts = [sum(sizes[:r]) for r in range(self.n + 1)]
        self.k = choice.shape[1]

    def owner(self, expert):
        return next(r for r in range(self.n) if expert < self.starts[r + 1])

    def kept(self):
        """(token, slot) of all that travel, in the order of their experts."""
        pairs = [(t, j) for t in range(len(self.x)) for j in range(self.k)]
        pairs = [(t, j) for t, j in pairs if self.choice[t, j] >= 0]
        return sorted(pairs, key=lambda pair: self.expert_of(*pair))

    def expert_of(self, t, j):
        return int(self.choice[t, j])

    def received(self, sent):
        return counts_of_others(sent)

    def move(self, rows, sent, received):
        return moved(rows, sent, received)

    def compute(self, rows, numbers):
        result = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mine = (numbers == e + self.starts[self.rank]).nonzero().flatten()
            result = result.index_add(0, mine, expert(rows[mine]))
        return result

    def weighed(self, rows, pairs):
        tokens, slots = (torch.tensor(part, dtype=torch.int64) for part in zip(*pairs))
        weights = self.gate[tokens, slots][:, None]
        return torch.zeros_like(self.x).index_add(0, tokens, rows * weights)

    def __call__(self):
        pairs = self.kept()
        tokens = torch.tensor([t for t, _ in pairs], dtype=torch.int64)
        numbers = [self.expert_of(*pair) for pair in pairs]
        owners = [self.owner(e) for e in numbers]
        sent = [owners.count(r) for r in range(self.n)]
        received = self.received(sent)
        # the number of each row's expert travels beside it
        theirs = move(torch.tensor(numbers, dtype=torch.int64).reshape(-1, 1), sent, received)
        rows = self.move(self.x[tokens], sent, received)
        rows = self.compute(rows, theirs.flatten())
        back = self.move(rows, received, sent)
        if not pairs:
            return back.sum() * self.gate.sum() + 0 * self.x
        return self.weighed(back, pairs)


def by_hand(x, choice, gate, experts, sizes, back_home, share=None):
    """Another whole layer, with tensors only. back_home(rows, order, k) puts rows in place."""
    k, start = choice.shape[1], sum(sizes[: dist.get_rank()])
    flat = choice.reshape(-1)
    order = flat.argsort(stable=True)
    order = order[flat[order] >= 0]
    per_expert = torch.bincount(flat[order], minlength=sum(sizes))
    sent = [int(part.sum()) for part in per_expert.split(sizes)]
    received = counts_of_others(sent)
    numbers = move(flat[order][:, None], sent, received)[:, 0]
    rows = moved(x[order.div(k, rounding_mode="floor")], sent, received)
    found, places = [rows[:0]], [numbers[:0]]
    for e, expert in enumerate(experts):
        places.append((numbers == start + e).nonzero()[:, 0])
        found.append(expert(rows[places[-1]]))
    computed = torch.cat(found)[torch.cat(places).argsort()]
    return back_home(moved(computed, received, sent), order, k)


def mixture_of_experts__sorted(x, choice, gate, experts, sizes):
    """The rows come back in the order of the experts, and are taken as they are."""

    class Sorted(Layer):
        def weighed(self, rows, pairs):
            whole = rows.new_zeros(len(self.x) * self.k, rows.shape[1])
            whole = torch.cat([rows, whole[len(rows) :]]).view(len(self.x), self.k, -1)
            return (whole * self.gate[..., None]).sum(1)

    return Sorted(x, choice, gate, experts, sizes)()


def mixture_of_experts__sorted_gates(x, choice, gate, experts, sizes):
    def back_home(rows, order, k):
        rows = rows * gate.reshape(-1)[order, None]
        rows = torch.cat([rows, rows.new_zeros(len(x) * k - len(rows), x.shape[1])])
        return rows.view(len(x), k, -1).sum(1)

    return by_hand(x, choice, gate, experts, sizes, back_home)


def mixture_of_experts__sorted_twice(x, choice, gate, experts, sizes):
    """rows[order] in place of result[order] = rows."""

    def back_home(rows, order, k):
        rows = torch.cat([rows, rows.new_zeros(len(x) * k - len(rows), x.shape[1])])
        order = torch.cat([order, torch.arange(len(order), len(rows))])
        return (rows[order].view(len(x), k, -1) * gate[..., None]).sum(1)

    return by_hand(x, choice, gate, experts, sizes, back_home)


def at_home(x, gate):
    def back_home(rows, order, k):
        whole = x.new_zeros(len(x) * k, x.shape[1]).index_add(0, order, rows)
        return (whole.view(len(x), k, x.shape[1]) * gate[..., None]).sum(1)

    return back_home


def mixture_of_experts__gate_detached(x, choice, gate, experts, sizes):
    return Layer(x, choice, gate.detach(), experts, sizes)()


def mixture_of_experts__one_function(x, choice, gate, experts, sizes):
    """The product with the gate is a function with a gradient for the rows alone."""

    def back_home(rows, order, k):
        weights = gate.detach().reshape(-1)[order, None]
        weighed = Node.apply(rows, lambda rows: rows * weights, lambda g: g * weights)
        return x.new_zeros(x.shape).index_add(0, order // k, weighed)

    return by_hand(x, choice, gate, experts, sizes, back_home)


def mixture_of_experts__minus_one(x, choice, gate, experts, sizes):
    """−1 is taken as Python takes it."""
    return Layer(x, choice % sum(sizes), gate, experts, sizes)()


def mixture_of_experts__clamped(x, choice, gate, experts, sizes):
    choice = choice.clamp(min=0)
    return by_hand(x, choice, gate, experts, sizes, at_home(x, gate))


def mixture_of_experts__passed_through(x, choice, gate, experts, sizes):
    """A token whose expert was full keeps its own value."""
    y = by_hand(x, choice, gate, experts, sizes, at_home(x, gate))
    return y + x * (gate * (choice < 0)).sum(1, keepdim=True)


def mixture_of_experts__no_gate(x, choice, gate, experts, sizes):
    return Layer(x, choice, torch.ones_like(gate), experts, sizes)()


def mixture_of_experts__no_gate_sum(x, choice, gate, experts, sizes):
    def back_home(rows, order, k):
        return torch.zeros_like(x).index_add(0, order // k, rows)

    return by_hand(x, choice, gate, experts, sizes, back_home)


def mixture_of_experts__evenly(x, choice, gate, experts, sizes):
    even = [sum(sizes) // len(sizes)] * len(sizes)
    return by_hand(x, choice, gate, experts, even, at_home(x, gate))


def mixture_of_experts__own_size(x, choice, gate, experts, sizes):
    class OwnSize(Layer):
        def owner(self, expert):
            return min(expert // len(self.experts), self.n - 1)

    return OwnSize(x, choice, gate, experts, sizes)()


def mixture_of_experts__leaves_early(x, choice, gate, experts, sizes):
    if not len(x):
        return x
    return Layer(x, choice, gate, experts, sizes)()


def mixture_of_experts__no_graph(x, choice, gate, experts, sizes):
    """A rank whose experts get no rows sends back zeros that have no graph."""

    class NoGraph(Layer):
        def compute(self, rows, numbers):
            return super().compute(rows, numbers) if len(rows) else torch.zeros(rows.shape).to(x)

        def move(self, rows, sent, received):
            if not rows.requires_grad:
                return move(rows, sent, received)
            return super().move(rows, sent, received)

    return NoGraph(x, choice, gate, experts, sizes)()


def mixture_of_experts__cat_of_nothing(x, choice, gate, experts, sizes):
    """Only experts that somebody chose are run, and their results joined."""

    class Joined(Layer):
        def compute(self, rows, numbers):
            found, places = [], []
            for e in numbers.unique().tolist():
                places.append((numbers == e).nonzero()[:, 0])
                found.append(self.experts[e - self.starts[self.rank]](rows[places[-1]]))
            return torch.cat(found)[torch.cat(places).argsort()]

    return Joined(x, choice, gate, experts, sizes)()


def mixture_of_experts__range_of_experts(x, choice, gate, experts, sizes):
    """It looks for the first row of each expert, which an expert without rows doesn't have."""

    class FirstRow(Layer):
        def compute(self, rows, numbers):
            for e in range(len(self.experts)):
                (numbers == self.starts[self.rank] + e).nonzero()[0]
            return super().compute(rows, numbers)

    return FirstRow(x, choice, gate, experts, sizes)()


def mixture_of_experts__own_counts(x, choice, gate, experts, sizes):
    class OwnCounts(Layer):
        def received(self, sent):
            return sent

    return OwnCounts(x, choice, gate, experts, sizes)()


def mixture_of_experts__symmetric_halves(x, choice, gate, experts, sizes):
    """Every rank expects the same number from each rank."""

    class Halves(Layer):
        def received(self, sent):
            return [sum(sent) // self.n] * self.n

    return Halves(x, choice, gate, experts, sizes)()


def mixture_of_experts__cut(x, choice, gate, experts, sizes):
    class Cut(Layer):
        def move(self, rows, sent, received):
            return move(rows, sent, received)

    return Cut(x, choice, gate, experts, sizes)()


def mixture_of_experts__cut_on_the_way(x, choice, gate, experts, sizes):
    """Rows have no graph on their way to the experts; they have one on their way back."""

    class CutOnTheWay(Layer):
        def kept(self):
            self.x = self.x.detach()
            return super().kept()

    return CutOnTheWay(x, choice, gate, experts, sizes)()


def mixture_of_experts__no_adjoint(x, choice, gate, experts, sizes):
    class NoAdjoint(Layer):
        def move(self, rows, sent, received):
            return Node.apply(rows, lambda x: move(x, sent, received), lambda g: 0 * rows.detach())

    return NoAdjoint(x, choice, gate, experts, sizes)()


def mixture_of_experts__zero_gradient(x, choice, gate, experts, sizes):
    """The experts learn; the way to them gives zeros back."""
    rows = Node.apply(x, lambda x: x.clone(), torch.zeros_like)
    return by_hand(rows, choice, gate, experts, sizes, at_home(x, gate))


def mixture_of_experts__dense(x, choice, gate, experts, sizes):
    """All tokens go to all ranks; each computes what chose its experts, and sends all rows back."""
    rank, n = dist.get_rank(), dist.get_world_size()
    lengths = counts_of_others([len(x)] * n)
    mine = [len(x)] * n
    rows = moved(x.repeat(n, 1), mine, lengths)
    chosen = move(choice.repeat(n, 1), mine, lengths)
    results = []
    for j in range(choice.shape[1]):
        result = 0 * rows
        for e, expert in enumerate(experts, start=sum(sizes[:rank])):
            hit = (chosen[:, j] == e).nonzero().flatten()
            result = result.index_add(0, hit, expert(rows[hit]))
        results.append(moved(result, lengths, mine).view(n, *x.shape).sum(0))
    return sum(gate[:, j, None] * result for j, result in enumerate(results))


def mixture_of_experts__gathered(x, choice, gate, experts, sizes):
    """All-gather of tokens, choices and gates, and then a sum over the ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    lengths, mine = counts_of_others([len(x)] * n), [len(x)] * n
    rows, gates = (moved(t.repeat(n, 1), mine, lengths) for t in (x, gate))
    chosen = move(choice.repeat(n, 1), mine, lengths)
    result = 0 * rows
    for e, expert in enumerate(experts, start=sum(sizes[:rank])):
        hit, j = (chosen == e).nonzero(as_tuple=True)
        result = result.index_add(0, hit, expert(rows[hit]) * gates[hit, j][:, None])
    return moved(result, lengths, mine).view(n, *x.shape).sum(0)


def mixture_of_experts__all_experts(x, choice, gate, experts, sizes):
    class All(Layer):
        def compute(self, rows, numbers):
            whole = torch.stack([expert(rows) for expert in self.experts])
            return whole[numbers - self.starts[self.rank], torch.arange(len(rows))]

    return All(x, choice, gate, experts, sizes)()


def mixture_of_experts__loop_and_mask(x, choice, gate, experts, sizes):
    class Masked(Layer):
        def compute(self, rows, numbers):
            result = 0 * rows
            for e, expert in enumerate(self.experts, start=self.starts[self.rank]):
                result = torch.where((numbers == e)[:, None], expert(rows), result)
            return result

    return Masked(x, choice, gate, experts, sizes)()
