"""A model that is run layer by layer: its flat arrays, and hooks that tell which layer is next.

begin_pass │ use layer 1 │ use layer 2 │ … │ end_pass       forward
begin_pass │ … │ use layer 2 │ use layer 1 │ end_pass       backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# torch has no public name for it; tests/trainers/test_unusual_models.py needs it
from torch.utils._pytree import tree_leaves

from parallel101.spans import wait_span
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.gradient_sync import Parameters
from parallel101.trainers.zero.flat import Flat, Sharing
from parallel101.trainers.zero.model_layers import layers_of, share_out
from parallel101.trainers.zero.saved_weights import pack_and_unpack
from parallel101.trainers.zero.sharded_sync import ShardedSync

EMPTY = (
    "Perhaps a weight was empty where it was used (a penalty in the loss, for example): on ZeRO "
    "stage 3 it is whole only in the forward of a module that has it. layers=(…) names the types "
    "that are gathered one at a time; weights in none of them are whole during the model's whole "
    "forward"
)


class Layer(NamedTuple):
    """A module's parameters, in flat arrays (one, if they are of one dtype)."""

    name: str
    flats: list[Flat]

    def all_gather(self) -> None:
        """Begin to fetch the weights, unless they are here."""
        for flat in self.flats:
            if flat.whole is None:
                flat.all_gather()

    def wait(self) -> None:
        """Wait for the weights."""
        with wait_span("wait for weights", layer=self.name):
            for flat in self.flats:
                flat.wait()

    def free(self) -> None:
        torch.clear_autocast_cache()  # it would keep the weights in bfloat16
        for flat in self.flats:
            flat.free()


class LayerByLayer(ShardedSync):
    """Follows a model, forward and backward, and calls `begin_pass`, `use` and `end_pass`.

    All ranks gather the same layers in the same order, also layers that only some of them use: in
    the order of the first forward if that was the same on all ranks, else in the model's.

    Args:
        model: its hooks tell which layer is next.
        parameters: by name, those that are trained.
        types: of the modules that are layers, gathered one at a time; None: see `layers_of`.
            Parameters in none of them, or in several of them (tied weights), are `shared`: whole
            for all of a forward, and again for all of a backward.

    Attributes:
        order: the layers in the order of their use; a layer that is used twice is in it twice.
        sends: whether gradients leave in this backward; not so in the first half of a split one.
    """

    arrays = "layers"

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        sharing: Sharing,
        types: Sequence[type[nn.Module]] | None = None,
        autocast: torch.dtype | None = None,
    ):
        modules = dict(layers_of(model, None if types is None else tuple(types)))
        own, shared = share_out(modules, parameters)
        self.layers = [Layer(name, flats_of(own[name], sharing)) for name in modules if own[name]]
        self.shared = Layer("shared", flats_of(shared, sharing))
        flats = [flat for layer in (self.shared, *self.layers) for flat in layer.flats]
        super().__init__(flats, sharing)
        self.autocast, self.agree = autocast, Agreement(sharing.group, flats[0].shard.device)
        self.order: list[Layer] | None = None
        self.used: list[Layer] = []
        self.in_backward = self.sends = self.between_layers = self.passed = False
        self.current: Layer | None = None
        self.spans = ExitStack()
        # messages are not traced
        hook = torch.compiler.disable if any(map(is_compiled, model.modules())) else lambda f: f
        # first, so that other hooks see whole weights
        model.register_forward_pre_hook(hook(self.begin_forward), prepend=True)
        for layer in self.layers:
            before, after = partial(self.before, layer), partial(self.after, layer)
            modules[layer.name].register_forward_pre_hook(hook(before), prepend=True)
            modules[layer.name].register_forward_hook(hook(after))
        model.register_forward_hook(hook(self.end_forward))

    # ── what ZeRO-3 does ──

    def begin_pass(self, order: Sequence[Layer]) -> None:
        """Begin a forward or backward, which will use the layers in this order."""
        raise NotImplementedError

    def use(self, layer: Layer) -> None:
        """Make this layer current: it computes next."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """End the forward or backward."""
        raise NotImplementedError

    # ── forward ──

    @contextmanager
    def forward(self) -> Iterator[None]:
        self.passed = False
        saved = saved_tensors_hooks(*pack_and_unpack(self.whole_now, self.autocast))
        with self.running(), saved:
            yield
        if not self.passed:  # no samples on this rank, which sends what the others wait for
            self.begin_forward()
            self.end_forward()

    def begin_forward(self, *_: Any) -> None:
        self.reset()
        self.begin_pass(self.order or self.layers)
        self.between_layers = True

    def before(self, layer: Layer, *_: Any) -> None:
        # activation checkpointing runs a forward again in backward; the layer is here already
        if not self.in_backward:
            self.used.append(layer)
            self.between_layers = False
        self.use(layer)

    def after(self, layer: Layer, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.in_backward:
            return
        self.between_layers = True
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.before_backward, layer))

    def end_forward(self, *_: Any) -> None:
        self.between_layers, self.passed = False, True
        self.end_pass()
        if self.order is None:
            numbers = {layer.name: number for number, layer in enumerate(self.layers)}
            same = self.agree.same(str([numbers[layer.name] for layer in self.used]))
            used = self.used if same else []
            unused = [layer for layer in self.layers if layer not in used]
            self.order = used + unused

    # ── backward ──

    @contextmanager
    def backward(self, kind: str = "B", last: bool = True) -> Iterator[None]:
        if kind == "W":  # weight gradients, for which no weights are needed, only their shapes
            for flat in self.flats:
                flat.show_shapes()
            yield
            for flat in self.flats:
                flat.free()
                self.reduce_scatter(flat)
            return
        self.in_backward, self.sends = True, kind == "B"
        self.begin_pass((self.order or self.layers)[::-1])
        with self.running():
            yield
        self.end_pass()
        self.in_backward = self.sends = False

    def before_backward(self, layer: Layer, gradient: Tensor) -> None:
        """Note that the gradient of the layer's output is there: its own backward is next."""
        if self.in_backward:
            self.use(layer)

    # ── errors ──

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the model's forward or backward. An error that an empty weight may have caused
        says so.
        """
        self.between_layers = False
        try:
            with self.spans:
                yield
        except Exception as error:
            empty = self.between_layers or "got [0] but expected shape" in str(error)
            # the other ranks may have failed alike, and their program may go on
            self.receive()
            self.reset()
            if empty and isinstance(error, RuntimeError):
                raise RuntimeError(f"{error}. {EMPTY}") from error
            raise

    def reset(self) -> None:
        """Free what an error has left, after waiting for weights on their way."""
        self.used, self.current, self.between_layers = [], None, False
        self.in_backward = self.sends = False
        for flat in self.flats:
            if flat.whole is not None:
                flat.wait()
                flat.free()

    def whole_now(self) -> list[Flat]:
        """Return the flat arrays of the weights that are in use now."""
        return [*self.shared.flats, *(self.current.flats if self.current else ())]


def is_compiled(module: nn.Module) -> bool:
    """Return whether it is torch.compile(module), or was compiled in place by .compile()."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or "_orig_mod" in module._modules


def flats_of(parameters: Parameters, sharing: Sharing) -> list[Flat]:
    """Return the parameters in flat arrays, each of one dtype and device."""
    kinds: dict[Any, dict[str, nn.Parameter]] = {}
    for name, p in parameters.items():
        kinds.setdefault((p.dtype, p.device, sharing.apart.get(name)), {})[name] = p
    return [Flat(kind, sharing, weights=False) for kind in kinds.values()]
