"""Which buckets of gradients are complete, and leave during backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from parallel101.spans import span
from parallel101.trainers.gradient_sync import completed_twice, dense_gradient
from parallel101.trainers.zero.flat import Flat


class BucketHooks:
    """Hooks on parameters, which call `send(flat)` when backward has made all gradients of a flat
    array: in the order of `flats`, whatever came first.

    Args: overlap: whether to send during backward, and not after it.
    """

    def __init__(self, flats: Sequence[Flat], send: Callable[[Flat], None], overlap: bool):
        self.flats, self.send, self.overlap, self.listening = flats, send, overlap, False
        self.missing: dict[Flat, set[nn.Parameter]] = {}  # to be sent → its gradients to come
        self.home = {p: (flat, name) for flat in flats for name, p in flat.parameters.items()}
        for p in self.home:
            p.register_post_accumulate_grad_hook(self.ready)

    @contextmanager
    def sending(self, complete: bool) -> Iterator[None]:
        """Goes around a backward. If gradients are `complete` after it, all are sent."""
        self.missing = {flat: set(flat.parameters.values()) for flat in self.flats}
        self.listening = complete
        try:
            yield
        finally:
            self.listening = False
        while complete and self.missing:  # some gradient in it never came
            self.send_next()

    def ready(self, p: nn.Parameter) -> None:
        """autograd calls this when the gradient of p is complete."""
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
        self.send(flat)
