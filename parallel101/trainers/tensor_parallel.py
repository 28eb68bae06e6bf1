"""Tensor parallel: each rank holds a block of every weight matrix, and computes with that block.

          ┌─ W₀ ─ gelu ─ V₀ ─┐            column   some rows of W (outputs, inputs), so some outputs
    x ─▶──┤                  ├─ + ─▶ y    row      some columns of V, so it takes some inputs
          └─ W₁ ─ gelu ─ V₁ ─┘

              forward                                      backward
    column    h = x Wᵀ + b, no message                     ∂x = Σ g W over the ranks, in flight
                                                           while ∂W = gᵀ x, ∂b = Σ g are computed
    row       y = Σ h Vᵀ over the ranks, then + c          ∂h = g V, ∂V = gᵀ h, ∂c = Σ g, no message

A pair costs one all-reduce in each direction, and what is elementwise between the two needs none.
With sequence parallel `tp` has other messages: see tensor/sequence.py. Which layer of a model is
cut and how is in tensor/plan.py. Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.mesh import split_sizes
from parallel101.spans import span, wait_span
from parallel101.trainers.layout import Shard
from parallel101.trainers.tensor.tensor_group import TensorGroup
from parallel101.trainers.torch_functions import GraphNode
from parallel101.trainers.weight_gradients import WeightGradients, split_backward, split_linear


def sum_backward(x: Tensor, tp: TensorGroup, meanwhile: WeightGradients | None) -> Tensor:
    """Pass activations that every rank has to column layers: Megatron's f. Layers with the same
    input share this node, and so one all-reduce: query, key and value, for example.
    """

    def backward(part: Tensor) -> Tensor:
        wait = tp.begin_sum(part)  # an all-reduce of this rank's part of ∂x: in flight …
        if meanwhile is not None:
            with span("weight gradient"):
                meanwhile.run()  # … while ∂W and ∂b are computed
        with wait_span("wait for the sum"):
            return wait()

    return GraphNode.apply(lambda x: (tp.gather(x, tp.times), backward), x)  # x itself: no message


def sum_forward(part: Tensor, tp: TensorGroup) -> Tensor:
    """Sum the results of row layers to activations that every rank has: Megatron's g."""

    def forward(part: Tensor) -> tuple[Tensor, Any]:
        with wait_span("wait for the sum"):
            y = tp.sum(part)  # an all-reduce
        times = tp.times
        return y, lambda g: tp.gather(g, times)  # g itself: no message

    return GraphNode.apply(forward, part)


# ── layers: what takes the place of the forward of an nn.Linear or nn.Embedding that is cut ──


def column_linear(
    layer: nn.Linear, x: Tensor, *, tp: TensorGroup, deferred: bool, join: Sequence[int] | None
) -> Tensor:
    """Compute (…, in) → (…, this rank's part of out).

    Args:
        deferred: False for a weight that is tied: autograd adds up its gradients.
        join: the ranks' parts of the outputs, to gather them.
    """
    whole, shared = tp.once(x, partial(enter, tp))
    if shared is None or not deferred:
        y = F.linear(whole, layer.weight, layer.bias)
    else:
        later, keep = shared
        y = split_linear(whole, layer.weight, layer.bias, later, keep=keep)
    return y if join is None else tp.join(y, join)


def enter(tp: TensorGroup, x: Tensor) -> tuple[Tensor, Any]:
    """Return x for all column layers that have this input; and where they leave their ∂W, what
    they keep of x, and how backward makes x of that.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return tp.gather(x, tp.times), None
    split = split_backward()  # if there is one, the schedule says when ∂W is computed
    later = WeightGradients() if split is None else split
    whole = sum_backward(x, tp, later if split is None else None)
    return whole, (later, (x.detach(), tp.gather_again()) if tp.regather else None)


def row_linear(layer: nn.Linear, x: Tensor, *, tp: TensorGroup) -> Tensor:
    """Compute (…, this rank's part of in) → (…, out). The sum gets the whole bias."""
    part = F.linear(x, layer.weight)  # its backward is autograd's: ∂x = g V, ∂V = gᵀ x
    y = sum_forward(part, tp)
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def vocabulary_embedding(
    table: nn.Embedding, tokens: Tensor, *, tp: TensorGroup, start: int
) -> Tensor:
    """Compute an embedding (…) → (…, features) with the table's rows from `start` on. Tokens of
    other ranks become zeros, and the sum over ranks has every token's row.
    """
    check_tokens(tokens, table.num_embeddings)
    rows, weight, padding = len(table.weight), table.weight, table.padding_idx
    here = (tokens >= start) & (tokens < start + rows)
    if padding is not None:
        padding = padding - start if start <= padding < start + rows else None
    weight = weight if rows else F.pad(weight, (0, 0, 0, 1))
    y = F.embedding((tokens - start) * here, weight, padding)
    return sum_forward(y.masked_fill(~here[..., None], 0), tp)


def check_tokens(tokens: Tensor, rows: int) -> None:
    if tokens.is_meta or not tokens.numel():
        return
    if not (tokens.min() >= 0 and tokens.max() < rows):
        raise IndexError(
            f"tokens range from {tokens.min()} to {tokens.max()}, but the embedding has {rows} rows"
        )


def cut_heads(outputs: int, ranks: int, heads: int | None = None, parts: int = 1) -> Shard:
    """Return the cut of a column layer's outputs. With parts=3 they are query, key and value side
    by side, [Q | K | V], and rank 0 of 2 gets the first half of the heads of each: [Q₀ | K₀ | V₀].
    """
    part = outputs // parts
    unit = 1 if heads is None else part // heads  # what stays together: the features of a head
    sizes = [unit * n for n in split_sizes(part // unit, ranks)]
    return Shard(0, tuple(parts * n for n in sizes), parts)
