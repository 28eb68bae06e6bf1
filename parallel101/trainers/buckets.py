"""Gradients side by side in flat tensors, so that many small ones travel as a few large messages.

bucket 0   | layer 3 bias | layer 3 weight | layer 2 bias |        reverse order of the parameters: about the order in which
bucket 1   | layer 2 weight | layer 1 bias | …                     backward makes them, and the same on every rank
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

MiB = 1024**2


class Bucket:
    """One flat tensor, and for each of its parameters (by name) the view in which its gradient lies."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        members = list(parameters.values())
        self.names = {p: name for name, p in parameters.items()}
        self.flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
        self.views = {p: piece.view(p.shape) for p, piece in zip(members, self.flat.split([p.numel() for p in members]))}
        self.ready: set[nn.Parameter] = set()  #  whose gradients lie in it already, in this step

    def take(self, p: nn.Parameter) -> bool:
        """Move the gradient of p into its place in the bucket; False where p has none: zeros take its place."""
        gradient, view = p.grad, self.views[p]
        if gradient is None:
            view.zero_()
        else:
            check_dense(self.names[p], gradient)
            view.copy_(gradient)
        p.grad = view
        self.ready.add(p)
        return gradient is not None


def by_size(parameters: Mapping[str, nn.Parameter], most: int) -> list[dict[str, nn.Parameter]]:
    """Groups of up to `most` bytes (a larger parameter has one to itself), the last parameters first; one dtype and device in each."""
    groups: list[dict[str, nn.Parameter]] = []
    room, kind = 0, None
    for name, p in reversed(list(parameters.items())):
        if p.nbytes > room or (p.dtype, p.device) != kind:
            groups.append({})
            room, kind = most, (p.dtype, p.device)
        groups[-1][name] = p
        room -= p.nbytes
    return groups


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """Raises ValueError for what is no number of bytes."""
    if bucket_bytes is not None and (not isinstance(bucket_bytes, int) or bucket_bytes < 0):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: expected a number of bytes, 0 for one gradient at a time, or None")


def part_of(parameters: Mapping[str, nn.Parameter], parts: int) -> int:
    """The bytes of a bucket where nobody said: these parameters' over `parts`, at most 25 MiB (as in torch's DistributedDataParallel)."""
    return min(25 * MiB, math.ceil(sum(p.nbytes for p in parameters.values()) / parts))


def check_dense(name: str, gradient: Tensor) -> None:
    """Raises TypeError for a gradient that has no place in a flat tensor."""
    if gradient.is_sparse:
        raise TypeError(f"the gradient of {name!r} is sparse: expected dense (Embedding(…, sparse=False))")


def twice(name: str) -> RuntimeError:
    """What to say where a gradient that was complete, and may be on its way, was added to."""
    return RuntimeError(
        f"the gradient of {name!r} was completed twice in one backward, and the first may be on its way already: expected once, as with "
        "torch.utils.checkpoint(…, use_reentrant=False); or build the trainer with overlap=False, which sends after backward"
    )
