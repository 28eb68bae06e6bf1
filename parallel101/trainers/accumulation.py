"""Forward and backward of a share of the batch, microbatch by microbatch, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from parallel101.mesh import split_sizes
from parallel101.spans import span
from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.support.batches import Batch, call, count_samples, split
from parallel101.trainers.support.losses import Losses


class Accumulation:
    """All layers are on this rank. The gradients of its microbatches add up in .grad."""

    def __init__(
        self,
        model: nn.Module,
        sync: GradientSync,
        microbatches: int,
        autocast: Callable[[], Any],
        always: bool,
    ):
        self.model, self.sync, self.microbatches = model, sync, microbatches
        self.autocast, self.always = autocast, always  # without samples, too: others send some here

    def run(self, inputs: Batch, targets: Batch, losses: Losses) -> None:
        sizes = split_sizes(count_samples(inputs), self.microbatches)
        for i, (x, y) in enumerate(zip(split(inputs, sizes), split(targets, sizes))):
            with span("forward", microbatch=i):
                loss = self.forward(x, y, losses)
            with span("backward", microbatch=i), self.sync.backward(last=i + 1 == len(sizes)):
                if loss is not None:
                    loss.backward()

    def forward(self, inputs: Batch, targets: Batch, losses: Losses) -> Tensor | None:
        samples = count_samples(inputs)
        with self.sync.forward(), self.autocast():  # without samples, too: other ranks have some
            outputs = call(self.model, inputs) if samples or self.always else None
            if samples:
                return losses.of(outputs, targets, samples)
            return losses.of_nothing(outputs, targets) if self.always else None

    evaluate = forward
