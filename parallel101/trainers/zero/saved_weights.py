"""What autograd saves of a gathered weight for backward: its place, and not its values.

Otherwise no layer would ever be freed.

forward    y = x Wᵀ saves x and W      W is kept as "layer 2, elements 0 to 16, 4 × 4"
backward   gx = gy W                   layer 2 has been gathered again: W is there, in other memory
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel101.trainers.zero.flat import Flat


class Place(NamedTuple):
    """A view of a flat array, or of one of its parameters in autocast's dtype."""

    flat: Flat
    parameter: str | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def values(self) -> Tensor:
        if self.flat.whole is None:  # used outside its layer
            self.flat.gather()
            self.flat.wait()
        assert self.flat.whole is not None
        base = (
            self.flat.whole
            if self.parameter is None
            else self.flat.cut(self.flat.whole)[self.parameter].to(self.dtype)
        )
        return base.as_strided(self.size, self.stride, self.offset)


def saved_as_places(
    whole_now: Callable[[], list[Flat]], autocast: torch.dtype | None
) -> saved_tensors_hooks:
    """While this context is active, weights in the flat arrays of `whole_now()` are saved as
    places, all else as always.
    """
    return saved_tensors_hooks(*pack_and_unpack(whole_now, autocast))


def pack_and_unpack(
    whole_now: Callable[[], list[Flat]], autocast: torch.dtype | None
) -> tuple[Callable, Callable]:

    def pack(tensor: Tensor) -> Tensor | Place:
        memory = tensor.untyped_storage().data_ptr()
        for flat in whole_now():
            if flat.whole is not None and flat.whole.untyped_storage().data_ptr() == memory:
                return Place(
                    flat,
                    None,
                    tensor.dtype,
                    tensor.size(),
                    tensor.stride(),
                    int(tensor.storage_offset()),
                )
        return cast(tensor) if tensor.dtype == autocast else tensor

    def cast(tensor: Tensor) -> Tensor | Place:
        """Autocast computes with a copy of the weight in its dtype.

        The copy's graph names the weight that it is a copy of.
        """
        copy = tensor if tensor._base is None else tensor._base
        source = (
            getattr(copy.grad_fn.next_functions[0][0], "variable", None)
            if copy.grad_fn and copy.grad_fn.next_functions
            else None
        )
        if source is not None and source.numel() == copy.numel():
            for flat in whole_now():
                for name, p in flat.parameters.items():
                    if p is source:
                        return Place(
                            flat,
                            name,
                            tensor.dtype,
                            tensor.size(),
                            tensor.stride(),
                            int(tensor.storage_offset()),
                        )
        return tensor

    def unpack(saved: Tensor | Place) -> Tensor:
        return saved.values() if isinstance(saved, Place) else saved

    return pack, unpack
