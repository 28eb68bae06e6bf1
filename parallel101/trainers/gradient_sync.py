"""Gradient synchronization: its calls in a step, and how it groups parameters.

    begin ─▶ forward, backward of each microbatch ─▶ finish ─▶ the optimizer's step ─▶ publish

data_parallel.py and zero_1_2_3.py have the synchronizations.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.collectives import all_reduce
from parallel101.mesh import GroupLike
from parallel101.spans import span
from parallel101.trainers.layout import Pieces

Parameters = Mapping[str, nn.Parameter]
MiB = 1024**2


class GradientSync:
    """The synchronization of one rank alone, which sends nothing, or several as one. The others
    override its methods.

    Args:
        parameters: by name, those that are trained.
        parts: synchronizations of some of them. They begin and finish in this order, which is the
            same on all ranks.

    Attributes:
        owned: name → Parameter that this rank's optimizer updates; `finish` sets their .grad.
        scale: by which the loss is multiplied before backward; `finish` divides by it.
        placements: name → Pieces, what the data axis leaves here. Empty: every rank has all.
        how: in words.
    """

    how = "of the whole batch on each rank that has them"
    scale = 1.0

    def __init__(self, parameters: Parameters, parts: Sequence[GradientSync] = ()):
        self.owned, self.parts = parameters, parts
        self.placements: Mapping[str, Pieces] = {}

    def begin(self) -> None:
        """Begin a step."""
        for part in self.parts:
            part.begin()

    def forward(self) -> AbstractContextManager:
        """Return the context in which a forward and its loss run."""
        return nested(part.forward for part in self.parts)

    def backward(self, kind: str = "B", last: bool = True) -> AbstractContextManager:
        """Return the context in which a backward runs.

        Args:
            kind: "B", or one half: "I", the input gradients, or "W", the weight gradients.
            last: whether the gradients of the step are complete after it.
        """
        return nested(partial(part.backward, kind, last) for part in self.parts)

    def finish(self) -> list[str]:
        """Set every owned gradient to the sum over the ranks, zeros if no sample gave one: other
        ranks may have other parts of the parameter, such as other experts.

        Returns the names of the parameters to which this rank's samples gave no gradient.
        """
        unused = [name for part in self.parts for name in part.finish()]
        unused += self.without_gradient()  # none, if they are the parts'
        for name, p in self.owned.items():
            p.grad = dense_gradient(name, p)
        return unused

    def without_gradient(self) -> list[str]:
        return [name for name, p in self.owned.items() if p.grad is None]

    def publish(self) -> None:
        """Send the weights that this rank has updated for others, after the optimizer's step."""
        for part in self.parts:
            part.publish()


def together(syncs: Sequence[GradientSync]) -> GradientSync:
    """Return several synchronizations as one."""
    owned = {name: p for sync in syncs for name, p in sync.owned.items()}
    return syncs[0] if len(syncs) == 1 else GradientSync(owned, syncs)


@contextmanager
def nested(contexts: Iterable[Callable[[], AbstractContextManager]]) -> Iterator[None]:
    """Enter all of these contexts, one inside the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


class GradientHooks:
    """Sends one bucket of gradients after another as soon as backward has made all of them. Buckets
    leave in the same order on every rank, whatever the order of the gradients.

    Args:
        buckets: the parameters of each.
        send: called with the number of a bucket. Some of its gradients may be missing if they never
            came.
        overlap: whether to send during backward, or else at its end.
    """

    def __init__(
        self, buckets: Sequence[Parameters], send: Callable[[int], None], overlap: bool = True
    ):
        self.buckets, self.overlap = buckets, overlap
        self.missing: list[set[str]] = []  # of each bucket, the gradients to come
        self.sent = 0
        # The garbage collector doesn't see a tensor's hooks: one that led back to the tensor would
        # keep it forever.
        self.send, ready = weakref.WeakMethod(send), weakref.WeakMethod(self.ready)
        for number, bucket in enumerate(buckets):
            for name, p in bucket.items():
                p.register_post_accumulate_grad_hook(partial(call_if_alive, ready, number, name))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward after which the gradients are complete."""
        self.sent, self.missing = 0, [set(bucket) for bucket in self.buckets]
        try:
            yield
        finally:
            self.missing = []  # before another microbatch's are complete, nothing is sent
        while self.sent < len(self.buckets):
            self.send_next()

    def ready(self, number: int, name: str, _: nn.Parameter) -> None:
        """Note that a gradient is complete. autograd calls this."""
        if not self.missing:
            return
        if self.overlap and name not in self.missing[number]:
            raise RuntimeError(
                f"the gradient of {name!r} was completed twice in one backward, and the first may "
                "have been sent already: expected once, as with torch.utils.checkpoint(…, "
                "use_reentrant=False); or build the trainer with overlap=False, which sends after "
                "backward"
            )
        with span("gradient ready", parameter=name):
            self.missing[number].discard(name)
        while self.overlap and self.sent < len(self.buckets) and not self.missing[self.sent]:
            self.send_next()

    def send_next(self) -> None:
        call_if_alive(self.send, self.sent)
        self.sent += 1


def call_if_alive(method: weakref.WeakMethod, *args: Any) -> None:
    if (bound := method()) is not None:
        bound(*args)


def by_size(
    parameters: Parameters, most: int, groups: Mapping[str, Any] = {}
) -> list[dict[str, nn.Parameter]]:
    """Return buckets of parameters with up to `most` bytes, of one dtype and device each; a
    larger parameter has a bucket to itself.

    The last parameters come first. That is about the order in which backward makes their gradients,
    and the same order on every rank.

    Args:
        groups: name → what all parameters of a bucket have in common.
    """
    buckets: list[dict[str, nn.Parameter]] = []
    room, kind = 0, None
    for name, p in reversed(list(parameters.items())):
        if p.nbytes > room or (p.dtype, p.device, groups.get(name)) != kind:
            buckets.append({})
            room, kind = most, (p.dtype, p.device, groups.get(name))
        buckets[-1][name] = p
        room -= p.nbytes
    return buckets


def default_bucket_bytes(parameters: Parameters, buckets: int) -> int:
    """Return the bytes of these parameters divided by `buckets`, at most 25 MiB, as in torch's
    DistributedDataParallel.
    """
    return min(25 * MiB, math.ceil(sum(p.nbytes for p in parameters.values()) / buckets))


def dense_gradient(name: str, p: nn.Parameter) -> Tensor:
    """Return the gradient of p, or zeros if it has none. Raises TypeError for a sparse one."""
    if p.grad is None:
        return torch.zeros_like(p, dtype=p.grad_dtype)
    if p.grad.is_sparse:
        raise TypeError(
            f"the gradient of {name!r} is sparse: expected dense (Embedding(…, sparse=False))"
        )
    return p.grad


def sum_gradients(parameters: Parameters, group: GroupLike, algorithm: str = "direct") -> None:
    """Sum these gradients over the ranks of the group, in one all-reduce."""
    row = torch.cat([dense_gradient(name, p).flatten() for name, p in parameters.items()])
    total = all_reduce(row, group=group, algorithm=algorithm)
    parts = total.split([p.numel() for p in parameters.values()])
    for p, part in zip(parameters.values(), parts):
        p.grad = part.view_as(p)
