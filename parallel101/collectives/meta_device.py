"""Tensors without numbers, on torch's meta device: they have only a shape and a dtype.

    x = torch.ones(4, device="meta")     x + x has shape (4,), and nothing is computed

Ranks with a virtual GPU have them (`launch(…, device="H100")`). Their messages have the bytes of
any other tensor's. The few numbers that a program reads on its way, such as shapes that ranks tell
each other, are on the CPU there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel101.mesh import split_sizes


def numbers_device(device: torch.device) -> torch.device:
    """Return the device for small tensors that a program reads: the CPU if `device` is meta."""
    return torch.device("cpu") if device.type == "meta" else device


def number_in(x: Tensor) -> float:
    """Return the number in a tensor of one element; 0.0 on the meta device."""
    return 0.0 if x.is_meta else x.item()


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors begin at the same place in memory.

    All addresses on the meta device are 0, so it compares storages.
    """
    return x.untyped_storage() is y.untyped_storage() and x.storage_offset() == y.storage_offset()


def count_choices(choice: Tensor, options: int) -> Tensor:
    """Return how often each of 0, …, options − 1 is in `choice`; on meta, an even split."""
    if choice.is_meta:
        return torch.tensor(split_sizes(choice.numel(), options), device="cpu")
    return choice.bincount(minlength=options)
