"""Data parallel: every rank has the whole model and a share of the batch; gradients are summed.

    Naive        ──forward──▶◀──backward──  g₃ g₂ g₁ g₀    an all-reduce a gradient, after backward
    Bucketed     ──forward──▶◀──backward──  g₃₂  g₁₀       an all-reduce a bucket: fewer and larger
    Overlapped   ──forward──▶◀──backward──  g₁₀            a full bucket leaves during backward
                              g₃₂

Each rank's loss is weighted by its share of the samples, so the sum over the ranks is the gradient
of the whole batch, and all ranks take the same optimizer step. In a step each rank sends 2(n−1)/n
of the gradients' bytes. Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training" (2020), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise

import torch

from parallel101.collectives import all_reduce
from parallel101.collectives.asynchronous import SideBySide, all_reduce_async
from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.spans import wait_span
from parallel101.trainers.gradient_sync import (
    GradientHooks,
    GradientSync,
    MiB,
    Parameters,
    by_size,
    dense_gradient,
    sum_gradients,
)


class Naive(GradientSync):
    """Runs one all-reduce for each gradient, after backward."""

    how = "all-reduced one by one after backward"

    def __init__(self, parameters: Parameters, group: GroupLike, algorithm: str = "direct"):
        super().__init__(parameters)
        self.group, self.algorithm = group, algorithm

    def finish(self) -> list[str]:
        unused = self.without_gradient()
        for name, p in self.owned.items():
            gradient = dense_gradient(name, p)
            p.grad = all_reduce(gradient, group=self.group, algorithm=self.algorithm)
        return unused


class Bucketed(GradientSync):
    """Runs one all-reduce for each bucket of gradients, after backward."""

    how = "all-reduced in buckets after backward"

    def __init__(
        self, parameters: Parameters, group: GroupLike, bucket_bytes: int, algorithm: str = "direct"
    ):
        super().__init__(parameters)
        self.group, self.algorithm = group, algorithm
        self.buckets = by_size(parameters, bucket_bytes)

    def finish(self) -> list[str]:
        unused = self.without_gradient()
        for bucket in self.buckets:
            sum_gradients(bucket, self.group, self.algorithm)
        return unused


class Overlapped(GradientSync):
    """Begins a bucket's all-reduce as soon as backward has filled the bucket.

    When one leaves, the one before it has had time to arrive: it is summed and sent on.
    """

    how = "all-reduced in buckets during backward"

    def __init__(self, parameters: Parameters, group: GroupLike, bucket_bytes: int):
        super().__init__(parameters)
        self.buckets = by_size(parameters, bucket_bytes)
        self.sums = [bucket_sum(bucket, group) for bucket in self.buckets]
        self.hooks = GradientHooks(self.buckets, self.send)
        self.in_flight: list[SideBySide] = []
        self.unused: list[str] = []

    def begin(self) -> None:
        self.in_flight, self.unused = [], []

    def backward(self, kind: str = "B", last: bool = True) -> AbstractContextManager:
        # after an earlier microbatch, gradients are not complete
        return self.hooks.backward() if last else nullcontext()

    def send(self, number: int) -> None:
        self.unused += [name for name, p in self.buckets[number].items() if p.grad is None]
        self.in_flight.append(self.sums[number]())  # an all-reduce of the bucket
        if number:
            with wait_span("wait for gradients"):
                self.in_flight[number - 1].advance()

    def finish(self) -> list[str]:
        for pending in self.in_flight:
            pending.wait()
        return self.unused


# ── a bucket ──

LARGE = MiB  # about as many bytes are copied in the time of the messages that a tensor needs


def bucket_sum(parameters: Parameters, group: GroupLike) -> Callable[[], SideBySide]:
    """Return a function that begins to sum the gradients of a bucket over the ranks, in place.

        | small, side by side |   | large   . . . . |   | large . . . . |
        |   0   |  1  |   2   |   | 0 . . . | 1 . . |   | 1 . | 2 . . . |   who adds up which part

    A large gradient is sent from the memory that it is in. Small ones are first copied into one
    flat tensor: a message for each of them would take longer than the copy. On a GPU all of them
    are copied, which takes next to no time there.

    Args:
        parameters: by name, of one dtype and device.
        group: the ranks over which they are summed.
    """
    first = next(iter(parameters.values()))
    most = LARGE if first.device.type == "cpu" else math.inf
    large = {name: p for name, p in parameters.items() if p.nbytes >= most}
    small = {name: p for name, p in parameters.items() if p.nbytes < most}
    shares = even_shares([p.numel() for p in large.values()], group_of(group).size)
    sizes = [p.numel() for p in small.values()]
    flat = torch.zeros(sum(sizes), dtype=first.grad_dtype, device=first.device)

    def begin() -> SideBySide:
        sums = []
        for (name, p), share in zip(large.items(), shares):
            p.grad = dense_gradient(name, p).contiguous()
            row = p.grad.view(-1)
            sums.append(all_reduce_async(row, group=group, sizes=share, out=row))
        if small:
            for (name, p), part in zip(small.items(), flat.split(sizes)):
                p.grad = part.view(p.shape).copy_(dense_gradient(name, p))
            sums.append(all_reduce_async(flat, group=group, out=flat))
        return SideBySide(sums)

    return begin


def even_shares(numels: Sequence[int], ranks: int) -> list[list[int]]:
    """Return how many elements of each tensor each rank adds up: an even share of all in a row,
    so that most tensors have one or two owners, and few messages.
    """
    ends = list(accumulate(split_sizes(sum(numels), ranks), initial=0))
    return [
        [max(min(high, stop) - max(low, start), 0) for low, high in pairwise(ends)]
        for start, stop in pairwise(accumulate(numels, initial=0))
    ]
