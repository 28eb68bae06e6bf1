"""Seconds from the gradients of a stage to its new weights: accumulation, messages along dp,
optimizer. All are decided by the number of parameters on the rank.

    accumulation   each microbatch's gradients are added: bytes / memory bandwidth
    dp             all-reduce of the gradients; ZeRO: reduce-scatter, and all-gather of the weights
    optimizer      reads and writes gradients, weights and its state: bytes / memory bandwidth
"""

from __future__ import annotations

from functools import lru_cache

from parallel101.cost.cluster import Cluster
from parallel101.cost.collective_seconds import all_gather_seconds
from parallel101.cost.kernels import memory_seconds
from parallel101.cost.layer_seconds import beside
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import Software

ITEMSIZE = {"fp32": 4, "bf16": 2, "bf16-mixed": 2, "fp16-mixed": 2}


@lru_cache(maxsize=1 << 14)
def layer_parameters(shape: ModelShape, tp: int, ep: int) -> float:
    """Parameters of one layer on a rank."""
    mlp: float = shape.mlp_parameters
    if shape.experts:
        mlp *= shape.experts / ep
    return (shape.attention_parameters + mlp) / tp + 2 * shape.norm_parameters


@lru_cache(maxsize=1 << 14)
def rank_parameters(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool
) -> float:
    """Parameters of a rank whose stage has so many layers, and maybe the embedding or the head."""
    found = layers * layer_parameters(shape, tp, ep)
    if first:
        found += shape.embedding_parameters / tp
    if last:
        found += shape.head_parameters / tp
        if shape.tied and not first:  # a copy of the embedding
            found += shape.vocabulary * shape.width / tp
    return found


def gradient_itemsize(layout: ParallelLayout) -> int:
    return 4 if layout.gradient_dtype == "fp32" else ITEMSIZE[layout.precision]


def accumulation_seconds(
    layout: ParallelLayout, cluster: Cluster, software: Software, parameters: float
) -> float:
    """Seconds in which gradients of microbatches are added up, or moved to the arrays in which
    they are sent.
    """
    if software.accumulation == "fused":
        return 0.0
    size, weight = gradient_itemsize(layout), ITEMSIZE[layout.precision]
    added = memory_seconds(cluster.chip, parameters * (weight + 2 * size))
    if software.accumulation == "each":
        return layout.microbatches * added
    ranks = layout.dp * layout.cp * layout.ep
    # to the arrays that are sent; then the other ranks' blocks are added
    moved = parameters * (weight + size + 3 * size * (ranks - 1) / ranks)
    times = layout.microbatches if layout.zero_stage >= 2 else 1
    sent = times * memory_seconds(cluster.chip, moved) if ranks > 1 else 0.0
    return (layout.microbatches - 1) * added + sent


def gradient_seconds(
    layout: ParallelLayout,
    cluster: Cluster,
    software: Software,
    parameters: float,
    forward: float,
    backward: float,
    buckets: int,
    ends: float,
) -> float:
    """Exposed seconds of summing gradients, and of gathering weights, along dp, cp and ep.

    Args:
        parameters: on this rank.
        forward, backward: seconds of one microbatch on it. With overlap, messages are in flight
            meanwhile, except those of the last of `buckets` equal parts.
        ends: the part of the parameters that is in the embedding and the head. With ZeRO-3, they
            are gathered before each pass, and nothing hides that.
    """
    ranks, stride = layout.dp * layout.ep * layout.cp, layout.tp
    if ranks == 1:
        return 0.0
    gradients = parameters * gradient_itemsize(layout)
    weights = parameters * ITEMSIZE[layout.precision]
    how = software.collectives
    gather = all_gather_seconds(cluster, weights, ranks, stride, algorithm=how)
    scatter = all_gather_seconds(cluster, gradients, ranks, stride, algorithm=how)

    # backward's own messages along cp and ep go first
    overlap = layout.overlap and software.dp_overlap and layout.cp == layout.ep == 1

    def exposed(messages: float, kernels: float) -> float:
        if not overlap:
            return messages
        return max(beside(messages, kernels, software), messages / buckets)

    if layout.zero_stage == 0:
        return exposed(2 * scatter, backward)
    if layout.zero_stage == 1:
        return exposed(scatter, backward) + gather
    if layout.zero_stage == 2:
        return layout.microbatches * exposed(scatter, backward) + gather
    layers = 1 - ends
    once = exposed(layers * gather, forward) + exposed(layers * (gather + scatter), backward)
    return layout.microbatches * (once + ends * (2 * gather + scatter))


def optimizer_seconds(
    layout: ParallelLayout, cluster: Cluster, software: Software, parameters: float
) -> float:
    """Seconds of clipping and of the update."""
    mine = parameters / (layout.dp if layout.zero_stage else 1)
    nbytes = software.optimizer_bytes if "mixed" in layout.precision else 28
    return memory_seconds(cluster.chip, mine * nbytes)
