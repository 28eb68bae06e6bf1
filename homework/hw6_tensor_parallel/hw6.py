"""Homework 6: tensor parallel layers, forward and backward.

You may use everything in torch.distributed, forward and backward: dist.send and dist.recv, and the
collectives (dist.all_reduce, dist.all_gather, dist.reduce_scatter, …). None of them has a backward
of its own: autograd does not see what they do. Where a message belongs to the graph, write a
torch.autograd.Function, with one message in forward and its adjoint in backward.
(torch.distributed.nn has some ready-made. Here you write your own.)

Weights are as in torch.nn.Linear: (outputs, inputs). All numbers are float64, n is the number of
ranks, and S is the number of bytes of the layer's whole output, 8 · samples · outputs. In a ring,
an all-gather or a reduce-scatter of S bytes sends (n − 1)/n·S bytes from each rank, and an
all-reduce twice as many.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# ---- 15a ----


def column_layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Run the lecture's layer: each rank computes some outputs, and all ranks gather them.

        rank 0  gelu(x·W₀ᵀ + b₀) ─┐                ┌─▶ y
                                  ├─ all-gather ───┤              y = [ y₀ y₁ ], side by side
        rank 1  gelu(x·W₁ᵀ + b₁) ─┘                └─▶ y

    Args:
        x: (samples, inputs), the same on every rank.
        weight: (outputs / n, inputs), this rank's rows of W.
        bias: (outputs / n), this rank's part of b.

    Returns:
        y: (samples, outputs), the same on every rank.

    Backward: the loss is the sum of the ranks' losses. They differ, so each rank has its own
    gradient of y. weight and bias get the whole gradient of this rank's block. x gets the part that
    comes through this rank's outputs. These parts are not added up here: the layer below does that
    in its own backward. Forward sends at most (n − 1)/n·S bytes from each rank, and so does
    backward.

    Points: 40 % value, 60 % bytes. Of the bytes, backward's count five times as much as forward's.
    """
    raise NotImplementedError("column_layer is not written yet")


# ---- 15b ----


def draw_weights(width: int, hidden: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw the weights of an MLP for one process (this is given).

    Returns w1 (hidden, width), b1 (hidden), w2 (width, hidden) and b2 (width).
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for shape in shapes
    )


class ParallelMLP(nn.Module):
    """An MLP, y = gelu(x·W1ᵀ + b1)·W2ᵀ + b2, cut along its hidden features.

    The first layer is cut by its outputs (column), the second by its inputs (row).

                ┌─ W1₀ ─ gelu ─ W2₀ ─┐
          x ──▶─┤                    ├─ + ──▶ + b2 ──▶ y         the hidden features never travel
                └─ W1₁ ─ gelu ─ W2₁ ─┘

    Args:
        width: the number of features of x and y.
        hidden: the number of features between the two layers.
        seed: the joined matrices are those that draw_weights(width, hidden, seed) gives.

    Attributes:
        w1: (hidden / n, width), an nn.Parameter: this rank's rows, as torch.tensor_split cuts them
            (n need not divide hidden, and may be larger).
        b1: (hidden / n): this rank's part, cut the same way.
        w2: (width, hidden / n): this rank's columns, cut the same way.
        b2: (width), the same on every rank.

    Points: 40 % value, 40 % bytes, 20 % memory.
    """

    def __init__(self, width: int, hidden: int, seed: int):
        super().__init__()
        raise NotImplementedError("ParallelMLP is not written yet")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (samples, width) to (samples, width), the same on every rank.

        Backward: every rank computes the same loss from the same y, and this loss counts once, so
        every rank has the same gradient of y. All gradients are those of one process: x and b2 get
        the whole gradient on every rank, the other weights this rank's block of theirs. Forward
        sends at most 2(n − 1)/n·S bytes from each rank, one all-reduce, and so does backward. A
        rank keeps hidden / n features of each sample for backward.
        """
        raise NotImplementedError("ParallelMLP is not written yet")


# ---- 16 ----


def attention(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, heads: int) -> torch.Tensor:
    """Compute causal attention in one process (this is given).

    Args:
        x: (time, width).
        qkv: (3·heads·d, width): the rows of all queries, then of all keys, then of all values. Each
            of the three has d rows per head.
        out: (width, heads·d).
        heads: the number of heads.

    Returns (time, width).
    """
    # (heads, time, d)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (x @ qkv.T).chunk(3, dim=-1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ out.T


class ParallelAttention(nn.Module):
    """Attention, cut by heads: each rank has heads / n whole heads, in order.

                         ┌─ heads 0, 1 ─ out₀ ─┐
          x ──▶──────────┤                     ├─ + ──▶ y
                         └─ heads 2, 3 ─ out₁ ─┘

    Args:
        qkv, out, heads: those of the whole layer, the same on every rank; see `attention`. n
            divides heads.

    Attributes:
        qkv: (3·width / n, width), an nn.Parameter: the queries' rows of this rank's heads, then
            their keys', then their values'.
        out: (width, width / n), an nn.Parameter: the columns of this rank's heads.

    Points: 30 % value, 60 % bytes, 10 % memory. Of the bytes, backward's count five times as much
    as forward's.
    """

    def __init__(self, qkv: torch.Tensor, out: torch.Tensor, heads: int):
        super().__init__()
        raise NotImplementedError("ParallelAttention is not written yet")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (time, width) to (time, width), the same on every rank.

        Backward is as in ParallelMLP: the loss is the same on every rank and counts once. Forward
        sends at most 2(n − 1)/n·S bytes from each rank, one all-reduce, and so does backward. A
        rank keeps the queries, keys and values of its own heads for backward.
        """
        raise NotImplementedError("ParallelAttention is not written yet")


def vocabulary_loss(logits: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the mean cross-entropy of logits that are cut along the vocabulary, never gathered.

        rank 0  [ logits of tokens 0 … 39 ]   ─┐
                                               ├─ a few numbers a position ──▶ the loss
        rank 1  [ logits of tokens 40 … 79 ]  ─┘

    Args:
        logits: (positions, vocabulary / n), this rank's tokens, as torch.tensor_split cuts them (n
            need not divide vocabulary).
        targets: (positions), numbers from 0 to vocabulary − 1, the same on every rank.
        vocabulary: the number of tokens, at least n.

    Returns:
        A scalar: what F.cross_entropy gives for the joined logits. Logits may be large: exp(1000)
        is infinite.

    Backward: the loss is the same on every rank and counts once. logits gets this rank's block of
    the gradient. Forward and backward together send at most the bytes of four all-reduces of one
    number for each position. For backward, a rank keeps at most two numbers for each of its logits.

    Points: 30 % value, 50 % bytes, 20 % memory. Of the bytes, forward's count four times as much as
    backward's.
    """
    raise NotImplementedError("vocabulary_loss is not written yet")


# ---- 17 ----


def sequence_parallel_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
) -> torch.Tensor:
    """Run a transformer block, y = x + mlp(norm(x)), with sequence parallelism.

    x and y are cut along time, and the MLP along its hidden features.

        x₀ ─ norm ─┐              ┌─ W1₀ ─ gelu ─ W2₀ ─┐                  ┌─ + b2 + x₀ ──▶ y₀
                   ├─ all-gather ─┤                    ├─ reduce-scatter ─┤
        x₁ ─ norm ─┘              └─ W1₁ ─ gelu ─ W2₁ ─┘                  └─ + b2 + x₁ ──▶ y₁

    Args:
        x: (time / n, width), this rank's positions.
        norm_weight, norm_bias: (width), those of F.layer_norm; the same on every rank.
        w1, b1: (hidden / n, width) and (hidden / n), this rank's rows.
        w2: (width, hidden / n), this rank's columns.
        b2: (width), the same on every rank.

    Returns:
        y: (time / n, width), at this rank's positions.

    Backward: each rank has the loss of its own positions, and the whole loss is their sum. All
    gradients are those of one process: this rank's positions of x, this rank's block of w1, b1 and
    w2, and the whole gradient of norm_weight, norm_bias and b2 on every rank. With S = 8 · time ·
    width, forward sends at most 2(n − 1)/n·S bytes from each rank, as an all-reduce does. Backward
    sends as many, plus the gradients of norm_weight, norm_bias and b2. It may gather a second time,
    for another (n − 1)/n·S. For backward, a rank keeps time / n positions, the gathered input of
    w1, and hidden / n features of each position.

    Points: 25 % value, 25 % bytes, 50 % memory.
    """
    raise NotImplementedError("sequence_parallel_mlp is not written yet")
