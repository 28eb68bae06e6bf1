"""Weights that are whole only while they are needed: a layer is gathered before its forward and again before its backward.

    forward    gather 1 | gather 2 | gather 3 |              backward   gather 3 | gather 2 | gather 1 |
                        | layer 1  | layer 2  | layer 3                          | layer 3  | layer 2  | layer 1
                                     free 1     free 2                                        free 3     free 2
                                                                                              g₃ leaves  g₂ leaves

The next layer is fetched while one computes: two are whole at a time. Source: Rajbhandari et al., "ZeRO" (2020), sections 5.3, 7.2.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  #  torch has no public name for it; tests/trainers/test_unusual_models.py needs it

from parallel101.mesh import GroupLike
from parallel101.record.spans import span
from parallel101.trainers.agreement import same_everywhere
from parallel101.trainers.flat import Flat
from parallel101.trainers.leaving import Leaving


class Layer:
    """A module and the flat arrays of its parameters (one, if they are of one dtype)."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[Flat]):
        self.name, self.module, self.flats = name, module, list(flats)


class Gathered:
    """Gathers and frees the layers of a model as it runs, forward and backward.

    All ranks gather the same layers in the same order, those too that only some of them use: the order of the first forward, if that was
    the same on all ranks, else that of the model. A layer that comes out of turn is gathered when it is needed, and on all ranks it must.

    Args:
        model: its hooks say which layer is next.
        layers: of which one is whole at a time, and the one that comes next.
        shared: parameters of several layers or of none; they are whole for all of a forward, and again for all of a backward.
        leaving: takes the gradients of a layer whose backward is over.
        ahead: whether to fetch the next layer while one computes.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], shared: Sequence[Flat], leaving: Leaving, group: GroupLike, ahead: bool):
        self.layers, self.shared, self.leaving, self.group, self.fetch_ahead = list(layers), list(shared), leaving, group, ahead
        self.plan = list(layers)  #  in the order of use, a layer that is used twice twice
        self.entered: list[Layer] = []
        self.planned = False
        self.ahead: deque[Layer] = deque()
        self.current: Layer | None = None
        self.in_backward = self.in_forward = self.in_layer = False
        self.spans = ExitStack()
        model.register_forward_pre_hook(self.begin_forward, prepend=True)  #  before the hooks of others, that they see whole weights
        for layer in layers:
            layer.module.register_forward_pre_hook(partial(self.enter, layer), prepend=True)
            layer.module.register_forward_hook(partial(self.leave_forward, layer))
        model.register_forward_hook(self.end_forward)

    # ── forward ──

    def begin_forward(self, model: nn.Module, inputs: Any) -> None:
        self.reset()
        self.in_forward = True
        self.entered = []
        self.begin(self.plan)

    def enter(self, layer: Layer, module: nn.Module, inputs: Any) -> None:
        if not self.in_backward:  #  where a forward is computed again in backward, the layer is there already
            self.entered.append(layer)
            self.in_layer = True
        self.reach(layer)

    def leave_forward(self, layer: Layer, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.in_backward:
            return
        self.in_layer = False
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.enter_backward, layer))

    def end_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self.in_forward = False
        self.end()
        if not self.planned:
            self.planned = True
            device = self.flats()[0].shard.device
            with span("agree"):
                alike = same_everywhere(str([self.layers.index(layer) for layer in self.entered]), self.group, device)
            if alike:
                self.plan = self.entered + [layer for layer in self.layers if layer not in self.entered]

    # ── backward ──

    def backward(self, loss: Tensor) -> None:
        self.in_backward = True
        self.begin(self.plan[::-1])
        loss.backward()
        self.end()
        for flat in self.shared:
            self.leaving.send(flat)
        for flat in (flat for layer in self.layers for flat in layer.flats):
            if any(p.grad is not None for p in flat.parameters.values()):  #  used more often than planned
                self.leaving.send(flat)
        self.in_backward = False

    def enter_backward(self, layer: Layer, gradient: Tensor) -> None:
        """The gradient of the layer's output is there: its own backward is next."""
        if self.in_backward:
            self.reach(layer)

    # ── both ──

    def begin(self, plan: Sequence[Layer]) -> None:
        self.ahead = deque(plan)
        for flat in self.shared:
            flat.gather()
        self.gather_next()
        with span("wait for weights", layer="shared"):
            for flat in self.shared:
                flat.wait()

    def reach(self, layer: Layer) -> None:
        """Go on to this layer, past those that this rank does not use: others may."""
        if layer is self.current:
            return
        if layer not in self.ahead:
            return self.visit(layer)
        while self.current is not layer:
            self.visit(self.ahead.popleft())

    def visit(self, layer: Layer) -> None:
        self.leave()
        self.gather(layer)
        self.gather_next()
        with span("wait for weights", layer=layer.name):
            for flat in layer.flats:
                flat.wait()
        self.current = layer
        self.spans.enter_context(span("layer backward" if self.in_backward else "layer forward", layer=layer.name))

    def gather(self, layer: Layer) -> None:
        for flat in layer.flats:
            flat.gather()

    def gather_next(self) -> None:
        if self.fetch_ahead and self.ahead:
            self.gather(self.ahead[0])

    def leave(self) -> None:
        layer, self.current = self.current, None
        if layer is None:
            return
        self.spans.close()
        torch.clear_autocast_cache()  #  it would keep the weights in bfloat16
        for flat in layer.flats:
            flat.free()
        if self.in_backward and layer not in self.ahead:
            for flat in layer.flats:
                self.leaving.send(flat)

    def end(self) -> None:
        while self.ahead:
            self.visit(self.ahead.popleft())
        self.leave()
        torch.clear_autocast_cache()
        for flat in self.shared:
            flat.free()

    def reset(self) -> None:
        """After a step that an error has ended in the middle."""
        self.spans.close()
        self.current, self.in_backward, self.in_forward, self.in_layer = None, False, False, False
        for flat in self.flats():
            if flat.whole is not None:
                flat.free()

    def flats(self) -> list[Flat]:
        return [*self.shared, *(flat for layer in self.layers for flat in layer.flats)]

    def whole_now(self) -> list[Flat]:
        """The flat arrays in which weights that are used now lie."""
        return [*self.shared, *(self.current.flats if self.current else ())]
