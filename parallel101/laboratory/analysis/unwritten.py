"""Marks memory that was never written, so that a picture of a watched run can tell it from data.

    torch.empty(8) on rank 2, its first   ──▶  marks (2, 0, 0) … (2, 0, 7)
        marks in a message: rank 2 sends what it does not have
    torch.cat(buffers) returns marks      ──▶  where each buffer is in the result, and so which
                                               chunk it was meant for

What a mark is, and how it is recognized, is in provenance.py. Memory that is made in another way
(resize_, C++) is filled by torch itself, with NaN or the largest integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from parallel101.laboratory.analysis.provenance import BUFFERS, LONGEST, flat_values, marks_of

# where in a rank's result each of its buffers is: the buffer's number, the position of its first
# element
Places = dict[int, int]


class Watched(NamedTuple):
    """The facts that `watch` knows of a run beyond its record."""

    shape: tuple[int, ...]  # of the tensor that each rank was given
    places: tuple[Places, ...]  # by rank


_NEW = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}


class MarkUnwritten(TorchFunctionMode):
    """Fills each new tensor of unwritten memory with marks, inside the block."""

    def __init__(self, rank: int, world_size: int):
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.buffers: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func in _NEW
            and result.dtype in (torch.int64, torch.float64)
            and 0 < result.numel() <= LONGEST
            and len(self.buffers) < BUFFERS
        ):
            marks = marks_of(
                self.rank, self.world_size, len(self.buffers), result.numel(), result.dtype
            )
            if marks is not None:
                result.detach().copy_(marks.reshape(result.shape))
                self.buffers.append(result.detach())
        return result

    def places(self, result: object) -> Places:
        """Return where in the result each buffer is, as far as its contents tell."""
        values, starts_by_number = flat_values(result), {}
        for number, buffer in enumerate(self.buffers if values else ()):
            content = buffer.flatten().tolist()
            starts = [
                i
                for i in range(len(values or ()) - len(content) + 1)
                if (values or ())[i : i + len(content)] == content
            ]
            if len(starts) == 1:
                starts_by_number[number] = starts[0]
        return starts_by_number
