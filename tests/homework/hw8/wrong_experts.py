"""Wrong solutions of homework 8, exercise 22.

A comment above each says what must be named.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F


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


# named: counts not exchanged
def exchange_rows__equal_blocks(x, counts):
    """Every rank gets its n-th part of x, whatever the counts say."""
    n = dist.get_world_size()
    sizes = [len(block) for block in x.tensor_split(n)]
    return moved(x, sizes, [sizes[0]] * n), [sizes[0]] * n


# named: rank without rows stays away
def exchange_rows__leaves_early(x, counts):
    if len(x) == 0:
        return x, [0] * dist.get_world_size()
    received = counts_of_others(counts)
    return moved(x, counts, received), received


# named: blocks padded to the longest
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


# named: gradient not sent back
def exchange_rows__own_gradient(x, counts):
    received, rank = counts_of_others(counts), dist.get_rank()

    def backward(g):
        blocks = [g.new_zeros(count, g.shape[1]) for count in counts]
        blocks[rank] = g.split(received)[rank]
        return torch.cat(blocks)

    return Node.apply(x, lambda x: move(x, counts, received), backward), received


# named: joined in the wrong order
def exchange_rows__by_step(x, counts):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = counts_of_others(counts)
    return moved(x, counts, received, [(rank - step) % n for step in range(n)]), received


# named: autograd not told
def exchange_rows__no_function(x, counts):
    received = counts_of_others(counts)
    return move(x, counts, received), received


# named: whole tensor shipped
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


# named: inverse permutation missing
def mixture_of_experts__sorted(x, choice, gate, experts, sizes):
    """The rows come back in the order of the experts, and are taken as they are."""

    class Sorted(Layer):
        def weighed(self, rows, pairs):
            whole = rows.new_zeros(len(self.x) * self.k, rows.shape[1])
            whole = torch.cat([rows, whole[len(rows) :]]).view(len(self.x), self.k, -1)
            return (whole * self.gate[..., None]).sum(1)

    return Sorted(x, choice, gate, experts, sizes)()


def at_home(x, gate):
    def back_home(rows, order, k):
        whole = x.new_zeros(len(x) * k, x.shape[1]).index_add(0, order, rows)
        return (whole.view(len(x), k, x.shape[1]) * gate[..., None]).sum(1)

    return back_home


# named: gradients of the gate lost
def mixture_of_experts__gate_detached(x, choice, gate, experts, sizes):
    return Layer(x, choice, gate.detach(), experts, sizes)()


# named: dropped tokens counted
def mixture_of_experts__minus_one(x, choice, gate, experts, sizes):
    """−1 is taken as Python takes it."""
    return Layer(x, choice % sum(sizes), gate, experts, sizes)()


# named: gate forgotten
def mixture_of_experts__no_gate(x, choice, gate, experts, sizes):
    return Layer(x, choice, torch.ones_like(gate), experts, sizes)()


# named: experts taken as evenly cut
def mixture_of_experts__evenly(x, choice, gate, experts, sizes):
    even = [sum(sizes) // len(sizes)] * len(sizes)
    return by_hand(x, choice, gate, experts, even, at_home(x, gate))


# named: rank without rows stays away
def mixture_of_experts__leaves_early(x, choice, gate, experts, sizes):
    if not len(x):
        return x
    return Layer(x, choice, gate, experts, sizes)()


# named: empty expert fails
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


# named: counts not exchanged
def mixture_of_experts__own_counts(x, choice, gate, experts, sizes):
    class OwnCounts(Layer):
        def received(self, sent):
            return sent

    return OwnCounts(x, choice, gate, experts, sizes)()


# named: graph cut by a message
def mixture_of_experts__cut(x, choice, gate, experts, sizes):
    class Cut(Layer):
        def move(self, rows, sent, received):
            return move(rows, sent, received)

    return Cut(x, choice, gate, experts, sizes)()


# named: gradient stops at the message
def mixture_of_experts__no_adjoint(x, choice, gate, experts, sizes):
    class NoAdjoint(Layer):
        def move(self, rows, sent, received):
            return Node.apply(rows, lambda x: move(x, sent, received), lambda g: 0 * rows.detach())

    return NoAdjoint(x, choice, gate, experts, sizes)()


# named: every row to every rank
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


# named: every expert computes every row
def mixture_of_experts__all_experts(x, choice, gate, experts, sizes):
    class All(Layer):
        def compute(self, rows, numbers):
            whole = torch.stack([expert(rows) for expert in self.experts])
            return whole[numbers - self.starts[self.rank], torch.arange(len(rows))]

    return All(x, choice, gate, experts, sizes)()
