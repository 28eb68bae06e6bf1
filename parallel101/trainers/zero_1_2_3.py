"""ZeRO: data parallel in which each rank keeps 1/n of what would be the same on all ranks.

               weights   gradients   optimizer state   sent by each rank in a step
    stage 1    all       all         1/n               2(n−1)/n of the weights' bytes
    stage 2    all       1/n         1/n               the same
    stage 3    1/n       1/n         1/n               3(n−1)/n of the weights' bytes

Data parallel sums gradients by all-reduce, which is a reduce-scatter and then an all-gather. ZeRO
takes the optimizer's step between the two. Parameters are put side by side in flat arrays, each of
which is cut into n equal blocks (zero/flat.py):

    reduce-scatter    rank i gets block i of the gradients, summed over all ranks
    optimizer         rank i updates block i of the weights; only rank i has its optimizer state
    all-gather        all ranks get all blocks of the weights

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), sections 5 and 7.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from parallel101.spans import span, wait_span
from parallel101.trainers.gradient_sync import (
    Parameters,
    by_size,
    completed_twice,
    dense_gradient,
)
from parallel101.trainers.zero.flat import Flat, Sharing
from parallel101.trainers.zero.layer_by_layer import Layer, LayerByLayer
from parallel101.trainers.zero.sharded_sync import ShardedSync


class ZeRO12(ShardedSync):
    """Stages 1 and 2: every rank has all weights, and updates its block of each bucket of them.

        computes    backward 3 │ backward 2 │ backward 1 │       optimizer │
        sends                  │     g₃     │     g₂     │   g₁            │ weights (all-gather)

    A bucket of gradients leaves by reduce-scatter when backward has made them all. Then stage 2
    frees them. Stage 1 keeps them: it adds up those of several microbatches and sends them once,
    while stage 2 sends after each microbatch.
    """

    arrays = "buckets"

    def __init__(
        self, parameters: Parameters, sharing: Sharing, *, zero_stage: int, bucket_bytes: int
    ):
        self.zero_stage = zero_stage
        buckets = [
            Flat(together, sharing, weights=True, gradients=zero_stage == 1)
            for together in by_size(parameters, bucket_bytes, sharing.apart)
        ]
        super().__init__(buckets, sharing)
        self.overlap, self.listening = sharing.overlap, False
        self.missing: dict[Flat, set[nn.Parameter]] = {}  # to be sent → its gradients to come
        self.home = {p: (flat, name) for flat in buckets for name, p in flat.parameters.items()}
        for p in self.home:
            p.register_post_accumulate_grad_hook(self.ready)

    @contextmanager
    def backward(self, kind: str = "B", last: bool = True) -> Iterator[None]:
        complete = last or (self.zero_stage == 2 and kind != "I")
        self.missing = {flat: set(flat.parameters.values()) for flat in self.flats}
        self.listening = complete
        try:
            yield
        finally:
            self.listening = False
        while complete and self.missing:  # some gradient in it never came
            self.send_next()

    def ready(self, p: nn.Parameter) -> None:
        """Note that the gradient of p is complete. autograd calls this."""
        flat, name = self.home[p]
        flat.live.watch("gradients", dense_gradient(name, p))
        if not self.listening:
            return
        if self.overlap and p not in self.missing.get(flat, ()):
            raise completed_twice(name)
        with span("gradient ready", parameter=name):
            self.missing[flat].discard(p)
        while self.overlap and self.missing and not next(iter(self.missing.values())):
            self.send_next()

    def send_next(self) -> None:
        flat = next(iter(self.missing))
        del self.missing[flat]
        self.reduce_scatter(flat)

    def publish(self) -> None:
        """Send the blocks that each rank has updated, after the optimizer's step."""
        with wait_span("gather weights"):
            for bucket in self.flats:
                bucket.all_gather()
            for bucket in self.flats:
                bucket.wait()


class ZeRO3(LayerByLayer):
    """Stage 3: a layer's weights are whole only while it computes, and the next layer's are on
    their way meanwhile. At most two layers are whole at a time.

        forward  gather 1 │ gather 2 │ gather 3 │         backward  gather 3 │ gather 2 │ gather 1
                          │ layer 1  │ layer 2  │ …                          │ layer 3  │ layer 2
                                       free 1     free 2                                  free 3
                                                                                          g₃ leaves

    LayerByLayer has hooks on the model, which call begin_pass, use and end_pass. After the
    optimizer's step nothing is sent: the next forward gathers the updated blocks. FSDP calls
    gathering "unshard" and freeing "reshard".
    """

    zero_stage = 3

    def begin_pass(self, order: Sequence[Layer]) -> None:
        """Begin a forward or a backward, which will use the layers in this order.

        Weights in no layer, or in several (tied weights), are whole for all of it.
        """
        self.upcoming = deque(order)
        self.shared.all_gather()
        self.prefetch()
        self.shared.wait()

    def use(self, layer: Layer) -> None:
        """Make this layer current: it computes next, forward or backward.

        Other ranks may use layers that this one skips. It takes part in gathering them, so that all
        ranks gather the same layers in the same order.
        """
        if layer is not self.current and layer not in self.upcoming:  # the order does not have it
            self.enter(layer)
        while layer is not self.current:
            self.enter(self.upcoming.popleft())

    def enter(self, layer: Layer) -> None:
        """Free the layer before, make this one whole, and begin to gather the next one."""
        self.leave()
        layer.all_gather()
        self.prefetch()
        layer.wait()
        self.current = layer
        name = "layer backward" if self.in_backward else "layer forward"
        self.spans.enter_context(span(name, layer=layer.name))

    def prefetch(self) -> None:
        if self.sharing.overlap and self.upcoming:
            self.upcoming[0].all_gather()

    def leave(self) -> None:
        """Free the weights of the current layer, which has computed, and send its gradients."""
        if self.current is None:
            return
        layer, self.current = self.current, None
        self.spans.close()
        layer.free()
        if self.sends and layer not in self.upcoming:  # else it is used once more
            for flat in layer.flats:
                self.reduce_scatter(flat)

    def end_pass(self) -> None:
        """Gather the layers that only other ranks still use, and free everything.

        After a backward the last gradients leave: the shared weights', and those of layers that
        were used more often than the order says.
        """
        while self.upcoming:
            self.enter(self.upcoming.popleft())
        self.leave()
        self.shared.free()
        for flat in self.flats:
            if self.sends and (flat in self.shared.flats or flat.has_gradients()):
                self.reduce_scatter(flat)
