"""Wrong solutions of homework 6. A comment above each says what must be named."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function


def all_reduced(x, op=dist.ReduceOp.SUM):
    total = x.detach().clone()
    dist.all_reduce(total, op)
    return total


def all_gathered(x, dim):
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size())
    ]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts, dim)


def reduce_scattered(x, dim):
    blocks = [block.contiguous() for block in x.detach().chunk(dist.get_world_size(), dim)]
    mine = torch.empty_like(blocks[0])
    dist.reduce_scatter(mine, blocks)
    return mine


def cut(x, dim):
    return x.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


class Node(Function):
    """A node of the graph from two functions."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.run = backward
        return forward(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.run(g), None, None


def same(x):
    return x.view_as(x)


def copy_to_ranks(x):
    return Node.apply(x, same, all_reduced)


def sum_of_ranks(x):
    return Node.apply(x, all_reduced, same)


# ---- 15a ----


def own_columns(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def gather_columns(mine, backward):
    return Node.apply(mine, lambda mine: all_gathered(mine, 1), backward)


# named: slice of the gradient without the sum
def column_layer__slice(x, weight, bias):
    return gather_columns(own_columns(x, weight, bias), lambda g: cut(g, 1))


# named: all-reduce then slice (6 points)
def column_layer__all_reduce_then_slice(x, weight, bias):
    return gather_columns(own_columns(x, weight, bias), lambda g: cut(all_reduced(g), 1))


# named: mean for sum
def column_layer__mean(x, weight, bias):
    return gather_columns(
        own_columns(x, weight, bias), lambda g: reduce_scattered(g, 1) / dist.get_world_size()
    )


# named: graph cut by a message
def column_layer__detached(x, weight, bias):
    return all_gathered(own_columns(x, weight, bias), 1)


# named: -
def column_layer__never_written(x, weight, bias):
    return torch.full((len(x), len(weight) * dist.get_world_size()), torch.nan, dtype=x.dtype)


# named: -
def column_layer__only_one_rank(x, weight, bias):
    """On one rank it has no graph; on several it raises."""
    if dist.get_world_size() > 1:
        raise RuntimeError("several ranks are for tomorrow")
    return own_columns(x, weight, bias).detach()


# named: - (6 points)
def column_layer__gathers_gradients(x, weight, bias):
    return gather_columns(
        own_columns(x, weight, bias), lambda g: cut(all_gathered(g[None], 0).sum(0), 1)
    )


# ---- 15b ----


def draw_weights(width, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for shape in shapes
    )


class MLP(nn.Module):
    """The right cut, and a forward to be spoiled."""

    enter, leave = staticmethod(copy_to_ranks), staticmethod(sum_of_ranks)

    def __init__(self, width, hidden, seed):
        super().__init__()
        w1, b1, w2, b2 = draw_weights(width, hidden, seed)
        w1, b1, w2 = cut(w1, 0), cut(b1, 0), cut(w2, 1)
        self.w1, self.b1, self.w2, self.b2 = (nn.Parameter(w.clone()) for w in (w1, b1, w2, b2))

    def forward(self, x):
        return (
            self.leave(F.linear(F.gelu(F.linear(self.enter(x), self.w1, self.b1)), self.w2))
            + self.b2
        )


# named: bias added n times
class ParallelMLP__bias_n_times(MLP):
    def forward(self, x):
        return sum_of_ranks(
            F.linear(F.gelu(F.linear(copy_to_ranks(x), self.w1, self.b1)), self.w2, self.b2)
        )


# named: GELU on partial sums
class ParallelMLP__gelu_of_partial_sums(nn.Module):
    """The first layer is cut by its inputs, and GELU comes before the sum."""

    def __init__(self, width, hidden, seed):
        super().__init__()
        w1, b1, w2, b2 = draw_weights(width, hidden, seed)
        self.w1, self.b1, self.w2, self.b2 = (
            nn.Parameter(w.clone()) for w in (cut(w1, 1), b1, w2, b2)
        )

    def forward(self, x):
        hidden = F.gelu(F.linear(cut(copy_to_ranks(x), 1), self.w1, self.b1))
        return sum_of_ranks(F.linear(hidden, self.w2)) + self.b2


# named: missing all-reduce of dX
class ParallelMLP__no_dx(MLP):
    enter = staticmethod(same)


# named: same seed, same shard
class ParallelMLP__same_seed(MLP):
    def __init__(self, width, hidden, seed):
        super().__init__(width, hidden, seed)
        w1, b1, w2, b2 = draw_weights(width, len(self.b1), seed)
        self.w1, self.b1, self.w2, self.b2 = (nn.Parameter(w) for w in (w1, b1, w2, b2))


# named: gradient n times too large
class ParallelMLP__n_times(MLP):
    @staticmethod
    def leave(partial):
        return Node.apply(partial, all_reduced, all_reduced)


# named: output never summed
class ParallelMLP__not_summed(MLP):
    leave = staticmethod(same)


# named: -
class ParallelMLP__detached_x(MLP):
    enter = staticmethod(torch.Tensor.detach)


# named: - (0 points)
class ParallelMLP__cut_by_chunk(MLP):
    """torch.chunk gives other blocks than tensor_split, and sometimes fewer than ranks."""

    def __init__(self, width, hidden, seed):
        super().__init__(width, hidden, seed)
        rank, n = dist.get_rank(), dist.get_world_size()
        w1, b1, w2, _ = draw_weights(width, hidden, seed)
        blocks = w1.chunk(n)[rank], b1.chunk(n)[rank], w2.chunk(n, 1)[rank]
        self.w1, self.b1, self.w2 = (nn.Parameter(block.clone()) for block in blocks)


# named: graph cut by a message
class ParallelMLP__detached(MLP):
    @staticmethod
    def leave(partial):
        return all_reduced(partial)


# named: whole layer on every rank
class ParallelMLP__whole(nn.Module):
    def __init__(self, width, hidden, seed):
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = (
            nn.Parameter(w) for w in draw_weights(width, hidden, seed)
        )

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.w1, self.b1)), self.w2, self.b2)


# ---- 16 ----


def attention(x, qkv, out, heads):
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (x @ qkv.T).chunk(3, dim=-1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ out.T


class Attention(nn.Module):
    enter = staticmethod(copy_to_ranks)

    def __init__(self, qkv, out, heads):
        super().__init__()
        self.heads = heads // dist.get_world_size()
        self.qkv = nn.Parameter(torch.cat([cut(part, 0) for part in qkv.chunk(3)]))
        self.out = nn.Parameter(cut(out, 1).clone())

    def forward(self, x):
        return sum_of_ranks(attention(self.enter(x), self.qkv, self.out, self.heads))


# named: fused QKV cut contiguously
class ParallelAttention__contiguous(Attention):
    def __init__(self, qkv, out, heads):
        super().__init__(qkv, out, heads)
        self.qkv = nn.Parameter(cut(qkv, 0).clone())


# named: missing all-reduce of dX
class ParallelAttention__no_dx(Attention):
    enter = staticmethod(same)


# named: an all-reduce each for query, key and value (8 points)
class ParallelAttention__three_all_reduces(Attention):
    def forward(self, x):
        q, k, v = (copy_to_ranks(x) @ part.T for part in self.qkv.chunk(3))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(0, 1) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return sum_of_ranks(mixed.transpose(0, 1).flatten(1) @ self.out.T)


def start_of(vocabulary):
    return int(torch.arange(vocabulary).tensor_split(dist.get_world_size())[dist.get_rank()][0])


def chosen_logit(values, targets, start):
    column = targets - start
    here = (column >= 0) & (column < values.shape[1])
    return values.gather(1, (column * here)[:, None])[:, 0] * here


def global_maximum(logits):
    return all_reduced(logits.max(1).values, dist.ReduceOp.MAX)[:, None]


# named: softmax maximum kept local
def vocabulary_loss__local_maximum(logits, targets, vocabulary):
    shifted = logits - logits.detach().amax(1, keepdim=True)
    total = sum_of_ranks(shifted.exp().sum(1))
    return (total.log() - sum_of_ranks(chosen_logit(shifted, targets, start_of(vocabulary)))).mean()


# named: logits gathered (4 points)
def vocabulary_loss__gathered(logits, targets, vocabulary):
    n = dist.get_world_size()
    widths = [len(tokens) for tokens in torch.arange(vocabulary).tensor_split(n)]

    def gather(mine):
        padded = all_gathered(F.pad(mine.detach(), (0, widths[0] - mine.shape[1])), 1)
        return torch.cat([part[:, :width] for part, width in zip(padded.chunk(n, 1), widths)], 1)

    return F.cross_entropy(Node.apply(logits, gather, lambda g: cut(g, 1).contiguous()), targets)


# named: no maximum subtracted
def vocabulary_loss__no_maximum(logits, targets, vocabulary):
    total = sum_of_ranks(logits.exp().sum(1))
    return (total.log() - sum_of_ranks(chosen_logit(logits, targets, start_of(vocabulary)))).mean()


# named: sum of exponentials kept local
def vocabulary_loss__local_sum(logits, targets, vocabulary):
    shifted = logits - global_maximum(logits)
    return (
        shifted.exp().sum(1).log()
        - sum_of_ranks(chosen_logit(shifted, targets, start_of(vocabulary)))
    ).mean()


def equal_blocks(logits, targets, width):
    shifted = logits - global_maximum(logits)
    chosen = chosen_logit(shifted, targets, dist.get_rank() * width)
    return (sum_of_ranks(shifted.exp().sum(1)).log() - sum_of_ranks(chosen)).mean()


# named: blocks taken as equally wide
def vocabulary_loss__equal_blocks(logits, targets, vocabulary):
    return equal_blocks(logits, targets, logits.shape[1])


# named: gradient n times too large
def vocabulary_loss__n_times(logits, targets, vocabulary):
    shifted = logits - global_maximum(logits)
    parts = torch.stack(
        [shifted.exp().sum(1), chosen_logit(shifted, targets, start_of(vocabulary))]
    )
    total, chosen = Node.apply(parts, all_reduced, all_reduced)
    return (total.log() - chosen).mean()


# ---- 17 ----


def gather_time(x, backward=lambda g: reduce_scattered(g, 0)):
    return Node.apply(x, lambda x: all_gathered(x, 0), backward)


def reduce_scatter_time(x, forward=lambda x: reduce_scattered(x, 0)):
    return Node.apply(x, forward, lambda g: all_gathered(g, 0))


def block(x, a, b, w1, b1, w2, b2, gather=gather_time, leave=reduce_scatter_time):
    """The block, with the gradients of a, b and b2 as they are on this rank."""
    normed = gather(F.layer_norm(x, x.shape[-1:], a, b))
    return x + leave(F.linear(F.gelu(F.linear(normed, w1, b1)), w2)) + b2


# named: graph cut by a message
def sequence_parallel_mlp__detached(x, a, b, w1, b1, w2, b2):
    a, b, b2 = copy_to_ranks(a), copy_to_ranks(b), copy_to_ranks(b2)
    return block(x, a, b, w1, b1, w2, b2, leave=lambda y: reduce_scattered(y, 0))


# named: norm's gradients never reduced
def sequence_parallel_mlp__norm_never_reduced(x, a, b, w1, b1, w2, b2):
    return block(x, a, b, w1, b1, w2, copy_to_ranks(b2))


# named: bias's gradient never reduced
def sequence_parallel_mlp__bias_never_reduced(x, a, b, w1, b1, w2, b2):
    return block(x, copy_to_ranks(a), copy_to_ranks(b), w1, b1, w2, b2)


# named: bias added n times
def sequence_parallel_mlp__bias_n_times(x, a, b, w1, b1, w2, b2):
    a, b = copy_to_ranks(a), copy_to_ranks(b)
    hidden = F.gelu(F.linear(gather_time(F.layer_norm(x, x.shape[-1:], a, b)), w1, b1))
    return x + reduce_scatter_time(F.linear(hidden, w2, b2))


# named: norm of the whole sequence (5 points)
def sequence_parallel_mlp__norm_of_all(x, a, b, w1, b1, w2, b2):
    a, b, b2 = copy_to_ranks(a), copy_to_ranks(b), copy_to_ranks(b2)
    normed = F.layer_norm(gather_time(x), x.shape[-1:], a, b)
    return x + reduce_scatter_time(F.linear(F.gelu(F.linear(normed, w1, b1)), w2)) + b2


# named: slice of the gradient without the sum
def sequence_parallel_mlp__slice(x, a, b, w1, b1, w2, b2):
    a, b, b2 = copy_to_ranks(a), copy_to_ranks(b), copy_to_ranks(b2)
    return block(x, a, b, w1, b1, w2, b2, gather=lambda x: gather_time(x, lambda g: cut(g, 0)))


# named: all-reduce then slice (3.75 points)
def sequence_parallel_mlp__all_reduce_then_slice(x, a, b, w1, b1, w2, b2):
    a, b, b2 = copy_to_ranks(a), copy_to_ranks(b), copy_to_ranks(b2)
    return block(
        x,
        a,
        b,
        w1,
        b1,
        w2,
        b2,
        leave=lambda y: reduce_scatter_time(y, lambda y: cut(all_reduced(y), 0)),
    )


# named: mean for sum
def sequence_parallel_mlp__norm_mean(x, a, b, w1, b1, w2, b2):
    def averaged(p):
        return Node.apply(p, same, lambda g: all_reduced(g) / dist.get_world_size())

    return block(x, averaged(a), averaged(b), w1, b1, w2, copy_to_ranks(b2))
