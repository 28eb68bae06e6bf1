"""Parameters side by side in one flat array, cut into n equal blocks, so that each rank can own one
of them.

    | weight ............ | bias ... | 0 |        the last block is padded with zeros if n does not divide
    |   rank 0   |   rank 1   |   rank 2   |      a rank's block holds pieces of parameters: what its optimizer updates

stage12.py and stage3.py decide when a flat array is gathered and when its gradients leave. Source:
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from parallel101.collectives.asynchronous import (
    AsyncCollective,
    all_gather_async,
    reduce_scatter_async,
)
from parallel101.mesh import GroupLike, group_of
from parallel101.record.spans import wait_span
from parallel101.trainers.gradient_sync import Parameters, dense_gradient
from parallel101.trainers.layout import Pieces
from parallel101.trainers.support.memory import LiveBytes


class Flat:
    """Some parameters of one dtype and device, of which this rank owns 1/n: `shard` is its block,
    `grad` the block's gradient.

    Args:
        parameters: by name. From now on they are views of the flat array.
        group: the ranks that share it.
        live: counts the bytes of what is whole for a moment.
        weights, gradients: whether this rank keeps all of them, or only its own block.

    Attributes:
        whole: all blocks, or None while this rank has only its own.
        placements: name → Pieces, which elements of the parameter each rank owns.
        owned: name → Parameter, 1-D, this rank's piece; only those that have elements here.
        reached: names that this rank's samples have given a gradient in this step.
        fresh: no gradient of this step has arrived in `grad`.
    """

    def __init__(
        self,
        parameters: Parameters,
        group: GroupLike,
        live: LiveBytes,
        *,
        weights: bool,
        gradients: bool,
    ):
        self.parameters, self.group, self.live = dict(parameters), group, live
        self.shapes = {name: p.shape for name, p in parameters.items()}
        members, values = group_of(group), [p.detach() for p in parameters.values()]
        assert members.position is not None
        sizes = [p.numel() for p in values]
        self.block = -(-sum(sizes) // members.size)
        self.padding = self.block * members.size - sum(sizes)
        self.cuts = [*sizes, self.padding]
        self.first = self.block * members.position  # of this rank's block
        whole = torch.cat([*(p.reshape(-1) for p in values), values[0].new_zeros(self.padding)])
        self.whole: Tensor | None = whole
        self.shard = self.block_of(whole) if weights else self.block_of(whole).clone()
        self.whole_grad = torch.zeros_like(whole) if gradients else None
        self.grad = (
            torch.zeros_like(self.shard)
            if self.whole_grad is None
            else self.block_of(self.whole_grad)
        )

        self.placements: dict[str, Pieces] = {}
        self.owned: dict[str, nn.Parameter] = {}
        self.piece_grads: dict[str, Tensor] = {}
        for name, (start, stop) in zip(parameters, pairwise(accumulate(sizes, initial=0))):
            blocks = [(self.block * i, self.block * (i + 1)) for i in range(members.size)]
            bounds = tuple(
                (max(low, start) - start, max(low, start, min(high, stop)) - start)
                for low, high in blocks
            )
            self.placements[name] = Pieces(bounds)
            low, high = bounds[members.position]
            if low < high:
                place = slice(start + low - self.first, start + high - self.first)
                self.owned[name] = nn.Parameter(self.shard[place])
                self.piece_grads[name] = self.grad[place]

        self.reached: set[str] = set()
        self.fresh = True
        self.arriving: AsyncCollective | None = None
        self.empty = values[0].new_empty(0)
        if weights:
            self.show()
        else:
            self.free()

    def block_of(self, whole: Tensor) -> Tensor:
        """This rank's block of it."""
        return whole[self.first : self.first + self.block]

    def cut(self, whole: Tensor) -> dict[str, Tensor]:
        """The parameters' parts of it, in their shapes."""
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), whole.split(self.cuts))
        }

    # ── weights ──

    def gather(self) -> None:
        """Begin to fetch the other blocks, unless they are here; (n−1)/n of the bytes arrive."""
        if self.whole is None:
            self.whole = self.shard.new_empty(sum(self.cuts))
            self.live.watch("weights", self.whole)
            self.arriving = all_gather_async(self.shard, group=self.group, out=self.whole)

    def refresh(self) -> None:
        """Begin to fetch the other blocks, which their owners have changed, into the array that
        this rank keeps.
        """
        assert self.whole is not None
        self.arriving = all_gather_async(self.shard, group=self.group, out=self.whole)

    def wait(self) -> None:
        """Wait until the blocks have arrived; then the parameters are whole."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None
            self.show()

    def show(self) -> None:
        """Make the parameters views of the whole array."""
        assert self.whole is not None
        for p, part in zip(self.parameters.values(), self.cut(self.whole).values()):
            p.data = part

    def free(self) -> None:
        """Let the other blocks go: until they are gathered again, the parameters are empty."""
        self.whole = self.arriving = None
        for p in self.parameters.values():
            p.data = self.empty

    def show_shapes(self) -> None:
        """Give the parameters their shapes without memory, so that gradients can be assigned to
        them.
        """
        for p, shape in zip(self.parameters.values(), self.shapes.values()):
            p.data = self.shard.new_zeros(()).expand(shape)

    # ── gradients ──

    def begin(self) -> None:
        """A step begins."""
        self.fresh, self.reached = True, set()

    def take_gradients(self) -> Tensor:
        """The parameters' gradients side by side, zeros for those without one.

        Afterwards the parameters have none.
        """
        parts = []
        for (name, p), size in zip(self.parameters.items(), self.cuts):
            if p.grad is None:
                parts.append(self.grad.new_zeros(size))
                continue
            dense_gradient(name, p)
            self.reached.add(name)
            self.live.watch("gradients", p.grad)
            parts.append(p.grad.reshape(-1))
            p.grad = None
        if self.padding:
            parts.append(self.grad.new_zeros(self.padding))
        if len(parts) == 1 and self.whole_grad is None:
            return parts[0]  # a single gradient can leave from where it lies
        whole = torch.cat(parts, out=self.whole_grad)
        if self.whole_grad is None:
            self.live.watch("gradients", whole)
        return whole

    def give_gradients(self) -> None:
        """Give each piece its part of what has arrived, for the optimizer."""
        for name, piece in self.owned.items():
            piece.grad = self.piece_grads[name]


class GradientReducer:
    """Sends gradients to their owners while backward still computes others: one reduce-scatter a
    flat array, at most two at a time.

    backward   ── layer 3 ──▶── layer 2 ──▶── layer 1 ──▶
    gradients                g₃ leaves     g₂ leaves     g₁ leaves        each rank keeps the sum of its block;
                                           g₃ is freed   g₂ is freed      the rest is freed after it has left
    """

    def __init__(self, group: GroupLike):
        self.group = group
        self.in_flight: list[tuple[Flat, AsyncCollective]] = []

    def begin(self) -> None:
        """A step begins; what a failed one left is dropped."""
        self.in_flight = []

    def send(self, flat: Flat) -> None:
        """Begin to sum the gradients of all ranks, each block at its owner.

        All ranks send the arrays in the same order.
        """
        gradient = flat.take_gradients()
        out = flat.grad if flat.fresh else None
        flat.fresh = False
        self.in_flight.append((flat, reduce_scatter_async(gradient, group=self.group, out=out)))
        self.finish(leave=1)

    def finish(self, leave: int = 0) -> None:
        """Wait for all but the last `leave` of them."""
        while len(self.in_flight) > leave:
            flat, pending = self.in_flight.pop(0)
            with wait_span("wait for gradients"):
                total = pending.wait()
            if total is not flat.grad and total.data_ptr() != flat.grad.data_ptr():
                flat.grad += total


def by_kind(
    parameters: Parameters, apart: Mapping[str, str] = {}
) -> Iterable[dict[str, nn.Parameter]]:
    """The parameters in groups of one dtype and device each, as a flat array needs them.

    `apart`: see `by_size`.
    """
    groups: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, p in parameters.items():
        groups.setdefault((p.dtype, p.device, apart.get(name)), {})[name] = p
    return groups.values()
