"""The messages in which a rank's gradients travel along dp. Each costs the latency of a collective.

    ZeRO 0, 1, 2    buckets, filled from the last parameter on
    ZeRO 3          one for each layer

With sequence parallel, norms see a part of the positions on each rank along tp. Their gradients are
summed along tp, too, so ZeRO sends them separately. Source: by_size in trainers/gradient_sync.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from parallel101.cost.model_shape import Gradients, ModelShape, Parts, size_of, stage_arrays

BUCKET = 25 * 2**20  # bytes of a bucket of gradients, at most


@lru_cache(maxsize=1 << 12)
def buckets(
    shape: ModelShape,
    tp: int,
    ep: int,
    layers: int,
    first: bool,
    last: bool,
    *,
    itemsize: int,
    apart: bool,
    at_least: int,
    recompute: str = "none",
) -> tuple[Gradients, ...]:
    """Return the buckets in which a stage's gradients travel, in the order backward fills them.

    Args:
        itemsize: bytes of a weight. apart: whether some are sent separately.
        at_least: the fewest buckets, if each is full.
    """
    arrays = stage_arrays(shape, tp, ep, layers, first, last, recompute)
    most = min(BUCKET, ceil(itemsize * size_of(arrays) / at_least))
    found: Parts = []
    room = 0.0
    for size, other, work in reversed(arrays):
        nbytes, this = size * itemsize, other and apart
        if nbytes > room or not found or this != found[-1].apart:
            found.append(Gradients(size, this, work))
            room = float(most)
        else:
            found[-1] = Gradients(found[-1].size + size, this, found[-1].work + work)
        room -= nbytes
    return tuple(found)
