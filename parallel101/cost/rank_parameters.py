"""The number of parameters on a rank.

tp cuts a layer's matrices, but not its norms, the biases of row layers, and the router; ep shares
the experts, which tp doesn't cut. A tied embedding is on the first and, as a copy, on the last
stage.
"""

from __future__ import annotations

from functools import lru_cache

from parallel101.cost.model_shape import ModelShape


@lru_cache(maxsize=1 << 14)
def layer_parameters(shape: ModelShape, tp: int, ep: int) -> float:
    """Return the number of parameters of one layer on a rank."""
    whole = shape.width if shape.biases else 0  # a row layer's bias
    attention = (shape.attention_parameters - whole) / tp + whole
    mlp = (shape.mlp_parameters - whole) / tp + whole
    if shape.experts:
        mlp = expert_parameters(shape, ep) + shape.width * shape.experts
    return attention + mlp + 2 * shape.norm_parameters


def expert_parameters(shape: ModelShape, ep: int) -> float:
    """Return the number of parameters of a layer's experts on a rank."""
    return shape.mlp_parameters * shape.experts / ep


def table_parameters(shape: ModelShape, tp: int) -> float:
    """Return the number of parameters of the embedding of tokens, or of the output layer."""
    return shape.vocabulary * shape.width / shape.tp_beside_attention(tp)


def embedding_parameters(shape: ModelShape, tp: int) -> float:
    """Return the number of parameters of the embedding of tokens and of positions."""
    learned = shape.time * shape.width if shape.positions == "learned" else 0
    return table_parameters(shape, tp) + learned


@lru_cache(maxsize=1 << 14)
def rank_parameters(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool
) -> float:
    """Return the number of parameters on a rank: of layers, and maybe the embedding or the head."""
    found = layers * layer_parameters(shape, tp, ep)
    if first:
        found += embedding_parameters(shape, tp)
    if last:
        found += shape.norm_parameters
        found += 0 if shape.tied and first else table_parameters(shape, tp)
    return found
