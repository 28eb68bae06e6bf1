"""ZeRO stage 3: weights are whole only while they are needed.

A layer is gathered before its forward and again before its backward.

    forward    gather 1 | gather 2 | gather 3 |              backward   gather 3 | gather 2 | gather 1 |
                        | layer 1  | layer 2  | layer 3                          | layer 3  | layer 2  | layer 1
                                     free 1     free 2                                        free 3     free 2
                                                                                              g₃ leaves  g₂ leaves

The next layer is fetched while one computes, so two are whole at a time; 3(n−1)/n of the weights'
bytes are sent in a step. Source: Rajbhandari et al., "ZeRO" (2020), sections 5.3 and 7.2.2. FSDP
calls gathering "unshard" and freeing "reshard".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# torch has no public name for it; tests/trainers/test_unusual_models.py needs it
from torch.utils._pytree import tree_leaves

from parallel101.mesh import GroupLike, group_of
from parallel101.record.spans import span, wait_span
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.gradient_sync import GradientSync, Parameters
from parallel101.trainers.support.memory import LiveBytes
from parallel101.trainers.zero.flat import Flat, GradientReducer, by_kind
from parallel101.trainers.zero.model_layers import layers_of, share_out
from parallel101.trainers.zero.saved_weights import saved_as_places
from parallel101.trainers.zero.stage12 import give_gradients, held_by, in_words, peaks_of

WHOLE = (
    "on ZeRO stage 3 it is whole only in the forward of a module that has it. layers=(…) names "
    "the types that are gathered one at a time; "
    "weights in none of them are whole during the model's whole forward"
)


class Layer:
    """A module and the flat arrays of its parameters (one, if they are of one dtype)."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[Flat]):
        self.name, self.module, self.flats = name, module, list(flats)


def is_compiled(module: nn.Module) -> bool:
    """Whether it is torch.compile(module), or was compiled in place by module.compile()."""
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )


class ZeRO3(GradientSync):
    """A GradientSync (see gradients.py) that gathers and frees the layers of a model as it runs,
    forward and backward.

    All ranks gather the same layers in the same order, also those that only some of them use. It is
    the order of the first forward if that was the same on all ranks, else the model's. A layer that
    comes out of turn is gathered when it is needed, on all ranks.

    Args: model: its hooks tell which layer is next. parameters: by name, those that are trained.
        layers: the types of the modules that are gathered one at a time; None: see `layers_of`.
        Parameters in none of them, or in several
            of them (tied weights), are whole for all of a forward, and again for all of a backward.
        overlap: fetch the next layer while one computes.
    """

    LEARNT = ("order", "order_known")

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        group: GroupLike,
        *,
        layers: Sequence[type[nn.Module]] | None = None,
        overlap: bool = True,
        autocast: torch.dtype | None = None,
        apart: Mapping[str, str] = {},
    ):
        modules = dict(layers_of(model, None if layers is None else tuple(layers)))
        own, shared = share_out(modules, parameters)
        self.ranks, self.overlap, self.autocast = (
            group_of(group).size,
            overlap,
            autocast,
        )
        self.live, self.reducer = LiveBytes(), GradientReducer(group)

        def flats_of(names: Parameters) -> list[Flat]:
            return [
                Flat(kind, group, self.live, weights=False, gradients=False)
                for kind in by_kind(names, apart)
            ]

        self.layers = [
            Layer(name, modules[name], flats_of(own[name])) for name in modules if own[name]
        ]
        self.shared = flats_of(shared)
        self.flats = [*self.shared, *(flat for layer in self.layers for flat in layer.flats)]
        self.owned = {name: piece for flat in self.flats for name, piece in flat.owned.items()}
        self.placements = {
            name: pieces for flat in self.flats for name, pieces in flat.placements.items()
        }
        self.agree = Agreement(group, self.flats[0].shard.device)

        # in which they are used; a layer that is used twice is in it twice
        self.order = list(self.layers)
        self.order_known = False
        self.entered: list[Layer] = []
        self.upcoming: deque[Layer] = deque()
        self.current: Layer | None = None
        self.in_backward = self.in_forward = self.in_layer = False
        self.sends = True  # whether gradients leave in a backward; not so in the first half of one
        self.spans = ExitStack()
        # messages are not traced
        hook = torch.compiler.disable if any(map(is_compiled, model.modules())) else lambda f: f
        # first, so that other hooks see whole weights
        model.register_forward_pre_hook(hook(self.begin_forward), prepend=True)
        for layer in self.layers:
            layer.module.register_forward_pre_hook(
                hook(partial(self.pre_forward, layer)), prepend=True
            )
            layer.module.register_forward_hook(hook(partial(self.post_forward, layer)))
        model.register_forward_hook(hook(self.end_forward))

    def begin(self) -> None:
        self.live.begin()
        self.reducer.begin()
        for flat in self.flats:
            flat.begin()
            for p in flat.parameters.values():
                p.grad = None

    # ── forward ──

    @contextmanager
    def forward(self) -> Iterator[None]:
        self.passed = False
        try:
            with (
                saved_as_places(self.whole_now, self.autocast)
                if torch.is_grad_enabled()
                else nullcontext()
            ):
                yield
        except RuntimeError as error:
            if self.in_layer or not self.in_forward:
                raise
            raise RuntimeError(
                f"{error}. This was between two layers: if a weight was used there, it was "
                f"empty, for {WHOLE}"
            ) from error
        finally:
            # an error ended this rank's forward, and the others go on
            if not self.passed:
                if not self.in_forward:
                    self.begin_forward()
                self.end_forward()

    def begin_forward(self, *_: Any) -> None:
        self.reset()
        self.in_forward = True
        self.entered = []
        self.begin_pass(self.order)

    def pre_forward(self, layer: Layer, *_: Any) -> None:
        # activation checkpointing runs a forward again in backward; the layer is here already
        if not self.in_backward:
            self.entered.append(layer)
            self.in_layer = True
        self.advance_to(layer)

    def post_forward(self, layer: Layer, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.in_backward:
            return
        self.in_layer = False
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.pre_backward, layer))

    def end_forward(self, *_: Any) -> None:
        self.in_forward = self.in_layer = False
        self.passed = True
        self.end_pass()
        if not self.order_known:
            self.order_known = True
            if self.agree.same(str([self.layers.index(layer) for layer in self.entered])):
                self.order = self.entered + [
                    layer for layer in self.layers if layer not in self.entered
                ]

    # ── backward ──

    def backward(self, kind: str = "B", last: bool = True) -> AbstractContextManager:
        return self.weight_gradients() if kind == "W" else self.backward_pass(sends=kind == "B")

    @contextmanager
    def weight_gradients(self) -> Iterator[None]:
        """Computing them needs no weights.

        What is assigned to .grad must have the parameter's shape, which takes no memory.
        """
        for flat in self.flats:
            flat.show_shapes()
        try:
            yield
        finally:
            for flat in self.flats:
                flat.free()
                self.reducer.send(flat)

    @contextmanager
    def backward_pass(self, sends: bool) -> Iterator[None]:
        self.in_backward, self.sends = True, sends
        self.begin_pass(self.order[::-1])
        try:
            yield
        except Exception as error:
            self.upcoming, self.sends, sends = deque(), False, False
            if "got [0] but expected shape" not in str(error):
                raise
            raise RuntimeError(
                f"{error}. A weight was empty where it was used (a penalty in the loss, for "
                f"example), for {WHOLE}"
            ) from error
        finally:
            self.end_pass()
            for flat in self.shared if sends else ():
                self.reducer.send(flat)
            for flat in (flat for layer in self.layers if sends for flat in layer.flats):
                # used more often than planned
                if any(p.grad is not None for p in flat.parameters.values()):
                    self.reducer.send(flat)
            self.in_backward = False

    def pre_backward(self, layer: Layer, gradient: Tensor) -> None:
        """The gradient of the layer's output is there: its own backward is next."""
        if self.in_backward:
            self.advance_to(layer)

    def finish(self) -> list[str]:
        self.reducer.finish()
        return give_gradients(self.flats)

    def publish(self) -> None:
        """Nothing: the next forward gathers what the owners have updated."""

    # ── a pass over the layers, in either direction ──

    def begin_pass(self, order: Sequence[Layer]) -> None:
        self.upcoming = deque(order)
        for flat in self.shared:
            flat.gather()
        self.prefetch()
        with wait_span("wait for weights", layer="shared"):
            for flat in self.shared:
                flat.wait()

    def advance_to(self, layer: Layer) -> None:
        """Go on to this layer, past those that this rank does not use: others may."""
        if layer is self.current:
            return
        if layer not in self.upcoming:
            return self.unshard(layer)
        while self.current is not layer:
            self.unshard(self.upcoming.popleft())

    def unshard(self, layer: Layer) -> None:
        self.reshard()
        for flat in layer.flats:
            flat.gather()
        self.prefetch()
        with wait_span("wait for weights", layer=layer.name):
            for flat in layer.flats:
                flat.wait()
        self.current = layer
        self.spans.enter_context(
            span("layer backward" if self.in_backward else "layer forward", layer=layer.name)
        )

    def prefetch(self) -> None:
        if self.overlap and self.upcoming:
            for flat in self.upcoming[0].flats:
                flat.gather()

    def reshard(self) -> None:
        """Free the current layer; in backward, its gradients leave."""
        layer, self.current = self.current, None
        if layer is None:
            return
        self.spans.close()
        torch.clear_autocast_cache()  # it would keep the weights in bfloat16
        for flat in layer.flats:
            flat.free()
        if self.in_backward and self.sends and layer not in self.upcoming:
            for flat in layer.flats:
                self.reducer.send(flat)

    def end_pass(self) -> None:
        while self.upcoming:
            self.unshard(self.upcoming.popleft())
        self.reshard()
        torch.clear_autocast_cache()
        for flat in self.shared:
            flat.free()

    def reset(self) -> None:
        """Free what an error in the middle of an earlier pass has left."""
        self.spans.close()
        self.current, self.in_backward, self.in_forward, self.in_layer = None, False, False, False
        for flat in self.flats:
            if flat.whole is not None:
                flat.free()

    def whole_now(self) -> list[Flat]:
        """The flat arrays of the weights that are in use now."""
        return [*self.shared, *(self.current.flats if self.current else ())]

    # ── what it holds ──

    def held(self) -> Mapping[str, list[Tensor]]:
        return held_by(self.flats)

    def peaks(self) -> Mapping[str, int]:
        return peaks_of(self.live)

    def describe(self) -> str:
        return in_words(3, self.flats, "layers", self.ranks)
