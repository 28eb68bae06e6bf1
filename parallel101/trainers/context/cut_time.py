"""The axis cp in a trainer: a batch is cut along time, and attention reaches over the ranks.

    tokens    (batch, time)     rank 0 of 2 has positions 0 1 6 7, rank 1 has 2 3 4 5 ("zigzag")
    positions (batch, time)     tells the model which these are; cut in the same way
    attention                   ring_attention in the place of torch's scaled_dot_product_attention
    loss                        of this rank's positions, weighted by their number

All else in the model acts on each position alone, so it doesn't know that others are elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.trainers.axis import Axis, OneStage
from parallel101.trainers.batches import Batch, map_tensors, tensors_of
from parallel101.trainers.context.time_layout import local_positions, time_sizes
from parallel101.trainers.context.ulysses import ulysses_attention
from parallel101.trainers.context_parallel import ring_attention
from parallel101.trainers.layout import Axes
from parallel101.trainers.options import Options
from parallel101.trainers.recompute import and_its_repetitions
from parallel101.trainers.torch_functions import Replacing

TIME = 1  # the dim of inputs and targets that is cut
POSITIONS = ("positions", "position_ids")  # how a model's forward may call them


class ContextAxis(Axis):
    """The axis cp: this rank's positions of each sequence, and the attention over all ranks.

    Args:
        model, stages: the first entry is called with the inputs. Each entry that takes `positions`
            in its forward is given those of this rank, (batch, time) whole numbers.
    """

    name = "cp"

    def __init__(self, model: nn.Module, stages: OneStage, axes: Axes, options: Options):
        self.group, self.position, self.way = axes.along(["cp"]), axes.here["cp"], options.context
        self.attention = ulysses_attention if self.way == "ulysses" else ring_attention
        self.layout = "zigzag" if self.way == "zigzag" else "contiguous"
        self.signature = signature_of(stages.sequence[0])
        self.name_of_positions = positions_in(self.signature)
        self.sizes: list[int] = []  # of the ranks' parts of the time, in this step
        self.here = torch.empty(0)  # the positions of this rank, (time,)

    def cut(self, model: nn.Module, stages: OneStage) -> None:
        for module in stages.sequence[1:]:
            if (name := positions_in(signature_of(module))) is not None:
                module.register_forward_pre_hook(partial(self.to_module, name), with_kwargs=True)

    def check_batch(self, inputs: Batch, targets: Batch) -> None:
        shapes = [tuple(t.shape) for t in tensors_of((inputs, targets))]
        times = {shape[TIME] if len(shape) > TIME else 0 for shape in shapes}
        if len(times) > 1 or min(times) < self.group.size:
            raise ValueError(
                f"the axis cp cuts dim {TIME}, the time, over {self.group.size} ranks, but the "
                f"tensors of the batch have the shapes {', '.join(map(str, shapes))}: expected "
                "(samples, time, …), the same time for all, and at least one position for each rank"
            )

    def cut_batch(self, inputs: Batch, targets: Batch) -> tuple[Batch, Batch, float]:
        first = tensors_of(inputs)[0]
        samples, time = first.shape[: TIME + 1]
        self.sizes = time_sizes(time, self.group.size, self.layout)
        here = local_positions(time, self.group.size, self.position, self.layout, first.device)
        self.here = here
        if (name := self.name_of_positions) is not None:
            if not isinstance(inputs, Mapping):
                given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
                inputs = self.signature.bind(*given).arguments
            positions = torch.arange(time, device=first.device).expand(samples, -1)
            inputs = {name: positions, **inputs}
        local = map_tensors(lambda t: t.index_select(TIME, here), (inputs, targets))
        return *local, len(here) / time

    def to_module(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Add the positions to the arguments of a module that is called with activations alone."""
        return args, {name: self.here.expand(len(args[0]), -1), **kwargs}

    def forward(self) -> AbstractContextManager:
        """Return the context of a forward whose attention is that of the whole sequence."""
        attention = {F.scaled_dot_product_attention: self.attend}
        return and_its_repetitions(lambda: Replacing(attention))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute scaled_dot_product_attention with all ranks along cp."""
        if attn_mask is not None or dropout_p > 0:
            raise ValueError(
                f"scaled_dot_product_attention was called with dropout_p={dropout_p} and attn_mask="
                f"{'None' if attn_mask is None else 'a mask'}, and the axis cp computes it block "
                "by block on several ranks: expected is_causal=True or False alone, without "
                "dropout of the attention weights"
            )
        way: Any = {"causal": is_causal, "layout": self.layout, "sizes": self.sizes}
        return self.attention(query, key, value, group=self.group, scale=scale, **way)

    def describe(self) -> Iterator[str]:
        way = {"ulysses": "all-to-all over heads"}.get(self.way, f"ring attention, {self.way}")
        yield f"time cut over the {self.group.size} ranks of cp; attention: {way}"


def signature_of(module: nn.Module) -> inspect.Signature:
    """Return the signature of the class's forward: recomputation may have replaced the module's."""
    return inspect.signature(type(module).forward.__get__(module))


def positions_in(signature: inspect.Signature) -> str | None:
    """Return a forward's name for its positions; None if it doesn't take them."""
    return next((name for name in POSITIONS if name in signature.parameters), None)
