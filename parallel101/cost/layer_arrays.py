"""The parameters of a stage as its arrays, in the model's order, and in how many messages they
travel along dp: each message costs the latency of a collective.

    ZeRO 0, 1, 2    buckets, filled from the last parameter on
    ZeRO 3          one for each layer

With sequence parallel, norms see a part of the positions on each rank along tp. Their gradients are
summed there, too, so ZeRO sends them apart. Source: by_size in trainers/gradient_sync.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from parallel101.cost.model_shape import ModelShape

BUCKET = 25 * 2**20  # bytes of a bucket of gradients, at most

Arrays = list[tuple[float, bool]]  # (parameters, whether it is sent apart) of each


def layer_arrays(shape: ModelShape, tp: int, ep: int) -> Arrays:
    """The arrays of one layer on a rank. Apart are those that sequence parallel sends apart."""
    h, q, kv = shape.width, shape.width // tp, shape.kv_width // tp
    inside, bias = shape.inside // tp, shape.biases
    norm = [(float(h), True)] * (2 if shape.norm == "layer" else 1)

    def linear(rows: int, columns: int, with_bias: bool, apart: bool = False) -> Arrays:
        return [(float(rows * columns), False)] + [(float(columns), apart)] * with_bias

    mlp = linear(h, inside, bias) * (2 if shape.gated else 1) + linear(inside, h, bias, True)
    if shape.experts:
        mlp = [(float(h * shape.experts), False)] + mlp * max(1, shape.experts // ep)
    query, key, value = linear(h, q, bias), linear(h, kv, False), linear(h, kv, bias)
    return [*norm, *query, *key, *value, *linear(q, h, bias, True), *norm, *mlp]


def stage_arrays(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool
) -> Arrays:
    """The arrays of a rank with so many layers, and maybe the embedding or the head."""
    h, norms = float(shape.width), 2 if shape.norm == "layer" else 1
    words, learned = shape.vocabulary * h / tp, shape.positions == "learned"
    embedding = [(words, False)] + [(shape.time * h, True)] * learned
    head = [(h, True)] * norms + [(words, False)] * (not shape.tied or not first)
    return embedding * first + layer_arrays(shape, tp, ep) * layers + head * last


@lru_cache(maxsize=1 << 14)
def count_arrays(shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool) -> int:
    return len(stage_arrays(shape, tp, ep, layers, first, last))


@lru_cache(maxsize=1 << 14)
def count_buckets(
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
) -> int:
    """In how many buckets these arrays travel.

    Args:
        itemsize: bytes of a weight. apart: whether some are sent apart.
        at_least: as many buckets there are, if each is full.
    """
    arrays = stage_arrays(shape, tp, ep, layers, first, last)
    most = min(BUCKET, ceil(itemsize * sum(size for size, _ in arrays) / at_least))
    count, room, kind = 0, 0.0, False
    for size, other in reversed(arrays):
        nbytes, this = size * itemsize, other and apart
        if nbytes > room or not count or this != kind:
            count, room, kind = count + 1, float(most), this
        room -= nbytes
    return count
