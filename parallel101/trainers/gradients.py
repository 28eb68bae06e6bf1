"""Gradient synchronisation over the data axis: after it, every rank has the sum of all ranks'
gradients.

Naive         ──forward──▶◀──backward──  g₃ g₂ g₁ g₀       one all-reduce a gradient, after backward
Bucketed      ──forward──▶◀──backward──  g₃₂  g₁₀          one all-reduce a bucket: fewer and larger messages
Overlapped    ──forward──▶◀──backward──  g₁₀               a bucket's all-reduce begins as soon as it is full, during backward
                               g₃₂

Each rank's loss is already weighted by its share of the samples, so the sum is the gradient of the
whole batch. Here gradients and weights stay whole on every rank; zero/ shards them. Source: Li et
al., "PyTorch Distributed" (2020), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel101.collectives import all_reduce
from parallel101.collectives.asynchronous import AsyncCollective, all_reduce_async
from parallel101.mesh import GroupLike
from parallel101.record.spans import span, wait_span
from parallel101.trainers.layout import Pieces
from parallel101.trainers.support.memory import readable

Parameters = Mapping[str, nn.Parameter]
MiB = 1024**2


class GradientSync(Protocol):
    """What the step needs: `begin`, then `forward` and `backward` around each microbatch's, then
    `finish`, the optimizer, `publish`.

    A backward is whole ("B"), or its halves come one by one: "I", the input gradients, and "W", the
    weight gradients. `last`: with it the gradients of the step are complete. `ready` tells of a
    gradient that no autograd hook tells of (see weight_gradients.py).

    After an error on one rank it still goes through all of them, so that the other ranks get every
    message that they wait for.

    Attributes:
        owned: name → Parameter that this rank's optimizer updates; `finish` sets their .grad.
        placements: name → Pieces, how the data axis cuts them. Empty: every rank has all.
    """

    @property
    def owned(self) -> Parameters: ...
    @property
    def placements(self) -> Mapping[str, Pieces]: ...
    def begin(self) -> None: ...
    def forward(self) -> AbstractContextManager: ...
    def backward(self, kind: str, last: bool) -> AbstractContextManager: ...
    def ready(self, p: Tensor) -> None: ...
    def finish(self) -> list[str]: ...
    def publish(self) -> None: ...
    def held(self) -> Mapping[str, list[Tensor]]: ...
    def peaks(self) -> Mapping[str, int]: ...
    def describe(self) -> str: ...


class Naive:
    """First: backward as always, then one all-reduce for each gradient."""

    placements: Mapping[str, Pieces] = {}

    def __init__(self, parameters: Parameters, group: GroupLike):
        self.owned, self.group = parameters, group

    def begin(self) -> None:
        """A step begins."""

    def forward(self) -> AbstractContextManager:
        """Around a forward, its loss included."""
        return nullcontext()

    def backward(self, kind: str, last: bool) -> AbstractContextManager:
        """Around a backward, or half of one ("I", "W"); `last` in this step: the gradients are
        complete after it.
        """
        return nullcontext()

    def ready(self, p: Tensor) -> None:
        """The gradient of p is complete."""

    def finish(self) -> list[str]:
        """Every gradient becomes the sum of all ranks'.

        Returns the names of those that this rank had none of.
        """
        unused = [name for name, p in self.owned.items() if p.grad is None]
        for name, p in self.owned.items():
            gradient = torch.zeros_like(p) if p.grad is None else check_dense(name, p.grad)
            p.grad = all_reduce(gradient, group=self.group, algorithm="direct")
        return unused

    def publish(self) -> None:
        """After the optimizer's step: weights that others have updated.

        Here every rank has updated all.
        """

    def held(self) -> Mapping[str, list[Tensor]]:
        """Kind → tensors that this rank holds besides the parameters and their gradients."""
        return {}

    def peaks(self) -> Mapping[str, int]:
        """Kind → the most bytes that were held for a moment in the last step."""
        return {}

    def describe(self) -> str:
        return f"{len(self.owned)} gradients, all-reduced one by one after backward"


class Alone(Naive):
    """One position along dp: its gradients are those of the whole batch."""

    def finish(self) -> list[str]:
        return [name for name, p in self.owned.items() if p.grad is None]

    def describe(self) -> str:
        return f"{len(self.owned)} gradients, of the whole batch on each rank that has them"


class Bucketed(Naive):
    """Second: gradients lie side by side in a few flat tensors, and each of those is
    all-reduced at once, in place.
    """

    when = "after backward"

    def __init__(self, parameters: Parameters, group: GroupLike, bucket_bytes: int):
        super().__init__(parameters, group)
        self.buckets = [Bucket(together) for together in by_size(parameters, bucket_bytes)]

    def finish(self) -> list[str]:
        unused = [
            name
            for bucket in self.buckets
            for p, name in bucket.names.items()
            if not bucket.take(p)
        ]
        for bucket in self.buckets:
            all_reduce_async(bucket.flat, group=self.group, out=bucket.flat).wait()
        return unused

    def describe(self) -> str:
        largest = readable(max(bucket.flat.nbytes for bucket in self.buckets))
        return (
            f"{len(self.owned)} gradients in {len(self.buckets)} buckets of up to {largest}, "
            f"all-reduced {self.when}"
        )


class Overlapped(Bucketed):
    """Third: a hook on each parameter tells when its gradient is ready.

    A bucket that is full begins its all-reduce at once.

    Buckets begin in the same order on every rank, whatever the order of the hooks. When one begins,
    the one before it, whose pieces have had a bucket's time to arrive, is summed and continues with
    its second half.
    """

    when = "during backward"

    def __init__(self, parameters: Parameters, group: GroupLike, bucket_bytes: int):
        super().__init__(parameters, group, bucket_bytes)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.names}
        self.begun: list[AsyncCollective] = []
        self.listening = False
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.ready)

    def begin(self) -> None:
        self.begun = []
        for bucket in self.buckets:
            bucket.ready.clear()

    @contextmanager
    def backward(self, kind: str, last: bool) -> Iterator[None]:
        self.listening = last  # before the last microbatch gradients are not complete
        try:
            yield
        finally:
            self.listening = False

    def ready(self, p: Tensor) -> None:
        """The gradient of p is complete."""
        if self.listening and isinstance(p, nn.Parameter):
            bucket = self.bucket_of[p]
            if p in bucket.ready:
                raise completed_twice(bucket.names[p])
            with span("gradient ready", parameter=bucket.names[p]):
                bucket.take(p)
            while len(self.begun) < len(self.buckets) and self.is_full(len(self.begun)):
                self.all_reduce_next()

    def is_full(self, number: int) -> bool:
        return len(self.buckets[number].ready) == len(self.buckets[number].names)

    def all_reduce_next(self) -> None:
        bucket = self.buckets[len(self.begun)]
        self.begun.append(all_reduce_async(bucket.flat, group=self.group, out=bucket.flat))
        if len(self.begun) > 1:
            with wait_span("wait for gradients"):
                self.begun[-2].advance()

    def finish(self) -> list[str]:
        unused = []
        # those that wait for a parameter whose hook was not called
        for bucket in self.buckets[len(self.begun) :]:
            unused += [
                name
                for p, name in bucket.names.items()
                if p not in bucket.ready and not bucket.take(p)
            ]
            self.all_reduce_next()
        for pending in self.begun:
            pending.wait()
        return unused


class Together:
    """The synchronisations of a rank that has several stages, as one.

    They begin and finish in their order, the same on all ranks.
    """

    def __init__(self, syncs: Sequence[GradientSync]):
        self.syncs = syncs
        self.owned = {name: p for sync in syncs for name, p in sync.owned.items()}
        self.placements = {
            name: pieces for sync in syncs for name, pieces in sync.placements.items()
        }

    def begin(self) -> None:
        for sync in self.syncs:
            sync.begin()

    @contextmanager
    def forward(self) -> Iterator[None]:
        with ExitStack() as around:
            for sync in self.syncs:
                around.enter_context(sync.forward())
            yield

    def finish(self) -> list[str]:
        return [name for sync in self.syncs for name in sync.finish()]

    def publish(self) -> None:
        for sync in self.syncs:
            sync.publish()

    def held(self) -> Mapping[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for sync in self.syncs:
            for kind, tensors in sync.held().items():
                found.setdefault(kind, []).extend(tensors)
        return found

    def peaks(self) -> Mapping[str, int]:
        kinds = dict.fromkeys(kind for sync in self.syncs for kind in sync.peaks())
        return {kind: sum(sync.peaks().get(kind, 0) for sync in self.syncs) for kind in kinds}

    def describe(self) -> str:
        return "; ".join(sync.describe() for sync in self.syncs)


class Bucket:
    """One flat tensor, and for each of its parameters (by name) the view in which its gradient
    lies.
    """

    def __init__(self, parameters: Parameters):
        members = list(parameters.values())
        self.names = {p: name for name, p in parameters.items()}
        self.flat = torch.zeros(
            sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device
        )
        self.views = {
            p: piece.view(p.shape)
            for p, piece in zip(members, self.flat.split([p.numel() for p in members]))
        }
        # those whose gradients are in the bucket already, in this step
        self.ready: set[nn.Parameter] = set()

    def take(self, p: nn.Parameter) -> bool:
        """Move the gradient of p into its place in the bucket.

        If p has none, put zeros there and return False.
        """
        gradient, view = p.grad, self.views[p]
        if gradient is None:
            view.zero_()
        else:
            view.copy_(check_dense(self.names[p], gradient))
        p.grad = view
        self.ready.add(p)
        return gradient is not None


def by_size(
    parameters: Parameters, most: int, apart: Mapping[str, str] = {}
) -> list[dict[str, nn.Parameter]]:
    """Groups of up to `most` bytes (a larger parameter has one to itself), the last parameters
    first; one dtype and device in each.

    `apart`: name → why it must share a group only with those of the same reason; see
    `GradientSync`.

    The reverse order of the parameters is about the order in which backward makes their gradients,
    and the same on every rank.
    """
    groups: list[dict[str, nn.Parameter]] = []
    room, kind = 0, None
    for name, p in reversed(list(parameters.items())):
        if p.nbytes > room or (p.dtype, p.device, apart.get(name)) != kind:
            groups.append({})
            room, kind = most, (p.dtype, p.device, apart.get(name))
        groups[-1][name] = p
        room -= p.nbytes
    return groups


def default_bucket_bytes(parameters: Parameters, buckets: int) -> int:
    """The bytes of these parameters over `buckets`, at most 25 MiB, as in torch's
    DistributedDataParallel.
    """
    return min(25 * MiB, math.ceil(sum(p.nbytes for p in parameters.values()) / buckets))


def check_dense(name: str, gradient: Tensor) -> Tensor:
    """Raises TypeError for a gradient that has no place in a flat tensor."""
    if gradient.is_sparse:
        raise TypeError(
            f"the gradient of {name!r} is sparse: expected dense (Embedding(…, sparse=False))"
        )
    return gradient


def completed_twice(name: str) -> RuntimeError:
    """The error if a gradient that was complete, and may be on its way, was added to."""
    return RuntimeError(
        f"the gradient of {name!r} was completed twice in one backward, and the first may have "
        "been sent already: expected once, as with "
        "torch.utils.checkpoint(…, use_reentrant=False); or build the trainer with "
        "overlap=False, which sends after backward"
    )
