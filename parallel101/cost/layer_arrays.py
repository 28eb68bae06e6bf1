"""A stage's arrays of parameters, and the messages in which their gradients travel along dp.

The arrays are in the model's order. Each message costs the latency of a collective.

    ZeRO 0, 1, 2    buckets, filled from the last parameter on
    ZeRO 3          one for each layer

With sequence parallel, norms see a part of the positions on each rank along tp. Their gradients are
summed along tp, too, so ZeRO sends them separately. Source: by_size in trainers/gradient_sync.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from parallel101.cost.model_shape import ModelShape
from parallel101.cost.rank_parameters import table_parameters

BUCKET = 25 * 2**20  # bytes of a bucket of gradients, at most


class Gradients(NamedTuple):
    """The gradients of an array of parameters, or of a bucket of several.

    Attributes:
        size: in parameters.
        apart: whether sequence parallel sends it separately.
        work: of backward since the ones before, in parameters: each takes two products.
    """

    size: float
    apart: bool
    work: float


Parts = list[Gradients]


def layer_arrays(shape: ModelShape, tp: int, ep: int, recompute: str = "none") -> Parts:
    """Return the arrays of one layer on a rank."""
    h, q, kv = shape.width, shape.width // tp, shape.kv_width // tp
    inside, bias = shape.inside // shape.tp_beside_attention(tp), shape.biases
    norm = [Gradients(float(h), True, 0.0)] * (2 if shape.norm == "layer" else 1)

    def linear(rows: int, columns: int, with_bias: bool, row: bool = False) -> Parts:
        """Return a linear layer's arrays: backward makes its bias last, but a row layer's first."""
        work, bias_first = float(rows * columns), row and tp > 1
        weight = Gradients(work, False, work if bias_first or not with_bias else 0.0)
        return [weight] + [Gradients(float(columns), row, 0.0 if bias_first else work)] * with_bias

    mlp = linear(h, inside, bias) * (2 if shape.gated else 1) + linear(inside, h, bias, True)
    if shape.experts:
        router = float(h * shape.experts)
        mlp = [Gradients(router, False, router)] + mlp * max(1, shape.experts // ep)
    query, key, value = linear(h, q, bias), linear(h, kv, False), linear(h, kv, bias)
    # attention's own products: five halves of squares or, unfused, four whole ones
    core = shape.time * q * (1.25 if shape.attention == "fused" else 2.0)
    value[-1] = value[-1]._replace(work=value[-1].work + core)
    found = [*norm, *query, *key, *value, *linear(q, h, bias, True), *norm, *mlp]
    if recompute == "full":  # forward once more, before anything else
        again = sum(part.work for part in found) / 2
        found[-1] = found[-1]._replace(work=found[-1].work + again)
    return found


def stage_arrays(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool, recompute: str
) -> Parts:
    """Return the arrays of a rank with this many layers, and maybe the embedding or the head."""
    h, norms = float(shape.width), 2 if shape.norm == "layer" else 1
    words, learned = table_parameters(shape, tp), shape.positions == "learned"
    embedding = [Gradients(words, False, 0.0)] + [Gradients(shape.time * h, True, 0.0)] * learned
    head = [Gradients(h, True, 0.0)] * norms + [Gradients(words, False, words)] * (
        not shape.tied or not first
    )
    return embedding * first + layer_arrays(shape, tp, ep, recompute) * layers + head * last


@lru_cache(maxsize=1 << 14)
def count_arrays(shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool) -> int:
    return len(stage_arrays(shape, tp, ep, layers, first, last, "none"))


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
    most = min(BUCKET, ceil(itemsize * sum(part.size for part in arrays) / at_least))
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
