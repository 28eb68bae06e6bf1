"""The layers of tensor parallel: each holds this rank's block of a linear layer or an embedding.

          ┌─ W₀ ─ gelu ─ V₀ ─┐            column: no message forward; backward, the gradients of x are summed
    x ─▶──┤                  ├─ + ─▶ y     row:    forward, the partial outputs are summed; backward, no message
          └─ W₁ ─ gelu ─ V₁ ─┘            so a pair costs one all-reduce in each direction

A `Region` is what lies between the two: `enter` and `leave` send its messages (Megatron's f and g).
In backward the all-reduce is in flight while the weight gradients of the column layers are
computed. Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3; for sequence parallel
Korthikanti et al. (arXiv 2205.05198), 4.2.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel101 import autograd, collectives
from parallel101.autograd import gather_from_group, reduce_from_group, scatter_to_group
from parallel101.collectives.asynchronous import all_reduce_async, reduce_scatter_async
from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.record.spans import span, wait_span
from parallel101.trainers.weight_gradients import WeightGradients, at_entry, linear

TIME = 1  # the dim that sequence parallel cuts, of activations (batch, time, features)


class Region:
    """The way into column layers and out of row layers, for the layers of one model on one rank.

    Args: group: the ranks over which the layers are cut. cut_time: sequence parallel: outside of
        the region, activations are cut along time. Then `enter` gathers and `leave` scatters.
    """

    def __init__(self, group: GroupLike, cut_time: bool = False):
        self.group, self.cut_time = group, cut_time
        members = group_of(group)
        self.size, self.position = members.size, members.position or 0
        self.time = 0  # of the whole activations of this forward, where time is cut
        self.entry: Entry | None = None

    def enter(self, x: Tensor) -> tuple[Tensor, WeightGradients | None]:
        """The input for a column layer, and where its weight gradient may wait (None: for nothing).

        Column layers with the same input share it, and so its gradient, with one exchange in each
        direction.
        """
        summed = x.requires_grad and torch.is_grad_enabled()
        if not summed and not self.cut_time:
            return x, None
        entry = self.entry
        if entry is None or not entry.is_of(x):
            entry = self.entry = Entry(
                self, x, *(self.begin(x) if summed else (self.gather(x), None))
            )
        return entry.entered, entry.later

    def begin(self, x: Tensor) -> tuple[Tensor, WeightGradients]:
        later, run_here = at_entry()
        return Enter.apply(x, self, later if run_here else None), later

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of what the ranks' row layers computed, with sequence parallel this rank's
        times of it.
        """
        with wait_span("wait for the sum"):
            if not self.cut_time:
                return reduce_from_group(partial, group=self.group, algorithm="direct")
            self.time = time_of(partial)
            return autograd.reduce_scatter(partial, TIME, group=self.group, algorithm="direct")

    # ── sequence parallel ──

    @property
    def times(self) -> list[int]:
        return split_sizes(self.time, self.size)

    def gather(self, x: Tensor) -> Tensor:
        return collectives.all_gather(
            x, TIME, group=self.group, sizes=self.times, algorithm="direct"
        )

    def cut(self, x: Tensor) -> Tensor:
        """From whole activations to this rank's times."""
        self.time = time_of(x)
        return scatter_to_group(x, TIME, group=self.group, algorithm="direct")

    def join(self, x: Tensor) -> Tensor:
        """The other way."""
        return gather_from_group(x, TIME, group=self.group, sizes=self.times, algorithm="direct")

    def mine(self, x: Tensor) -> Tensor:
        """This rank's times of x, without a message."""
        return x.split(self.times, TIME)[self.position]

    def among_all(self, x: Tensor) -> Tensor:
        """This rank's times in their place among all times, the others zeros."""
        before, after = sum(self.times[: self.position]), sum(self.times[self.position + 1 :])
        return F.pad(x, (0, 0, before, after))

    def arrive(self, x: Tensor) -> None:
        """x, cut along time, comes from another stage of a pipeline: ask the other ranks how
        long the whole is, 8 bytes each.
        """
        mine = torch.tensor([x.shape[TIME]], device=x.device)
        self.time = int(collectives.all_gather(mine, group=self.group, algorithm="direct").sum())


class Entry:
    """The last tensor that came into the region.

    It lasts until the tensor dies, or backward has passed.
    """

    def __init__(self, region: Region, x: Tensor, entered: Tensor, later: WeightGradients | None):
        self.entered, self.later = entered, later
        self.version, self.mode = version_of(x), torch.is_grad_enabled()
        self.x = weakref.ref(x, lambda _: self.end(region))

    def is_of(self, x: Tensor) -> bool:
        """Whether x is that tensor, unchanged."""
        return (
            self.x() is x and self.version == version_of(x) and self.mode == torch.is_grad_enabled()
        )

    def end(self, region: Region) -> None:
        if region.entry is self:
            region.entry = None


def time_of(x: Tensor) -> int:
    if x.dim() != 3:
        raise ValueError(
            f"sequence_parallel: activations have shape {tuple(x.shape)}, expected (batch, "
            "time, features)"
        )
    return x.shape[TIME]


def version_of(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


class Enter(Function):
    """x into the region. Backward sums the gradients of x over the ranks, and meanwhile
    computes the weight gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region, later: WeightGradients | None) -> Tensor:
        ctx.region, ctx.later, ctx.times = region, later, region.times
        return region.gather(x) if region.cut_time else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        region = ctx.region
        region.entry = None
        g = g.movedim(TIME, 0).contiguous() if region.cut_time else g.contiguous()
        if region.cut_time:
            pending = reduce_scatter_async(g, group=region.group, sizes=ctx.times)
        else:
            # only column layers used x: g is a new tensor of theirs
            pending = all_reduce_async(g, group=region.group, out=g)
        if ctx.later is not None:
            with span("weight gradient"):
                ctx.later.run()
        with wait_span("wait for the sum"):
            total = pending.wait()
        return (total.movedim(0, TIME) if region.cut_time else total), None, None


# ── the layers ──


class ColumnLinear(nn.Module):
    """Some of the outputs of a linear layer: (…, in) → (…, this rank's part of out).

    Args: weight, bias: this rank's block. region: which the input enters. deferred: whether the
        weight gradient may be computed while messages are in flight; not if another layer shares
        the weight. gathered: how many outputs each rank computes, if an all-gather is to follow:
        then every rank returns (…, out).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        region: Region,
        *,
        deferred: bool = True,
        gathered: Sequence[int] | None = None,
    ):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.region, self.deferred, self.gathered = region, deferred, gathered

    def forward(self, x: Tensor) -> Tensor:
        entered, later = self.region.enter(x)
        y = linear(entered, self.weight, self.bias, later if self.deferred else None)
        if self.gathered is not None:
            return gather_from_group(
                y, -1, group=self.region.group, sizes=list(self.gathered), algorithm="direct"
            )
        return y

    def extra_repr(self) -> str:
        return (
            f"{self.weight.shape[1]} inputs, {self.weight.shape[0]} outputs here"
            + ", gathered" * (self.gathered is not None)
        )


class RowLinear(nn.Module):
    """Some of the inputs of a linear layer: (…, this rank's part of in) → (…, out), the sum over
    ranks. The bias is added once, after it.

    Args:
        weight: this rank's block.
        bias: the whole one.
        region: which the output leaves.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region):
        super().__init__()
        self.weight, self.bias, self.region = weight, bias, region

    def forward(self, x: Tensor) -> Tensor:
        y = self.region.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} inputs here, {self.weight.shape[0]} outputs"


class VocabularyEmbedding(nn.Module):
    """Some of the rows of an embedding: (…) tokens → (…, features).

    Tokens of other ranks become zeros here, and all are summed.

    Args: weight: this rank's rows. start, total: the first of them, and how many rows all ranks
        have. padding: the row of the whole embedding that gets no gradient, as in nn.Embedding.
        region: which the output leaves. among_all: with sequence parallel, return this rank's times
        among zeros for all times, since the module around this one may add
            something to all of them, such as positions. It keeps this rank's at its exit.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        start: int,
        total: int,
        padding: int | None,
        region: Region,
        among_all: bool = False,
    ):
        super().__init__()
        self.weight, self.start, self.total, self.region, self.among_all = (
            weight,
            start,
            total,
            region,
            among_all,
        )
        self.padding = (
            None
            if padding is None or not start <= padding < start + len(weight)
            else padding - start
        )

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.numel() and not (tokens.min() >= 0 and tokens.max() < self.total):
            raise IndexError(
                f"tokens range from {tokens.min()} to {tokens.max()}, but the embedding has "
                f"{self.total} rows"
            )
        here = (tokens >= self.start) & (tokens < self.start + len(self.weight))
        # F.embedding needs a row
        weight = self.weight if len(self.weight) else F.pad(self.weight, (0, 0, 0, 1))
        rows = F.embedding((tokens - self.start) * here, weight, self.padding)
        y = self.region.leave(rows.masked_fill(~here[..., None], 0))
        return self.region.among_all(y) if self.among_all else y

    def extra_repr(self) -> str:
        return f"rows {self.start} to {self.start + len(self.weight) - 1} of {self.total}"
