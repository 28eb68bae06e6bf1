"""Saving a gathered weight for backward: autograd keeps its place, and not its values.

Otherwise no layer would ever be freed.

    forward    y = x Wᵀ saves x and W     W is kept as "layer 2, elements 0 to 16, 4 × 4"
    backward   gx = gy W                  layer 2 has been gathered again: W is there, elsewhere
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel101.trainers.zero.flat import Flat


class Place(NamedTuple):
    """A view of a flat array, or of one of its parameters in autocast's dtype."""

    flat: Flat
    parameter: str | None
    dtype: torch.dtype
    view: tuple[torch.Size, tuple[int, ...], int]  # size, stride and offset

    def values(self) -> Tensor:
        base = self.flat.gathered()
        if self.parameter is not None:
            base = self.flat.cut(base)[self.parameter].to(self.dtype)
        return base.as_strided(*self.view)


def pack_and_unpack(
    whole_now: Callable[[], list[Flat]], autocast: torch.dtype | None
) -> tuple[Callable, Callable]:
    """Return hooks for `saved_tensors_hooks`: they save weights in the flat arrays of
    `whole_now()` as places, all else as always.
    """

    def pack(tensor: Tensor) -> Tensor | Place:
        view = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        memory = tensor.untyped_storage()
        source = source_of_cast(tensor) if tensor.dtype == autocast else None
        for flat in whole_now():
            if flat.whole is not None and flat.whole.untyped_storage() is memory:
                return Place(flat, None, tensor.dtype, view)
            for name, p in flat.parameters.items() if source is not None else ():
                if p is source:
                    return Place(flat, name, tensor.dtype, view)
        return tensor

    def unpack(saved: Tensor | Place) -> Tensor:
        return saved.values() if isinstance(saved, Place) else saved

    return pack, unpack


def source_of_cast(tensor: Tensor) -> Any:
    """Return the parameter of which this tensor, or the one that it views, is autocast's copy.

    The copy's graph names it. For other tensors it is None.
    """
    copy = tensor if tensor._base is None else tensor._base
    if copy.grad_fn is None or not copy.grad_fn.next_functions:
        return None
    source = getattr(copy.grad_fn.next_functions[0][0], "variable", None)
    return source if source is not None and source.numel() == copy.numel() else None
