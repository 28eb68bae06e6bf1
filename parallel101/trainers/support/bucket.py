"""A bucket: gradients that are summed over the ranks together.

    | small, side by side |   | large   . . . . |   | large . . . . |
    |   0   |  1  |   2   |   | 0 . . . | 1 . . |   | 1 . | 2 . . . |   who adds up which part

A large gradient is sent from the memory that it is in. Small ones are first copied into one flat
tensor: a message for each of them would take longer than the copy. On a GPU all of them are copied,
which takes next to no time there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from parallel101.collectives.asynchronous import (
    SideBySide,
    all_reduce_async,
)
from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.trainers.gradient_sync import MiB, Parameters, dense_gradient

LARGE = MiB  # about as many bytes are copied in the time of the messages that a tensor needs


class Bucket:
    """The gradients of some parameters of one dtype and device.

    Args:
        parameters: by name.
        group: the ranks over which they are summed.

    Attributes:
        filled: the names of those that are complete.
    """

    def __init__(self, parameters: Parameters, group: GroupLike):
        self.parameters, self.group, ranks = parameters, group, group_of(group).size
        self.filled: set[str] = set()
        small = {
            name: p for name, p in parameters.items() if p.nbytes < LARGE or p.device.type != "cpu"
        }
        self.large = [p for name, p in parameters.items() if name not in small]
        sizes, first = [p.numel() for p in small.values()], next(iter(parameters.values()))
        self.flat = torch.zeros(sum(sizes), dtype=first.grad_dtype, device=first.device)
        self.places = dict(zip(small, self.flat.split(sizes)))
        self.shares = even_shares([p.numel() for p in self.large], ranks)

    def take(self, name: str) -> None:
        """The gradient of this parameter is complete. Move it to its place if it is small."""
        p = self.parameters[name]
        gradient, place = dense_gradient(name, p), self.places.get(name)
        p.grad = gradient.contiguous() if place is None else place.view(p.shape).copy_(gradient)
        self.filled.add(name)

    def is_full(self) -> bool:
        return self.filled == self.parameters.keys()

    def all_reduce_async(self) -> SideBySide:
        """Begin to sum them, in place."""
        flats = [p.grad.view(-1) for p in self.large if p.grad is not None]
        sums = [
            all_reduce_async(flat, group=self.group, sizes=sizes, out=flat)
            for flat, sizes in zip(flats, self.shares)
        ]
        if self.places:
            sums.append(all_reduce_async(self.flat, group=self.group, out=self.flat))
        return SideBySide(sums)


def even_shares(numels: Sequence[int], ranks: int) -> list[list[int]]:
    """How many elements of each tensor each rank adds up: an even share of all in a row, so that
    most tensors have one or two owners, and few messages.
    """
    ends = list(accumulate(split_sizes(sum(numels), ranks), initial=0))
    return [
        [max(min(high, stop) - max(low, start), 0) for low, high in pairwise(ends)]
        for start, stop in pairwise(accumulate(numels, initial=0))
    ]
