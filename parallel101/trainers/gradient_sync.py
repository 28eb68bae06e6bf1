"""Gradient synchronization: its calls in a step, and how it groups parameters.

    begin ─▶ forward, backward of each microbatch ─▶ finish ─▶ the optimizer's step ─▶ publish

data_parallel.py and zero_1_2_3.py have the synchronizations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from parallel101.collectives import all_reduce
from parallel101.mesh import GroupLike, group_of
from parallel101.trainers.layout import Pieces

Parameters = Mapping[str, nn.Parameter]
MiB = 1024**2


class GradientSync:
    """The synchronization of one rank alone, which sends nothing. The others override its methods.

    Args:
        parameters: by name, those that are trained.
        zeros: whether a gradient that no sample gave is zeros, since other ranks have other parts
            of the parameter, such as other experts, to which a sample may have given one.

    Attributes:
        owned: name → Parameter that this rank's optimizer updates; `finish` sets their .grad.
        scale: by which the loss is multiplied before backward; `finish` divides by it.
        placements: name → Pieces, how the data axis cuts them. Empty: every rank has all.
        zero_stage: how much of the rest it cuts: 1 is the optimizer state, 2 the gradients too, 3
            the weights too.
    """

    zero_stage = 0
    how = "of the whole batch on each rank that has them"
    scale = 1.0

    def __init__(self, parameters: Parameters, zeros: bool = False):
        self.owned: Parameters = parameters
        self.zeros = zeros
        self.placements: Mapping[str, Pieces] = {}

    def begin(self) -> None:
        """Begin a step."""

    def forward(self) -> AbstractContextManager:
        """Return the context in which a forward and its loss run."""
        return nullcontext()

    def backward(self, kind: str = "B", last: bool = True) -> AbstractContextManager:
        """Return the context in which a backward runs.

        Args:
            kind: "B", or one half: "I", the input gradients, or "W", the weight gradients.
            last: whether the gradients of the step are complete after it.
        """
        return nullcontext()

    def finish(self) -> list[str]:
        """Set every owned gradient to the sum over the ranks.

        Returns the names of the parameters to which this rank's samples gave no gradient.
        """
        unused = self.without_gradient()
        for name in unused if self.zeros else ():
            self.owned[name].grad = dense_gradient(name, self.owned[name])
        return unused

    def without_gradient(self) -> list[str]:
        return [name for name, p in self.owned.items() if p.grad is None]

    def check_once(self, name: str, complete: Container[str]) -> None:
        """Raise RuntimeError if a gradient that was complete is completed again."""
        if name in complete:
            raise completed_twice(name)

    def publish(self) -> None:
        """Send the weights that this rank has updated for others, after the optimizer's step."""

    def held(self) -> Mapping[str, list[Tensor]]:
        """Return, by kind, the tensors held here besides the parameters and their gradients."""
        return {}

    def peaks(self) -> Mapping[str, int]:
        """Return, by kind, the most bytes that were alive at once in the last step."""
        return {}

    def describe(self) -> str:
        return f"{len(self.owned)} gradients, {self.how}"


class Together(GradientSync):
    """Several synchronizations as one. They begin and finish in their order, which is the same on
    all ranks.
    """

    def __init__(self, syncs: Sequence[GradientSync]):
        super().__init__({name: p for sync in syncs for name, p in sync.owned.items()})
        self.syncs = syncs
        self.placements = {name: at for sync in syncs for name, at in sync.placements.items()}
        self.zero_stage = max((sync.zero_stage for sync in syncs), default=0)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with ExitStack() as contexts:
            for sync in self.syncs:
                contexts.enter_context(sync.forward())
            yield

    @contextmanager
    def backward(self, kind: str = "B", last: bool = True) -> Iterator[None]:
        with ExitStack() as contexts:
            for sync in self.syncs:
                contexts.enter_context(sync.backward(kind, last))
            yield

    def begin(self) -> None:
        for sync in self.syncs:
            sync.begin()

    def finish(self) -> list[str]:
        return [name for sync in self.syncs for name in sync.finish()]

    def publish(self) -> None:
        for sync in self.syncs:
            sync.publish()

    def held(self) -> Mapping[str, list[Tensor]]:
        return merged(self.syncs, lambda sync: sync.held(), [])

    def peaks(self) -> Mapping[str, int]:
        return merged(self.syncs, lambda sync: sync.peaks(), 0)

    def describe(self) -> str:
        return "; ".join(sync.describe() for sync in self.syncs)


def merged(
    syncs: Sequence[GradientSync], of: Callable[[GradientSync], Mapping], zero: object
) -> dict:
    """Return, by kind, the sum of what all of the synchronizations have."""
    found: dict = {}
    for sync in syncs:
        for kind, value in of(sync).items():
            found[kind] = found.get(kind, zero) + value
    return found


def by_size(
    parameters: Parameters, most: int, apart: Mapping[str, str] = {}
) -> list[dict[str, nn.Parameter]]:
    """Return groups of parameters with up to `most` bytes, of one dtype and device each; a
    larger parameter has a group to itself.

    The last parameters come first. That is about the order in which backward makes their gradients,
    and the same order on every rank.

    Args:
        apart: name → a label. Only parameters with the same label share a group.
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


def sum_gradients(parameters: Parameters, group: GroupLike) -> None:
    """Sum these gradients over the ranks of the group, in one all-reduce. Along tp it is direct, as
    those of the layers are.
    """
    if parameters:
        algorithm = "direct" if group_of(group).axis == "tp" else "auto"
        row = torch.cat([dense_gradient(name, p).flatten() for name, p in parameters.items()])
        total = all_reduce(row, group=group, algorithm=algorithm)
        parts = total.split([p.numel() for p in parameters.values()])
        for p, part in zip(parameters.values(), parts):
            p.grad = part.view_as(p)


def completed_twice(name: str) -> RuntimeError:
    """Return the error for a gradient that changed after it was complete, perhaps sent."""
    return RuntimeError(
        f"the gradient of {name!r} was completed twice in one backward, and the first may have "
        "been sent already: expected once, as with "
        "torch.utils.checkpoint(…, use_reentrant=False); or build the trainer with "
        "overlap=False, which sends after backward"
    )
