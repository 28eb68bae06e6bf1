"""Parameters side by side in one flat array, cut into n equal blocks: each rank owns one of them.

    | weight ............ | bias ... | 0 |     zeros fill up the last block if n does not divide
    |   rank 0   |   rank 1   |   rank 2   |   a block holds pieces of parameters, which the
                                               rank's optimizer updates

zero_1_2_3.py says when a flat array is gathered and when its gradients are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from parallel101.collectives import all_gather, reduce_scatter
from parallel101.collectives.asynchronous import (
    AsyncCollective,
    all_gather_async,
    reduce_scatter_async,
)
from parallel101.collectives.meta_device import same_memory
from parallel101.mesh import GroupLike, group_of
from parallel101.trainers.gradient_sync import Parameters, dense_gradient
from parallel101.trainers.layout import Pieces
from parallel101.trainers.support.memory import LiveBytes


@dataclass
class Sharing:
    """The ranks that share flat arrays, and how they do.

    Attributes:
        group: the ranks; each owns one block of every array.
        others: name → the ranks that share it instead, such as those with the same experts.
        overlap: send and receive while this rank computes.
        apart: name → a label. Only parameters with the same label share an array.
        algorithm: "all_gather" and "reduce_scatter" → one of their algorithms, which then runs from
            beginning to end in one call. Without an entry: "direct", which goes on meanwhile.
        live: counts the bytes of gathered weights and of gradients in flight.
    """

    group: GroupLike
    overlap: bool = True
    apart: Mapping[str, str] = field(default_factory=dict)
    algorithm: Mapping[str, str] = field(default_factory=dict)
    live: LiveBytes = field(default_factory=LiveBytes)
    others: Mapping[str, GroupLike] = field(default_factory=dict)


class Flat:
    """Some parameters of one dtype and device, of which this rank owns 1/n.

    Args:
        parameters: by name. From now on they are views of the flat array.
        sharing: the ranks that share it.
        weights, gradients: whether this rank keeps all of them, or only its own block.

    Attributes:
        whole: the weights of all blocks, or None while this rank has only its own.
        arriving: the all-gather that fills `whole`, until somebody has waited for it.
        shard, grad: this rank's block of the weights and of their gradients.
        placements: name → Pieces, which elements of the parameter each rank owns.
        owned: name → Parameter, 1-D, this rank's piece; only those that have elements here.
        reached: names of the parameters to which this rank's samples gave a gradient in this step.
    """

    def __init__(
        self, parameters: Parameters, sharing: Sharing, *, weights: bool, gradients: bool = False
    ):
        self.parameters, self.sharing, self.live = dict(parameters), sharing, sharing.live
        self.group = sharing.others.get(next(iter(parameters)), sharing.group)
        self.shapes = [p.shape for p in parameters.values()]
        members, values = group_of(self.group), [p.detach() for p in parameters.values()]
        assert members.position is not None
        sizes, n, position = [p.numel() for p in values], members.size, members.position
        block = -(-sum(sizes) // n)
        self.padding = block * n - sum(sizes)
        self.cuts = [*sizes, self.padding]
        whole = torch.cat([*(p.reshape(-1) for p in values), values[0].new_zeros(self.padding)])
        mine = whole.view(n, block)[position]
        self.whole: Tensor | None = whole
        self.arriving: AsyncCollective | None = None
        self.shard = mine if weights else mine.clone()
        of_gradients = next(iter(parameters.values())).grad_dtype
        self.whole_grad = torch.zeros_like(whole, dtype=of_gradients) if gradients else None
        self.grad = torch.zeros_like(mine, dtype=of_gradients)
        if self.whole_grad is not None:
            self.grad = self.whole_grad.view(n, block)[position]

        self.placements: dict[str, Pieces] = {}
        self.owned: dict[str, nn.Parameter] = {}
        self.piece_grads: dict[str, Tensor] = {}
        for name, (start, stop) in zip(parameters, pairwise(accumulate(sizes, initial=0))):
            cuts = [min(max(block * i, start), stop) - start for i in range(n + 1)]
            self.placements[name] = Pieces(tuple(pairwise(cuts)))
            low, high = cuts[position : position + 2]
            if low < high:
                first = start + low - block * position
                place = slice(first, first + high - low)  # in this rank's block
                self.owned[name] = piece = nn.Parameter(self.shard[place])
                piece.grad_dtype = of_gradients
                self.piece_grads[name] = self.grad[place]
        self.begin()
        if weights:
            self.show()
        else:
            self.free()

    def cut(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the parameters' parts of a whole array, by name and in their shapes."""
        parts = zip(self.parameters, self.shapes, whole.split(self.cuts))
        return {name: part.view(shape) for name, shape, part in parts}

    # ── weights ──

    def all_gather(self) -> None:
        """Begin to fetch the other blocks; (n−1)/n of the bytes arrive."""
        if self.whole is None:
            self.whole = self.shard.new_empty(sum(self.cuts))
            self.live.watch("weights", self.whole)
        group, algorithm = self.group, self.sharing.algorithm.get("all_gather")
        if algorithm is None:
            self.arriving = all_gather_async(self.shard, group=group, out=self.whole)
        else:
            self.whole.copy_(all_gather(self.shard, group=group, algorithm=algorithm))
            self.show()

    def wait(self) -> None:
        """Wait until the blocks have arrived. Then the parameters are whole."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None
            self.show()

    def gathered(self) -> Tensor:
        """Return the whole array, and gather it first if it is not there."""
        if self.whole is None:
            self.all_gather()
        self.wait()
        assert self.whole is not None
        return self.whole

    def show(self) -> None:
        """Make the parameters views of the whole array."""
        assert self.whole is not None
        for p, part in zip(self.parameters.values(), self.cut(self.whole).values()):
            p.data = part

    def free(self) -> None:
        """Free the other ranks' blocks. The parameters are empty until the next gather."""
        self.whole = self.arriving = None
        empty = self.shard.new_empty(0)
        for p in self.parameters.values():
            p.data = empty

    def show_shapes(self) -> None:
        """Give the parameters their shapes without memory, so that gradients can be assigned."""
        for p, shape in zip(self.parameters.values(), self.shapes):
            p.data = self.shard.new_zeros(()).expand(shape)

    # ── gradients ──

    def begin(self) -> None:
        """Begin a step, without gradients."""
        self.reached: set[str] = set()
        self.summed = False  # whether a sum of this step is in `grad`, or on its way there
        for p in self.parameters.values():
            p.grad = None

    def take_gradients(self) -> Tensor:
        """Return the parameters' gradients side by side, zeros for those without one.

        Afterwards the parameters have none.
        """
        parts = []
        for (name, p), size in zip(self.parameters.items(), self.cuts):
            if p.grad is None:
                parts.append(self.grad.new_zeros(size))
                continue
            parts.append(dense_gradient(name, p).reshape(-1))
            self.live.watch("gradients", p.grad)
            self.reached.add(name)
            p.grad = None
        if self.padding:
            parts.append(self.grad.new_zeros(self.padding))
        if len(parts) == 1 and self.whole_grad is None:
            return parts[0]  # a single gradient is sent from the memory that it is in
        whole = torch.cat(parts, out=self.whole_grad)
        if self.whole_grad is None:
            self.live.watch("gradients", whole)
        return whole

    def reduce_scatter(self) -> AsyncCollective:
        """Begin to sum the gradients of all ranks. The result is the sum of this rank's block.

        The first one of a step arrives in `grad` itself.
        """
        gradients, group = self.take_gradients(), self.group
        out, self.summed = None if self.summed else self.grad, True
        algorithm = self.sharing.algorithm.get("reduce_scatter")
        if algorithm is None:
            return reduce_scatter_async(gradients, group=group, out=out)
        total = reduce_scatter(gradients, group=group, algorithm=algorithm)
        return AsyncCollective(iter(()), total if out is None else out.copy_(total))  # has arrived

    def add(self, total: Tensor) -> None:
        """Add a sum that has arrived for this rank's block, unless it arrived in `grad` itself."""
        if not same_memory(total, self.grad):
            self.grad += total

    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.parameters.values())

    def give_gradients(self) -> None:
        """Give each piece its part of the sum, for the optimizer."""
        for name, piece in self.owned.items():
            piece.grad = self.piece_grads[name]
