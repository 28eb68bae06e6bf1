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

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel101.mesh import split_sizes
from parallel101.spans import span, wait_span
from parallel101.trainers.layout import Shard
from parallel101.trainers.tensor.tensor_group import Entered, TensorGroup
from parallel101.trainers.weight_gradients import WeightGradients, positions, split_backward


class SumBackward(Function):
    """Passes activations that every rank has to column layers: Megatron's f. Layers with the same
    input share this node, and so one all-reduce: query, key and value, for example.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorGroup, meanwhile: WeightGradients | None) -> Tensor:
        ctx.tp, ctx.meanwhile = tp, meanwhile
        return tp.gather(x, tp.times)  # x itself: no message

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, part: Tensor) -> tuple[Tensor, None, None]:
        wait = ctx.tp.begin_sum(part)  # an all-reduce of this rank's part of ∂x: in flight …
        if ctx.meanwhile is not None:
            with span("weight gradient"):
                ctx.meanwhile.run()  # … while ∂W and ∂b are computed
        with wait_span("wait for the sum"):
            return wait(), None, None


class SumForward(Function):
    """Sums the results of row layers to activations that every rank has: Megatron's g."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, tp: TensorGroup) -> Tensor:
        with wait_span("wait for the sum"):
            y = tp.sum(part)  # an all-reduce
        ctx.tp, ctx.times = tp, tp.times
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.gather(g, ctx.times), None  # g itself: no message


class Column(Function):
    """y = x Wᵀ + b, with this rank's rows of W and b. `kept`: x, or what x is gathered from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ColumnLinear, kept: Tensor, inputs: Entered) -> Tensor:
        ctx.save_for_backward(kept, layer.weight)
        ctx.layer, ctx.inputs = layer, inputs
        return F.linear(x, layer.weight, layer.bias).data  # not a view: y may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (kept, W), layer, later = ctx.saved_tensors, ctx.layer, ctx.inputs.later
        rows, x = positions(g), ctx.inputs.whole(kept)  # (batch · time, features)
        later.add(layer.weight, lambda: rows.t() @ positions(x).to(g.dtype))  # ∂W = gᵀ x
        later.add(layer.bias, lambda: rows.sum(0))  # ∂b
        return g @ W.to(g.dtype), None, None, None  # a part of ∂x: SumBackward adds up the ranks'


class ColumnLinear(nn.Module):
    """A linear layer (…, in) → (…, this rank's part of out)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorGroup):
        super().__init__()
        self.weight, self.bias, self.tp = weight, bias, tp
        self.deferred = True  # False for a weight that is tied: autograd adds up its gradients

    def forward(self, x: Tensor) -> Tensor:
        whole, inputs = self.tp.once(x, self.enter)
        if inputs is None or not self.deferred:
            return F.linear(whole, self.weight, self.bias)
        return Column.apply(whole, self, x.detach() if inputs.regather else whole, inputs)

    def enter(self, x: Tensor) -> tuple[Tensor, Entered | None]:
        """Return x for all column layers that have this input, and what they share in backward."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return self.tp.gather(x, self.tp.times), None
        split = split_backward()  # if there is one, the schedule says when ∂W is computed
        later = WeightGradients() if split is None else split
        whole = SumBackward.apply(x, self.tp, later if split is None else None)
        return whole, Entered(self.tp, later)


class RowLinear(nn.Module):
    """A linear layer (…, this rank's part of in) → (…, out). The sum gets the whole bias."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorGroup):
        super().__init__()
        self.weight, self.bias, self.tp = weight, bias, tp

    def forward(self, x: Tensor) -> Tensor:
        part = F.linear(x, self.weight)  # its backward is autograd's: ∂x = g V, ∂V = gᵀ x
        y = SumForward.apply(part, self.tp)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyEmbedding(nn.Module):
    """An embedding (…) → (…, features) with the table's rows from `start` on. Tokens of other ranks
    become zeros, and the sum over ranks has every token's row.
    """

    def __init__(self, weight: nn.Parameter, start: int, padding: int | None, tp: TensorGroup):
        super().__init__()
        self.weight, self.start, self.padding, self.tp = weight, start, padding, tp

    def forward(self, tokens: Tensor) -> Tensor:
        here = (tokens >= self.start) & (tokens < self.start + len(self.weight))
        weight = self.weight if len(self.weight) else F.pad(self.weight, (0, 0, 0, 1))
        rows = F.embedding((tokens - self.start) * here, weight, self.padding)
        return SumForward.apply(rows.masked_fill(~here[..., None], 0), self.tp)


def cut_heads(outputs: int, ranks: int, heads: int | None = None, parts: int = 1) -> Shard:
    """Return the cut of a column layer's outputs. With parts=3 they are query, key and value side
    by side, [Q | K | V], and rank 0 of 2 gets the first half of the heads of each: [Q₀ | K₀ | V₀].
    """
    part = outputs // parts
    unit = 1 if heads is None else part // heads  # what stays together: the features of a head
    sizes = [unit * n for n in split_sizes(part // unit, ranks)]
    return Shard(0, tuple(parts * n for n in sizes), parts)
