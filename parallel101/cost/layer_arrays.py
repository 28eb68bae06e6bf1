"""A rank's arrays of parameters, and the messages in which their gradients travel along dp.

The arrays are in the model's order. tp cuts a layer's matrices, but not its norms, the biases of
row layers, and the router; ep shares the experts, which tp doesn't cut. A key has no bias, as in
models/gpt.py: softmax would ignore it. A tied embedding is on the first and, as a copy, on the last
stage. Each message costs the latency of a collective.

    ZeRO 0, 1, 2    buckets, filled from the last parameter on
    ZeRO 3          one for each layer

With sequence parallel, norms see a part of the positions on each rank along tp. Their gradients are
summed along tp, too, so ZeRO sends them separately. Source: by_size in trainers/gradient_sync.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from parallel101.cost.model_shape import ModelShape

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


def size_of(arrays: Parts) -> float:
    """Return the number of parameters in some arrays."""
    return sum(part.size for part in arrays)


def linear(rows: int, columns: int, bias: bool, tp_of_row: int = 1) -> Parts:
    """Return a linear layer's arrays: backward makes its bias last, but that of a cut row first."""
    work, bias_first = float(rows * columns), tp_of_row > 1
    weight = Gradients(work, False, work if bias_first or not bias else 0.0)
    bias_work = 0.0 if bias_first else work
    return [weight] + [Gradients(float(columns), bias_first, bias_work)] * bias


def mlp_arrays(shape: ModelShape, tp: int) -> Parts:
    """Return the arrays of an MLP, or of one expert."""
    h, bias = shape.width, shape.biases
    cut = shape.tp_beside_attention(tp)
    up = linear(h, shape.inside // cut, bias) * (2 if shape.gated else 1)
    return up + linear(shape.inside // cut, h, bias, cut)


def layer_arrays(shape: ModelShape, tp: int, ep: int, recompute: str = "none") -> Parts:
    """Return the arrays of one layer on a rank."""
    h, q, kv, bias = shape.width, shape.width // tp, shape.kv_width // tp, shape.biases
    mlp = mlp_arrays(shape, tp)
    if shape.experts:
        router = float(h * shape.experts)
        mlp = [Gradients(router, False, router)] + mlp * max(1, shape.experts // ep)
    query, key, value = linear(h, q, bias), linear(h, kv, False), linear(h, kv, bias)
    # attention's own products: five halves of squares or, unfused, four whole ones
    core = shape.time * q * (1.25 if shape.attention == "fused" else 2.0)
    value[-1] = value[-1]._replace(work=value[-1].work + core)
    norm = norm_arrays(shape)
    found = [*norm, *query, *key, *value, *linear(q, h, bias, tp), *norm, *mlp]
    if recompute == "full":  # forward once more, before anything else
        again = sum(part.work for part in found) / 2
        found[-1] = found[-1]._replace(work=found[-1].work + again)
    return found


def norm_arrays(shape: ModelShape) -> Parts:
    return [Gradients(float(shape.width), True, 0.0)] * (2 if shape.norm == "layer" else 1)


def embedding_arrays(shape: ModelShape, tp: int) -> Parts:
    """Return the arrays of the embedding of tokens, and of positions if those are learned."""
    learned = [Gradients(float(shape.time * shape.width), True, 0.0)]
    tokens = [Gradients(table_parameters(shape, tp), False, 0.0)]
    return tokens + learned * (shape.positions == "learned")


def stage_arrays(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool, recompute: str
) -> Parts:
    """Return the arrays of a rank with this many layers, and maybe the embedding or the head."""
    table = table_parameters(shape, tp)
    head = norm_arrays(shape) + [Gradients(table, False, table)] * (not shape.tied or not first)
    inside = layer_arrays(shape, tp, ep, recompute) * layers
    return embedding_arrays(shape, tp) * first + inside + head * last


def table_parameters(shape: ModelShape, tp: int) -> float:
    """Return the number of parameters of the embedding of tokens, or of the output layer."""
    return shape.vocabulary * shape.width / shape.tp_beside_attention(tp)


def expert_parameters(shape: ModelShape, ep: int) -> float:
    """Return the number of parameters of a layer's experts on a rank."""
    return size_of(mlp_arrays(shape, 1)) * shape.experts / ep


@lru_cache(maxsize=1 << 14)
def layer_parameters(shape: ModelShape, tp: int, ep: int) -> float:
    """Return the number of parameters of one layer on a rank."""
    return size_of(layer_arrays(shape, tp, ep))


@lru_cache(maxsize=1 << 14)
def rank_parameters(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool
) -> float:
    """Return the number of parameters on a rank: of layers, and maybe the embedding or the head."""
    ends = stage_arrays(shape, tp, ep, 0, first, last, "none")
    return layers * layer_parameters(shape, tp, ep) + size_of(ends)


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
