"""Odd but correct solutions of homework 6: they keep full points."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function


class ColumnLayerByHand(Function):
    """The whole layer in one function. It keeps x and computes again what backward needs."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        mine = F.gelu(x @ weight.T + bias).T.contiguous()
        whole = torch.empty(len(mine) * dist.get_world_size(), mine.shape[1], dtype=mine.dtype)
        dist.all_gather_into_tensor(whole, mine)
        return whole.T.contiguous()

    @staticmethod
    def backward(ctx, g):
        x, weight, bias = ctx.saved_tensors
        mine = torch.empty(len(bias), len(x), dtype=g.dtype)
        dist.reduce_scatter_tensor(mine, g.T.contiguous())
        z = x @ weight.T + bias
        dz = mine.T * (
            (1 + torch.erf(z / 2**0.5)) / 2 + z * torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5
        )
        return dz @ weight, dz.T @ x, dz.sum(0)


def column_layer__by_hand(x, weight, bias):
    return ColumnLayerByHand.apply(x, weight, bias)


def draw_weights(width, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for shape in shapes
    )


def summed(g):
    g = g.clone()
    dist.all_reduce(g)
    return g


class ParallelMLP__hooks(nn.Module):
    """A hook sums dX, and an all-reduce in place is the sum of the outputs: autograd takes it
    for nothing, which is its backward.
    """

    def __init__(self, width, hidden, seed):
        super().__init__()
        rank, n = dist.get_rank(), dist.get_world_size()
        w1, b1, w2, b2 = draw_weights(width, hidden, seed)
        mine = torch.arange(hidden).tensor_split(n)[rank]
        self.b2, self.w2 = nn.Parameter(b2), nn.Parameter(w2[:, mine])
        self.b1, self.w1 = nn.Parameter(b1[mine]), nn.Parameter(w1[mine])

    def forward(self, x):
        entered = x * 1
        entered.register_hook(summed)
        y = F.gelu(entered @ self.w1.T + self.b1) @ self.w2.T
        with torch.no_grad():
            dist.all_reduce(y)
        return y + self.b2


class ParallelAttention__head_by_head(nn.Module):
    """The softmax is written out, one head after the other.

    Reduce and broadcast in place of the all-reduce.
    """

    def __init__(self, qkv, out, heads):
        super().__init__()
        rank, n = dist.get_rank(), dist.get_world_size()
        width, self.heads = out.shape[0], heads // n
        mine = torch.arange(width).view(n, -1)[rank]
        self.qkv = nn.Parameter(qkv.view(3, width, width)[:, mine].flatten(0, 1))
        self.out = nn.Parameter(out[:, mine])

    def forward(self, x):
        entered = x.view_as(x)
        entered.register_hook(summed)
        q, k, v = (entered @ part.T for part in self.qkv.chunk(3))
        d, above = q.shape[1] // self.heads, torch.ones(len(x), len(x)).triu(1).bool()
        mixed = []
        for qh, kh, vh in zip(q.split(d, 1), k.split(d, 1), v.split(d, 1)):
            mixed.append((qh @ kh.T / d**0.5).masked_fill(above, -torch.inf).softmax(1) @ vh)
        y = torch.cat(mixed, 1) @ self.out.T
        with torch.no_grad():
            dist.reduce(y, 0)
            dist.broadcast(y, 0)
        return y


class VocabularyLoss(Function):
    """Softmax minus one-hot by hand. The widths of the blocks travel too: a small message more."""

    @staticmethod
    def forward(ctx, logits, targets):
        rank, n = dist.get_rank(), dist.get_world_size()
        widths = [torch.zeros((), dtype=torch.int64) for _ in range(n)]
        dist.all_gather(widths, torch.tensor(logits.shape[1]))
        start = int(sum(widths[:rank]))
        largest = logits.max(1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        softmax = (logits - largest[:, None]).exp()
        total = softmax.sum(1)
        dist.all_reduce(total)
        softmax /= total[:, None]
        rows = [i for i, t in enumerate(targets.tolist()) if start <= t < start + logits.shape[1]]
        columns = [int(targets[i]) - start for i in rows]
        chosen = torch.zeros_like(total)
        chosen[rows] = logits[rows, columns]
        dist.all_reduce(chosen)
        softmax[rows, columns] -= 1
        ctx.save_for_backward(softmax)
        return (total.log() + largest - chosen).mean()

    @staticmethod
    def backward(ctx, g):
        (gradient,) = ctx.saved_tensors
        return gradient * (g / len(gradient)), None


def vocabulary_loss__by_hand(logits, targets, vocabulary):
    return VocabularyLoss.apply(logits, targets)


class GatherAgain(Function):
    """The column layer of the block.

    It keeps this rank's positions only, and gathers again in backward, as Megatron-LM does.
    """

    @staticmethod
    def forward(ctx, mine, w1, b1):
        ctx.save_for_backward(mine, w1)
        return gather(mine) @ w1.T + b1

    @staticmethod
    def backward(ctx, g):
        mine, w1 = ctx.saved_tensors
        return cut_and_sum(g @ w1), g.T @ gather(mine), g.sum(0)


class CutAndSum(Function):
    @staticmethod
    def forward(ctx, partial):
        return cut_and_sum(partial)

    @staticmethod
    def backward(ctx, g):
        return gather(g)


def gather(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.cat(parts)


def cut_and_sum(partial):
    mine = torch.empty_like(partial.chunk(dist.get_world_size())[0])
    dist.reduce_scatter(
        mine, [block.contiguous() for block in partial.chunk(dist.get_world_size())]
    )
    return mine


def sequence_parallel_mlp__gather_again(x, norm_weight, norm_bias, w1, b1, w2, b2):
    small = torch.cat([norm_weight, norm_bias, b2])
    small.register_hook(summed)  # one all-reduce for the three
    norm_weight, norm_bias, b2 = small.chunk(3)
    normed = F.layer_norm(x, x.shape[1:], norm_weight, norm_bias)
    return x + b2 + CutAndSum.apply(F.gelu(GatherAgain.apply(normed, w1, b1)) @ w2.T)
