"""Parameters side by side in one flat array, cut into n equal blocks, so that each rank can own one of them.

    | weight ............ | bias ... | 0 |        the last block is padded with zeros where n does not divide
    |   rank 0   |   rank 1   |   rank 2   |      a rank's block holds pieces of parameters: what its optimizer updates

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from parallel101.collectives.asynchronous import AsyncCollective, all_gather_async
from parallel101.mesh import GroupLike, group_of
from parallel101.trainers.buckets import check_dense
from parallel101.trainers.live import Live


class Flat:
    """Some parameters of one dtype and device, of which this rank owns 1/n: `shard` is its block, `grad` the block's gradient.

    Args:
        parameters: by name. From now on they are views of the flat array.
        group: the ranks that share it.
        live: where what is whole for a moment is counted.
        weights, gradients: whether this rank keeps all of them, or only its own block.

    Attributes:
        whole: all blocks, or None while this rank has only its own.
        spans: name → (first, last + 1) of the parameter's elements that lie in this rank's block; not those of which none does.
        pieces: name → Parameter, 1-D, these elements.
        reached: names that this rank's samples have given a gradient in this step.
        fresh: no gradient of this step has arrived in `grad`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: GroupLike, live: Live, *, weights: bool, gradients: bool):
        self.parameters, self.group, self.live = dict(parameters), group, live
        self.shapes = {name: p.shape for name, p in parameters.items()}
        members, values = group_of(group), [p.detach() for p in parameters.values()]
        assert members.position is not None
        sizes = [p.numel() for p in values]
        self.block = -(-sum(sizes) // members.size)
        self.padding = self.block * members.size - sum(sizes)
        self.cuts = [*sizes, self.padding]
        self.first = self.block * members.position  #  of this rank's block
        whole = torch.cat([*(p.reshape(-1) for p in values), values[0].new_zeros(self.padding)])
        self.whole: Tensor | None = whole
        self.shard = self.mine(whole) if weights else self.mine(whole).clone()
        self.whole_grad = torch.zeros_like(whole) if gradients else None
        self.grad = torch.zeros_like(self.shard) if self.whole_grad is None else self.mine(self.whole_grad)

        places = {name: (a - self.first, b - self.first) for name, (a, b) in zip(parameters, pairwise(accumulate(sizes, initial=0)))}
        places = {name: (a, b) for name, (a, b) in places.items() if max(a, 0) < min(b, self.block)}
        self.spans = {name: (max(a, 0) - a, min(b, self.block) - a) for name, (a, b) in places.items()}
        in_block = {name: slice(max(a, 0), min(b, self.block)) for name, (a, b) in places.items()}
        self.pieces = {name: nn.Parameter(self.shard[place]) for name, place in in_block.items()}
        self._gradients = {name: self.grad[place] for name, place in in_block.items()}

        self.reached: set[str] = set()
        self.fresh = True
        self._arriving: AsyncCollective | None = None
        self._nothing = values[0].new_empty(0)
        if weights:
            self.show()
        else:
            self.free()

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's block of it."""
        return whole[self.first : self.first + self.block]

    def cut(self, whole: Tensor) -> dict[str, Tensor]:
        """The parameters' parts of it, in their shapes."""
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), whole.split(self.cuts))}

    # ── weights ──

    def gather(self) -> None:
        """Begin to fetch the other blocks, unless that is done; (n−1)/n of the bytes arrive."""
        if self.whole is None:
            self.whole = self.shard.new_empty(sum(self.cuts))
            self.live.watch("weights", self.whole)
            self._arriving = all_gather_async(self.shard, group=self.group, out=self.whole)

    def refresh(self) -> None:
        """Begin to fetch the other blocks, which their owners have changed, into the array that this rank keeps."""
        assert self.whole is not None
        self._arriving = all_gather_async(self.shard, group=self.group, out=self.whole)

    def wait(self) -> None:
        """Until they are there; then the parameters are whole."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self.show()

    def show(self) -> None:
        assert self.whole is not None
        for p, part in zip(self.parameters.values(), self.cut(self.whole).values()):
            p.data = part

    def free(self) -> None:
        """Let the other blocks go: until they are gathered again, the parameters are empty."""
        self.whole = self._arriving = None
        for p in self.parameters.values():
            p.data = self._nothing

    # ── gradients ──

    def take_gradients(self) -> Tensor:
        """The parameters' gradients side by side, zeros where there is none; the parameters themselves have none after that."""
        parts = []
        for (name, p), size in zip(self.parameters.items(), self.cuts):
            if p.grad is None:
                parts.append(self.grad.new_zeros(size))
                continue
            check_dense(name, p.grad)
            self.reached.add(name)
            self.live.watch("gradients", p.grad)
            parts.append(p.grad.reshape(-1))
            p.grad = None
        if self.padding:
            parts.append(self.grad.new_zeros(self.padding))
        if len(parts) == 1 and self.whole_grad is None:
            return parts[0]  #  one gradient can leave as it lies
        whole = torch.cat(parts, out=self.whole_grad)
        if self.whole_grad is None:
            self.live.watch("gradients", whole)
        return whole

    def give_gradients(self) -> None:
        """To each piece its part of what has arrived, for the optimizer."""
        for name, piece in self.pieces.items():
            piece.grad = self._gradients[name]


def by_kind(parameters: Mapping[str, nn.Parameter]) -> Iterable[dict[str, nn.Parameter]]:
    """The parameters in groups of one dtype and device each, as a flat array wants them."""
    groups: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, p in parameters.items():
        groups.setdefault((p.dtype, p.device), {})[name] = p
    return groups.values()
