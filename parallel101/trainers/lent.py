"""What autograd saves for backward of a gathered weight: its place, and not its values, or no layer would ever be free.

forward    y = x Wᵀ saves x and W      W is kept as "layer 2, elements 0 to 16, 4 × 4"
backward   gx = gy W                   layer 2 has been gathered again: W is there, in another memory
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel101.trainers.flat import Flat
from parallel101.trainers.gathered import Gathered


class Place(NamedTuple):
    """A view of a flat array, or of one of its parameters in another dtype."""

    flat: Flat
    parameter: str | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def look(self) -> Tensor:
        if self.flat.whole is None:  #  used outside its layer
            self.flat.gather()
            self.flat.wait()
        assert self.flat.whole is not None
        base = self.flat.whole if self.parameter is None else self.flat.cut(self.flat.whole)[self.parameter].to(self.dtype)
        return base.as_strided(self.size, self.stride, self.offset)


def lent_weights(gathered: Gathered, autocast: torch.dtype | None) -> saved_tensors_hooks:
    """While this is entered, what is saved of the weights that `gathered` has whole is saved as a place; of all else, as always."""

    def pack(tensor: Tensor) -> Tensor | Place:
        memory = tensor.untyped_storage().data_ptr()
        for flat in gathered.whole_now():
            if flat.whole is not None and flat.whole.untyped_storage().data_ptr() == memory:
                return Place(flat, None, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return converted(tensor) if tensor.dtype == autocast else tensor

    def converted(tensor: Tensor) -> Tensor | Place:
        """Autocast computes with a copy of the weight in its dtype. A tensor of the same values, bit by bit, is such a copy."""
        for flat in gathered.whole_now():
            for name, p in flat.parameters.items():
                if p.nbytes // p.element_size() * tensor.element_size() != tensor.untyped_storage().nbytes():
                    continue
                copy = p.detach().to(tensor.dtype)
                if torch.equal(copy, tensor.as_strided(copy.shape, copy.stride(), 0)):
                    return Place(flat, name, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return tensor

    def unpack(saved: Tensor | Place) -> Tensor:
        return saved.look() if isinstance(saved, Place) else saved

    return saved_tensors_hooks(pack, unpack)
