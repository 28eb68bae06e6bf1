"""Gradients that leave for their owners while backward still computes others: one reduce-scatter a flat array, two at a time.

backward   ── layer 3 ──▶── layer 2 ──▶── layer 1 ──▶
gradients                g₃ leaves     g₂ leaves     g₁ leaves        each rank keeps the sum of its block;
                                       g₃ is gone    g₂ is gone       the rest is free when it has left
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from parallel101.collectives.asynchronous import AsyncCollective, reduce_scatter_async
from parallel101.mesh import GroupLike
from parallel101.record.spans import span
from parallel101.trainers.buckets import twice
from parallel101.trainers.flat import Flat


class Leaving:
    """The reduce-scatters that are under way: at most this one and the one before."""

    def __init__(self, group: GroupLike):
        self.group = group
        self.under_way: list[tuple[Flat, AsyncCollective]] = []

    def send(self, flat: Flat) -> None:
        """Begin to add up the gradients of all ranks, in each block's owner. All ranks call it in the same order."""
        gradient = flat.take_gradients()
        out = flat.grad if flat.fresh else None
        flat.fresh = False
        self.under_way.append((flat, reduce_scatter_async(gradient, group=self.group, out=out)))
        self.finish(leave=1)

    def finish(self, leave: int = 0) -> None:
        """Wait for all but the last `leave` of them."""
        while len(self.under_way) > leave:
            flat, under_way = self.under_way.pop(0)
            with span("wait for gradients"):
                total = under_way.wait()
            if total is not flat.grad and total.data_ptr() != flat.grad.data_ptr():
                flat.grad += total

    def drop(self) -> None:
        self.under_way = []


class AsReady:
    """Sends each flat array as soon as backward has made all its gradients; in the same order on every rank, whatever came first."""

    def __init__(self, flats: Sequence[Flat], leaving: Leaving, overlap: bool):
        self.flats, self.leaving, self.overlap = flats, leaving, overlap
        self.listening = False
        self.sent = 0
        self.missing: dict[Flat, set[nn.Parameter]] = {}
        self.home = {p: (flat, name) for flat in flats for name, p in flat.parameters.items()}
        for p in self.home:
            p.register_post_accumulate_grad_hook(self.ready)

    def backward(self, loss: Tensor, complete: bool) -> None:
        """`complete`: after this backward the gradients may leave. Until then they add up on this rank."""
        self.sent, self.missing = 0, {flat: set(flat.parameters.values()) for flat in self.flats}
        self.listening = complete
        try:
            loss.backward()
        finally:
            self.listening = False
        if complete:
            while self.sent < len(self.flats):  #  those with parameters that this rank's samples have not reached, and what they held up
                self.send()

    def ready(self, p: Tensor) -> None:
        assert isinstance(p, nn.Parameter) and p.grad is not None
        flat, name = self.home[p]
        flat.live.watch("gradients", p.grad)
        if self.listening:
            if self.overlap and p not in self.missing[flat]:
                raise twice(name)
            with span("gradient ready", parameter=name):
                self.missing[flat].discard(p)
            while self.overlap and self.sent < len(self.flats) and not self.missing[self.flats[self.sent]]:
                self.send()

    def send(self) -> None:
        self.leaving.send(self.flats[self.sent])
        self.sent += 1
