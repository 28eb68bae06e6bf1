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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import nn

from parallel101.collectives import all_reduce
from parallel101.collectives.asynchronous import SideBySide, all_reduce_async
from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.spans import span, wait_span
from parallel101.trainers.gradient_sync import (
    GradientSync,
    MiB,
    Parameters,
    by_size,
    dense_gradient,
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
            flat = torch.cat([dense_gradient(name, p).flatten() for name, p in bucket.items()])
            total = all_reduce(flat, group=self.group, algorithm=self.algorithm)
            parts = total.split([p.numel() for p in bucket.values()])
            for p, part in zip(bucket.values(), parts):
                p.grad = part.view(p.shape)
        return unused


class Overlapped(GradientSync):
    """Begins a bucket's all-reduce as soon as backward has filled the bucket.

    Buckets leave in the same order on every rank, whatever the order of the gradients. When one
    leaves, the one before it has had time to arrive: it is summed and sent on.
    """

    how = "all-reduced in buckets during backward"

    def __init__(self, parameters: Parameters, group: GroupLike, bucket_bytes: int):
        super().__init__(parameters)
        self.group, self.listening = group, False
        self.buckets = [Bucket(some, group) for some in by_size(parameters, bucket_bytes)]
        self.in_flight: list[SideBySide] = []
        self.place = {
            p: (bucket, name) for bucket in self.buckets for name, p in bucket.parameters.items()
        }
        for p in self.place:
            p.register_post_accumulate_grad_hook(self.ready)

    def begin(self) -> None:
        self.in_flight, self.listening = [], False
        for bucket in self.buckets:
            bucket.filled.clear()

    @contextmanager
    def backward(self, kind: str = "B", last: bool = True) -> Iterator[None]:
        self.listening = last  # after an earlier microbatch, gradients are not complete
        yield
        self.listening = False

    def ready(self, p: nn.Parameter) -> None:
        """Note that the gradient of p is complete. autograd calls this."""
        if not self.listening:
            return
        bucket, name = self.place[p]
        self.check_once(name, bucket.filled)
        with span("gradient ready", parameter=name):
            bucket.take(name)
        while (sent := len(self.in_flight)) < len(self.buckets) and self.buckets[sent].is_full():
            self.send_next()

    def send_next(self) -> None:
        self.in_flight.append(self.buckets[len(self.in_flight)].all_reduce_async())
        if len(self.in_flight) > 1:
            with wait_span("wait for gradients"):
                self.in_flight[-2].advance()

    def finish(self) -> list[str]:
        unused = self.without_gradient()
        for bucket in self.buckets[len(self.in_flight) :]:  # some gradient in it never came
            for name in bucket.parameters.keys() - bucket.filled:
                bucket.take(name)
            self.send_next()
        for pending in self.in_flight:
            pending.wait()
        return unused


# ── a bucket ──

LARGE = MiB  # about as many bytes are copied in the time of the messages that a tensor needs


class Bucket:
    """The gradients of some parameters of one dtype and device, summed over the ranks together.

        | small, side by side |   | large   . . . . |   | large . . . . |
        |   0   |  1  |   2   |   | 0 . . . | 1 . . |   | 1 . | 2 . . . |   who adds up which part

    A large gradient is sent from the memory that it is in. Small ones are first copied into one
    flat tensor: a message for each of them would take longer than the copy. On a GPU all of them
    are copied, which takes next to no time there.

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
        """Note that this gradient is complete. Move it to its place if it is small."""
        p = self.parameters[name]
        gradient, place = dense_gradient(name, p), self.places.get(name)
        p.grad = gradient.contiguous() if place is None else place.view(p.shape).copy_(gradient)
        self.filled.add(name)

    def is_full(self) -> bool:
        return self.filled == self.parameters.keys()

    def all_reduce_async(self) -> SideBySide:
        """Begin to sum the gradients, in place."""
        flats = [p.grad.view(-1) for p in self.large if p.grad is not None]
        sums = [
            all_reduce_async(flat, group=self.group, sizes=sizes, out=flat)
            for flat, sizes in zip(flats, self.shares)
        ]
        if self.places:
            sums.append(all_reduce_async(self.flat, group=self.group, out=self.flat))
        return SideBySide(sums)


def even_shares(numels: Sequence[int], ranks: int) -> list[list[int]]:
    """Return how many elements of each tensor each rank adds up: an even share of all in a row,
    so that most tensors have one or two owners, and few messages.
    """
    ends = list(accumulate(split_sizes(sum(numels), ranks), initial=0))
    return [
        [max(min(high, stop) - max(low, start), 0) for low, high in pairwise(ends)]
        for start, stop in pairwise(accumulate(numels, initial=0))
    ]
