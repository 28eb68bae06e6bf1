"""Segments of an array. A rank of a chain sends one while it receives the next.

    p − 2 + m steps of n/m bytes take (p − 2 + m)(α + βn/m), which is least for

        m = √((p − 2) n β/α) segments

With few segments, the ranks at the end of the chain wait long for their first one. With many, each
of them pays the latency α.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

# The default follows from the array's size alone, since all ranks must cut alike: nothing is
# measured. It is the best on a link of 5 µs and 50 GB/s, as `Network()` has it, where α/β is
# 250 kB. gloo over loopback is about as good: 70 µs and 2.3 GB/s on two cores, so 160 kB.
LATENCY, BANDWIDTH = 5e-6, 50e9


def best_segments(
    p: int, nbytes: int, latency: float = LATENCY, bandwidth: float = BANDWIDTH
) -> int:
    """Return the best number of segments for `nbytes` bytes along a chain of p ranks.

    That is √((p − 2) n β/α) as a whole number, 1 at least, on links of this latency (s) and
    bandwidth (bytes/s). Two ranks need only 1, since nobody passes anything on. Raises ValueError
    if there is no latency: then more segments are always better.
    """
    if not latency * bandwidth > 0:
        raise ValueError(
            f"latency={latency!r}, bandwidth={bandwidth!r}: expected both to be more than 0. "
            "Without latency, more segments are always better"
        )
    return max(1, round(math.sqrt(max(p - 2, 0) * nbytes / (latency * bandwidth))))


def segment_size(p: int, nbytes: int, segment_bytes: int | None = None, element: int = 1) -> int:
    """Return the bytes of a segment, a multiple of `element`: the same on every rank.

    By default there are `best_segments` of them, of one size but for the last.
    """
    if segment_bytes is not None:
        return segment_bytes // element * element
    return max(1, -(-nbytes // (best_segments(p, nbytes) * element))) * element


def segments_of(flat: Tensor, p: int, segment_bytes: int | None = None) -> Sequence[Tensor]:
    """Return the segments of a flat array, as views. Only the last may be shorter."""
    element = flat.element_size()
    return flat.split(segment_size(p, flat.nbytes, segment_bytes, element) // element)


def check_segment_bytes(segment_bytes: int | None, algorithm: str, element: int) -> None:
    """Raise ValueError or TypeError if this algorithm cannot send segments of that size."""
    if segment_bytes is None:
        return
    if algorithm != "pipelined_chain":
        raise ValueError(
            f"segment_bytes={segment_bytes!r} with algorithm={algorithm!r}: only "
            "algorithm='pipelined_chain' sends segments. Choose it, or leave segment_bytes out"
        )
    if not isinstance(segment_bytes, int) or isinstance(segment_bytes, bool):
        raise TypeError(f"segment_bytes={segment_bytes!r}: expected an int, the bytes of a segment")
    if segment_bytes < element:
        raise ValueError(
            f"segment_bytes={segment_bytes}: expected at least one element of x, {element} "
            f"byte{'s' * (element > 1)}"
        )
