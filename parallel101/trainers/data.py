"""Data parallel: every rank has the whole model and a part of the batch; the gradients are added up, and all take the same step.

Naive         ──forward──▶◀──backward──  g₃ g₂ g₁ g₀       one all-reduce a gradient, after backward
Bucketed      ──forward──▶◀──backward──  g₃₂  g₁₀          one all-reduce a bucket: fewer, larger messages
Overlapped    ──forward──▶◀──backward──  g₁₀               each bucket leaves as soon as it is full, while backward goes on
                               g₃₂
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from parallel101.collectives import all_reduce
from parallel101.collectives.asynchronous import AsyncCollective, all_reduce_async
from parallel101.mesh import GroupLike
from parallel101.record.spans import span
from parallel101.trainers.buckets import Bucket, by_size, check_bucket_bytes, part_of, twice
from parallel101.trainers.memory import readable
from parallel101.trainers.trainer import LossFn, OptimizerFn, Trainer

Parameters = Mapping[str, nn.Parameter]


class Naive:
    """First step: backward as always, then one all-reduce for each gradient."""

    def __init__(self, parameters: Parameters, group: GroupLike):
        self.parameters, self.group = parameters, group

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def synchronise(self) -> list[str]:
        """Every gradient becomes the sum of all ranks'. Returns the names of those that this rank had none of."""
        unused = [name for name, p in self.parameters.items() if p.grad is None]
        for p in self.parameters.values():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = all_reduce(gradient, group=self.group, algorithm="direct")
        return unused


class Bucketed:
    """Second step: the gradients lie side by side in a few flat tensors, and each of these is all-reduced at once, where it lies."""

    def __init__(self, parameters: Parameters, group: GroupLike, bucket_bytes: int):
        self.group = group
        self.buckets = [Bucket(together) for together in by_size(parameters, bucket_bytes)]

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def synchronise(self) -> list[str]:
        unused = [name for bucket in self.buckets for p, name in bucket.names.items() if not bucket.take(p)]
        for bucket in self.buckets:
            all_reduce_async(bucket.flat, group=self.group, out=bucket.flat).wait()
        return unused


class Overlapped(Bucketed):
    """Third step: a hook on each parameter tells when its gradient is ready; the bucket that is full begins its all-reduce at once.

    Buckets begin in the same order on every rank, whatever the order of the hooks. When one begins, the one before it, whose pieces
    have had a bucket's time to arrive, is added up and goes on.
    """

    def __init__(self, parameters: Parameters, group: GroupLike, bucket_bytes: int):
        super().__init__(parameters, group, bucket_bytes)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.names}
        self.begun: list[AsyncCollective] = []
        self.listening = False
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.ready)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.listening = last  #  before the last microbatch gradients are not complete
        self.begun = []
        for bucket in self.buckets:
            bucket.ready.clear()
        try:
            loss.backward()
        finally:
            self.listening = False

    def ready(self, p: Tensor) -> None:
        """The gradient of p is complete."""
        if self.listening and isinstance(p, nn.Parameter):
            bucket = self.bucket_of[p]
            if p in bucket.ready:
                raise twice(bucket.names[p])
            with span("gradient ready", parameter=bucket.names[p]):
                bucket.take(p)
            while len(self.begun) < len(self.buckets) and self.is_full(len(self.begun)):
                self.begin()

    def is_full(self, number: int) -> bool:
        return len(self.buckets[number].ready) == len(self.buckets[number].names)

    def begin(self) -> None:
        bucket = self.buckets[len(self.begun)]
        self.begun.append(all_reduce_async(bucket.flat, group=self.group, out=bucket.flat))
        if len(self.begun) > 1:
            with span("wait for gradients"):
                self.begun[-2].advance()

    def synchronise(self) -> list[str]:
        unused = []
        for bucket in self.buckets[len(self.begun) :]:  #  those that a parameter without a hook's call has held up
            unused += [name for p, name in bucket.names.items() if p not in bucket.ready and not bucket.take(p)]
            self.begin()
        for under_way in self.begun:
            under_way.wait()
        return unused


class DataParallelTrainer(Trainer):
    """Trains one model on all ranks of a group, each with its share of the batch; equal to one process with the whole batch.

    Args:
        model, loss_fn, optimizer, group, clip_norm, accumulate, autocast, sync: see `Trainer`.
        overlap: send gradients while backward still computes others.
        bucket_bytes: how many bytes of gradients travel together, at least one gradient. None: half of them all, at most 25 MiB;
            0: each on its own, and with overlap=False that is the naive all-reduce after backward.

    Bytes sent by each rank in a step: 2(n−1)/n of the gradients' bytes, and 24 bytes to each other rank for counts and losses.
    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020), section 3.2.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: OptimizerFn,
        *,
        group: GroupLike = None,
        overlap: bool = True,
        bucket_bytes: int | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        sync: bool = False,
    ):
        check_bucket_bytes(bucket_bytes)
        super().__init__(model, loss_fn, optimizer, group=group, clip_norm=clip_norm, accumulate=accumulate, autocast=autocast, sync=sync)
        if bucket_bytes is None:
            bucket_bytes = part_of(self._owned, 2)
        self.strategy: Naive | Bucketed
        if overlap:
            self.strategy = Overlapped(self._owned, group, bucket_bytes)
        elif bucket_bytes:
            self.strategy = Bucketed(self._owned, group, bucket_bytes)
        else:
            self.strategy = Naive(self._owned, group)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self.strategy.backward(loss, last)

    def _synchronise(self) -> None:
        self._unused = self.strategy.synchronise()

    def _notes(self) -> list[str]:
        if isinstance(self.strategy, Naive):
            return [f"{len(self._owned)} gradients, all-reduced one by one after backward"]
        largest = readable(max(bucket.flat.nbytes for bucket in self.strategy.buckets))
        when = "while backward goes on" if isinstance(self.strategy, Overlapped) else "after backward"
        return [f"{len(self._owned)} gradients in {len(self.strategy.buckets)} buckets of up to {largest}, all-reduced {when}"]
