"""Parameters side by side in one flat array, cut into n equal blocks: each rank owns one of them.

    | weight ............ | bias ... | 0 |     zeros fill up the last block if n does not divide
    |   rank 0   |   rank 1   |   rank 2   |   a block holds pieces of parameters, which the
                                               rank's optimizer updates

zero_1_2_3.py says when a flat array is gathered and when its gradients are sent.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from parallel101.collectives import all_gather, reduce_scatter
from parallel101.collectives.asynchronous import (
    AsyncCollective,
    all_gather_async,
    reduce_scatter_async,
)
from parallel101.collectives.meta_device import same_memory
from parallel101.mesh import group_of
from parallel101.spans import wait_span
from parallel101.trainers.batches import tensors_of
from parallel101.trainers.gradient_sync import GradientSync, Parameters, dense_gradient
from parallel101.trainers.layout import Pieces


class ZeROGroup:
    """The ranks over which flat arrays are cut, how these send, and the bytes that are alive only
    for a moment (gathered layers, gradients in flight), as long as anything holds their memory.

    gathered   ▂ ▄ ▄ ▄ ▄ ▂        two layers at most, if every layer is freed;
    leaked     ▂ ▄ ▆ █ █ ▇        a view that somebody keeps keeps the whole storage, and is counted

    It holds weak references to storages: one counts until its last tensor, view or place in a graph
    is gone.

    Args:
        groups: name → (the ranks over which its gradient is summed, anything else that all
            parameters of one array have in common).
        overlap: send and receive while this rank computes.
        algorithm: of all messages, which then run from beginning to end in one call. None:
            "direct", which goes on meanwhile.

    Attributes:
        peak: kind → the most bytes of it that were alive at once since `begin`.
    """

    def __init__(
        self, groups: Mapping[str, Any], overlap: bool = True, algorithm: str | None = None
    ):
        self.groups, self.overlap, self.algorithm = groups, overlap, algorithm
        self.alive: dict[str, weakref.WeakSet[UntypedStorage]] = defaultdict(weakref.WeakSet)
        self.peak: dict[str, int] = defaultdict(int)

    def begin(self) -> None:
        """Forget the peaks of the step before."""
        self.peak.clear()
        for kind in self.alive:
            self.note(kind)

    def watch(self, kind: str, tensor: Tensor) -> None:
        """Count the memory of this tensor from now on."""
        self.alive[kind].add(tensor.untyped_storage())
        self.note(kind)

    def watch_gradient(self, name: str, p: nn.Parameter) -> None:
        """Count the gradient of a parameter, which is there now."""
        self.watch("gradients", dense_gradient(name, p))

    def note(self, kind: str) -> None:
        now = sum(storage.nbytes() for storage in self.alive[kind])
        self.peak[kind] = max(self.peak[kind], now)


EMPTY = (
    "Perhaps a weight was empty where it was used: on ZeRO stage 3 it is whole only in the forward "
    "of a module that has it. Use it there, or zero_stage=2"
)


class Flat:
    """Some parameters of one dtype and device, of which this rank owns 1/n.

    Args:
        parameters: by name. From now on they are views of the flat array.
        zero: the ranks, each of which owns one block.
        zero_stage: on stage 1 this rank keeps all weights and gradients, on 2 all weights, on 3
            only its own block of both.

    Attributes:
        whole: the weights of all blocks, or None while this rank has only its own.
        arriving: the all-gather that fills `whole`, until somebody has waited for it.
        shard, grad: this rank's block of the weights and of their gradients.
        placements: name → Pieces, which elements of the parameter this rank owns.
        owned: name → Parameter, 1-D, this rank's piece; only those that have elements here.
        reached: names of the parameters to which this rank's samples gave a gradient in this step.
    """

    def __init__(self, parameters: Parameters, zero: ZeROGroup, zero_stage: int = 3):
        self.parameters, self.zero = dict(parameters), zero
        self.group = group_of(zero.groups[next(iter(parameters))][0])
        n, position = self.group.size, self.group.position or 0
        values = [p.detach() for p in parameters.values()]
        self.shapes, sizes = [p.shape for p in values], [p.numel() for p in values]
        block = -(-sum(sizes) // n)
        self.padding = block * n - sum(sizes)
        self.cuts = [*sizes, self.padding]
        whole = torch.cat([*(p.reshape(-1) for p in values), values[0].new_zeros(self.padding)])
        shard = whole.view(n, block)[position]
        self.whole: Tensor | None = whole
        self.arriving: AsyncCollective | None = None
        self.shard = shard.clone() if zero_stage == 3 else shard
        dtype = next(iter(parameters.values())).grad_dtype
        self.whole_grad = torch.zeros_like(whole, dtype=dtype) if zero_stage == 1 else None
        self.grad = torch.zeros_like(shard, dtype=dtype)
        if self.whole_grad is not None:
            self.grad = self.whole_grad.view(n, block)[position]

        self.placements: dict[str, Pieces] = {}
        self.owned: dict[str, nn.Parameter] = {}
        self.piece_grads: dict[str, Tensor] = {}
        for name, (start, stop) in zip(parameters, pairwise(accumulate(sizes, initial=0))):
            low, high = (min(max(block * i, start), stop) for i in (position, position + 1))
            self.placements[name] = Pieces(low - start, high - start)
            if low < high:
                here = slice(low - block * position, high - block * position)
                self.owned[name] = piece = nn.Parameter(self.shard[here])
                piece.grad_dtype = dtype
                self.piece_grads[name] = self.grad[here]
        self.begin()
        if zero_stage == 3:
            self.free()
        else:
            self.show(whole.split(self.cuts))

    # ── weights ──

    def all_gather(self) -> None:
        """Begin to fetch the other blocks; (n−1)/n of the bytes arrive."""
        if self.whole is None:
            self.whole = self.shard.new_empty(sum(self.cuts))
            self.zero.watch("weights", self.whole)
        self.arriving = self.send(all_gather_async, all_gather, self.shard, self.whole)

    def wait(self) -> None:
        """Wait until the blocks have arrived. Then the parameters are whole."""
        if self.arriving is not None:
            self.show(self.arriving.wait().split(self.cuts))
            self.arriving = None

    def gathered(self) -> Tensor:
        """Return the whole array, and gather it first if it is not there."""
        gather([self])
        self.wait()
        assert self.whole is not None
        return self.whole

    def show(self, parts: Iterable[Tensor]) -> None:
        """Make the parameters views of these parts of an array."""
        for p, shape, part in zip(self.parameters.values(), self.shapes, parts):
            p.data = part.view(shape)

    def show_shapes(self) -> None:
        """Give the parameters their shapes without memory, so that gradients can be assigned."""
        for p, shape in zip(self.parameters.values(), self.shapes):
            p.data = self.shard.new_zeros(()).expand(shape)

    def free(self) -> None:
        """Free the other ranks' blocks. The parameters are empty until the next gather."""
        self.wait()
        self.whole, empty = None, self.shard.new_empty(0)
        for p in self.parameters.values():
            p.data = empty

    # ── gradients ──

    def begin(self) -> None:
        """Begin a step, without gradients."""
        self.reached: set[str] = set()
        self.summed = False  # whether a sum of this step is in `grad`, or on its way there
        for p in self.parameters.values():
            p.grad = None

    def reduce_scatter(self) -> AsyncCollective:
        """Begin to sum the gradients of all ranks, zeros for parameters without one. The result is
        the sum of this rank's block.

        The first one of a step arrives in `grad` itself, and others are added to it. The parameters
        have no gradients afterwards.
        """
        parts = []
        for (name, p), size in zip(self.parameters.items(), self.cuts):
            if p.grad is None:  # and p may be empty now
                parts.append(self.grad.new_zeros(size))
                continue
            parts.append(dense_gradient(name, p).reshape(-1))
            self.zero.watch("gradients", p.grad)
            self.reached.add(name)
            p.grad = None
        if self.padding:
            parts.append(self.grad.new_zeros(self.padding))
        gradients = parts[0]  # a single one is sent from the memory that it is in
        if len(parts) > 1 or self.whole_grad is not None:
            gradients = torch.cat(parts, out=self.whole_grad)
        if self.whole_grad is None:
            self.zero.watch("gradients", gradients)
        out, self.summed = None if self.summed else self.grad, True
        return self.send(reduce_scatter_async, reduce_scatter, gradients, out)

    def send(self, begin: Any, run: Any, x: Tensor, out: Tensor | None) -> AsyncCollective:
        """Begin a collective, or run one that has an algorithm to its end."""
        if self.zero.algorithm is None:
            return begin(x, group=self.group, out=out)
        result = run(x, group=self.group, algorithm=self.zero.algorithm)
        return AsyncCollective(iter(()), result if out is None else out.copy_(result))


def flats_of(
    modules: Mapping[str, nn.Module], parameters: Parameters, zero: ZeROGroup
) -> tuple[dict[str, list[Flat]], list[Flat]]:
    """Return each layer's parameters in flat arrays, by name, and the rest: those that several
    layers use (tied weights) or none.
    """
    users: dict[nn.Parameter, list[str]] = defaultdict(list)
    for layer, module in modules.items():
        for p in module.parameters():
            users[p].append(layer)
    arrays: dict[str, dict[Any, dict[str, nn.Parameter]]] = {name: {} for name in ["", *modules]}
    for name, p in parameters.items():
        of_layer = arrays[users[p][0] if len(users[p]) == 1 else ""]
        of_layer.setdefault((p.dtype, p.device, zero.groups[name]), {})[name] = p
    shared, *of_layers = (
        [Flat(array, zero) for array in of_layer.values()] for of_layer in arrays.values()
    )
    return {name: flats for name, flats in zip(modules, of_layers) if flats}, shared


def gather(flats: Sequence[Flat]) -> None:
    """Begin to fetch the weights of these arrays, unless they are here."""
    for flat in flats:
        if flat.whole is None:
            flat.all_gather()


def wait(layer: str, flats: Sequence[Flat]) -> None:
    with wait_span("wait for weights", layer=layer):
        for flat in flats:
            flat.wait()


class ZeRO(GradientSync):
    """The common part of the stages: each rank owns 1/n of each flat array, and gradients travel.

    Args: flats: all arrays, in the same order on every rank.
    """

    def __init__(self, flats: Sequence[Flat], zero: ZeROGroup):
        super().__init__({name: piece for flat in flats for name, piece in flat.owned.items()})
        self.placements = {n: pieces for flat in flats for n, pieces in flat.placements.items()}
        self.flats, self.zero = flats, zero
        self.in_flight: list[tuple[Flat, AsyncCollective]] = []

    def begin(self) -> None:
        self.zero.begin()
        self.receive()  # what a step has left that an error has ended
        for flat in self.flats:
            flat.begin()

    def reduce_scatter(self, flat: Flat) -> None:
        """Begin to sum the gradients of all ranks, each block at its owner.

        Two arrays travel at a time. Once they have arrived, all but this rank's block is freed.
        """
        self.in_flight.append((flat, flat.reduce_scatter()))
        self.receive(leave=1)

    def receive(self, leave: int = 0) -> None:
        """Wait for the sums of this rank's blocks, but not for the last `leave`."""
        while len(self.in_flight) > leave:
            flat, total = self.in_flight.pop(0)
            with wait_span("wait for gradients"):
                arrived = total.wait()
            if not same_memory(arrived, flat.grad):
                flat.grad += arrived

    def finish(self) -> list[str]:
        self.receive()
        for flat in self.flats:
            for name, piece in flat.owned.items():
                piece.grad = flat.piece_grads[name]
        return [name for flat in self.flats for name in flat.parameters if name not in flat.reached]


# ── the layers of a model, in turn ──


def walk(layers: Mapping[str, nn.Module], use: Callable[[str, bool], None]) -> None:
    """Let hooks call `use` with a layer's name: with False before it computes, and again if
    activation checkpointing repeats that in backward; with True once the gradient of an output is
    there.
    """

    # messages are not traced, if something is compiled
    hook = torch.compiler.disable if "torch._dynamo" in sys.modules else lambda f: f

    def before(name: str, *_: Any) -> None:
        use(name, False)

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                # a layer that returns its input as it is has no backward, and would come too late
                node: Any = tensor.grad_fn
                known = set() if node is None else node.metadata.setdefault(walk, set())
                if tensor.output_nr not in known:
                    known.add(tensor.output_nr)
                    tensor.register_hook(lambda _: use(name, True))

    for name, module in layers.items():
        # first, so that other hooks see whole weights
        module.register_forward_pre_hook(hook(partial(before, name)), prepend=True)
        module.register_forward_hook(hook(partial(after, name)))
