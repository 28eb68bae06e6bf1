"""The bytes of a tensor as they are in memory. NumPy, which torch works without, isn't needed."""

from __future__ import annotations

import ctypes

from torch import Tensor


def raw_memory(tensor: Tensor) -> ctypes.Array | bytes:
    """Return the memory of a contiguous tensor on the CPU, as a buffer for `bytes` or a hash.

    Nothing is copied, so the buffer is valid only while the tensor exists.
    """
    if not tensor.nbytes:
        return b""  # an empty tensor may have no address
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
