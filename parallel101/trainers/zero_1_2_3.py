"""ZeRO: data parallel in which each rank keeps 1/n of what would be the same on all ranks.

               weights   gradients   optimizer state   sent by each rank in a step
    stage 1    all       all         1/n               2(n−1)/n of the weights' bytes
    stage 2    all       1/n         1/n               the same
    stage 3    1/n       1/n         1/n               3(n−1)/n of the weights' bytes

Data parallel sums gradients by all-reduce, which is a reduce-scatter and then an all-gather. ZeRO
takes the optimizer's step between the two. Parameters are put side by side in flat arrays, each of
which is cut into n equal blocks (flat.py):

    reduce-scatter    rank i gets block i of the gradients, summed over all ranks
    optimizer         rank i updates block i of the weights; only rank i has its optimizer state
    all-gather        all ranks get all blocks of the weights

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), sections 5 and 7.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel101.spans import span, wait_span
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.flat import (
    EMPTY,
    Flat,
    ZeRO,
    ZeROGroup,
    flats_of,
    gather,
    wait,
    walk,
)
from parallel101.trainers.gradient_sync import GradientHooks, Parameters, by_size


class ZeRO12(ZeRO):
    """Stages 1 and 2: every rank has all weights, and updates its block of each bucket of them.

        computes    backward 3 │ backward 2 │ backward 1 │       optimizer │
        sends                  │     g₃     │     g₂     │   g₁            │ weights (all-gather)

    A bucket of gradients leaves by reduce-scatter when backward has made them all. Then stage 2
    frees them. Stage 1 keeps them: it adds up those of several microbatches and sends them once,
    while stage 2 sends after each microbatch.
    """

    def __init__(
        self, parameters: Parameters, zero: ZeROGroup, *, zero_stage: int, bucket_bytes: int
    ):
        self.zero_stage = zero_stage
        buckets = by_size(parameters, bucket_bytes, zero.groups)
        flats = [Flat(b, zero, zero_stage) for b in buckets]
        super().__init__(flats, zero)
        self.how = f"ZeRO stage {zero_stage}, in {len(flats)} buckets"
        for name, p in parameters.items():
            p.register_post_accumulate_grad_hook(partial(zero.watch_gradient, name))
        self.hooks = GradientHooks(buckets, self.send, zero.overlap)

    def backward(self, kind: str = "B", last: bool = True) -> AbstractContextManager:
        complete = last or (self.zero_stage == 2 and kind != "I")
        return self.hooks.backward() if complete else nullcontext()

    def send(self, number: int) -> None:
        self.reduce_scatter(self.flats[number])

    def publish(self) -> None:
        """Send the blocks that each rank has updated, after the optimizer's step."""
        with wait_span("gather weights"):
            for bucket in self.flats:
                bucket.all_gather()
            for bucket in self.flats:
                bucket.wait()


class ZeRO3(ZeRO):
    """Stage 3: a layer's weights are whole only while it computes, and the next layer's are on
    their way meanwhile. At most two layers are whole at a time.

        forward  gather 1 │ gather 2 │ gather 3 │         backward  gather 3 │ gather 2 │ gather 1
                          │ layer 1  │ layer 2  │ …                          │ layer 3  │ layer 2
                                       free 1     free 2                                  free 3
                                                                                          g₃ leaves

    After the optimizer's step nothing is sent: the next forward gathers the updated blocks. FSDP
    calls gathering "unshard" and freeing "reshard". All ranks gather the same layers in the same
    order, also layers that only some of them use: that of the first forward, if it was the same on
    all ranks, else the model's.

    Args:
        modules: by name, the layers, which are gathered one at a time. Their hooks tell which one
            is next; see `walk`.
        parameters: by name, those that are trained. Those in no layer, or in several (tied
            weights), are `shared`: whole for all of a forward, and again for all of a backward.

    Attributes: order: of use; a layer that is used twice is in it twice. sends: whether gradients
        leave in this backward; not so in the first half of a split one.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parameters: Parameters, zero: ZeROGroup):
        self.layers, self.shared = flats_of(modules, parameters, zero)
        super().__init__([*self.shared, *sum(self.layers.values(), [])], zero)
        self.how = f"ZeRO stage 3, in {len(self.flats)} layers"
        everyone = max((flat.group for flat in self.flats), key=lambda group: group.size)
        self.agree = Agreement(everyone, self.flats[0].shard.device)
        self.order: list[str] | None = None
        self.used: list[str] = []
        self.upcoming: deque[str] = deque()
        self.current: str | None = None
        self.in_backward = self.sends = False
        self.spans = ExitStack()
        walk({name: modules[name] for name in self.layers}, self.use)

    # ── a forward or a backward ──

    @contextmanager
    def forward(self) -> Iterator[None]:
        self.used = []
        saving = saved_tensors_hooks(self.pack, unpack)
        with self.over_layers(self.order or list(self.layers)), saving:
            yield
        if self.order is None:
            used = self.used if self.agree.same(str(self.used)) else []
            self.order = used + [name for name in self.layers if name not in used]

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
        try:
            with self.over_layers((self.order or list(self.layers))[::-1]):
                yield
        finally:
            self.in_backward = self.sends = False

    @contextmanager
    def over_layers(self, order: Sequence[str]) -> Iterator[None]:
        """Run a forward or backward inside that uses the layers in this order. Weights in no layer,
        or in several, are whole for all of it.

        Afterwards it gathers the layers that only other ranks still use, and frees everything. The
        last gradients leave: the shared weights', and those of layers that were used more often
        than the order says.
        """
        self.upcoming = deque(order)
        gather(self.shared)
        self.prefetch()
        wait("shared", self.shared)
        try:
            yield
        except Exception as error:  # the other ranks may have failed alike, and may go on
            self.spans.close()
            self.receive()
            self.current = None
            self.free()
            if isinstance(error, RuntimeError) and re.search(r"\b0\b", str(error)):
                raise RuntimeError(f"{error}. {EMPTY}") from error
            raise
        while self.upcoming:
            self.enter(self.upcoming.popleft())
        self.leave()
        # also what a backward has gathered on demand: after the optimizer's step it would be old
        self.free()
        for flat in self.flats:
            left = any(p.grad is not None for p in flat.parameters.values())
            if self.sends and (flat in self.shared or left):
                self.reduce_scatter(flat)

    # ── a layer ──

    def use(self, layer: str, backward: bool) -> None:
        """Make this layer current: it computes next, forward or backward.

        Other ranks may use layers that this one skips. It takes part in gathering them, so that all
        ranks gather the same layers in the same order.
        """
        if backward and not self.in_backward:
            return  # a gradient that the forward asks for
        if not self.in_backward:
            self.used.append(layer)
        if layer != self.current and layer not in self.upcoming:  # the order does not have it
            self.enter(layer)
        while layer != self.current:
            self.enter(self.upcoming.popleft())

    def enter(self, layer: str) -> None:
        """Free the layer before, make this one whole, and begin to gather the next one."""
        self.leave()
        gather(self.layers[layer])
        self.prefetch()
        wait(layer, self.layers[layer])
        self.current = layer
        name = "layer backward" if self.in_backward else "layer forward"
        self.spans.enter_context(span(name, layer=layer))

    def prefetch(self) -> None:
        if self.zero.overlap and self.upcoming:
            gather(self.layers[self.upcoming[0]])

    def leave(self) -> None:
        """Free the weights of the current layer, which has computed, and send its gradients."""
        if self.current is None:
            return
        layer, self.current = self.current, None
        self.spans.close()
        for flat in self.layers[layer]:
            flat.free()
            if self.sends and layer not in self.upcoming:  # else it is used once more
                self.reduce_scatter(flat)

    def free(self) -> None:
        for flat in self.flats:
            if flat.whole is not None:
                flat.free()

    # ── a gathered weight that autograd saves for backward: its place is kept, not its values ──
    #
    #     forward    y = x Wᵀ saves x and W     W is kept as "layer 2, elements 0 to 16, 4 × 4"
    #     backward   gx = gy W                  layer 2 is gathered again: W is there, elsewhere
    #
    # Otherwise no layer would ever be freed.

    def pack(self, tensor: Tensor) -> Tensor | tuple[Flat, Any]:
        memory = tensor.untyped_storage()
        for flat in (*self.shared, *self.layers.get(self.current or "", ())):
            if flat.whole is not None and flat.whole.untyped_storage() is memory:
                return flat, (tensor.size(), tensor.stride(), tensor.storage_offset())
        return tensor


def unpack(saved: Tensor | tuple[Flat, Any]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved[0].gathered().as_strided(*saved[1])
