"""Gradients side by side in flat tensors, so that many small ones travel as a few large messages.

bucket 0   | layer 3 bias | layer 3 weight | layer 2 bias |        reverse order of the parameters: about the order in which
bucket 1   | layer 2 weight | layer 1 bias | …                     backward makes them, and the same on every rank
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class Bucket:
    """One flat tensor, and for each of its parameters the view in which its gradient lies."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = {p: piece.view(p.shape) for p, piece in zip(parameters, self.flat.split([p.numel() for p in parameters]))}
        self.ready = 0  #  gradients that lie in it already, in this step

    def take(self, p: nn.Parameter) -> bool:
        """Move the gradient of p into its place in the bucket; False where p has none: zeros take its place."""
        gradient, view = p.grad, self.views[p]
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise TypeError(f"the gradient of a parameter of shape {tuple(p.shape)} is sparse: expected dense (Embedding(…, sparse=False))")
        else:
            view.copy_(gradient)
        p.grad = view
        self.ready += 1
        return gradient is not None


def cut_into_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Buckets of up to `bucket_bytes` (a larger parameter has one to itself), the last parameters first; one dtype and device in each."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(list(parameters)):
        if not groups or p.nbytes > room or p.dtype != groups[-1][0].dtype or p.device != groups[-1][0].device:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(p)
        room -= p.nbytes
    return [Bucket(group) for group in groups]
