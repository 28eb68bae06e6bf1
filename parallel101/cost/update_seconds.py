"""Seconds of a stage's update: accumulating gradients, messages along dp, and the optimizer.

All of them follow from the number of parameters on the rank.

    accumulation   each microbatch's gradients are added: bytes / memory bandwidth
    dp             all-reduce of the gradients; ZeRO: reduce-scatter, and all-gather of the weights
    optimizer      reads and writes gradients, weights and its state: bytes / memory bandwidth

Gradients travel along dp in messages, each of which costs the latency of a collective:

    ZeRO 0, 1, 2    buckets, filled from the last parameter on
    ZeRO 3          one for each layer

With sequence parallel, norms see a part of the positions on each rank along tp. Their gradients are
summed along tp, too, so ZeRO sends them separately. Source: by_size in trainers/gradient_sync.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from parallel101.cost.cluster import Cluster, all_gather_seconds
from parallel101.cost.kernels import memory_seconds
from parallel101.cost.layer_seconds import beside
from parallel101.cost.model_shape import (
    Gradients,
    ModelShape,
    Parts,
    count_arrays,
    expert_parameters,
    layer_parameters,
    rank_parameters,
    size_of,
    stage_arrays,
)
from parallel101.cost.parallel_layout import AVERAGES, ParallelLayout
from parallel101.cost.software import Software

BUCKET = 25 * 2**20  # bytes of a bucket of gradients, at most


class ModelPart(NamedTuple):
    """The part of a model on one rank: some layers, and maybe the embedding and the head."""

    shape: ModelShape
    layers: int
    first: bool
    last: bool

    def parameters(self, layout: ParallelLayout) -> float:
        return rank_parameters(self.shape, layout.tp, layout.ep, *self[1:])

    def arrays(self, layout: ParallelLayout) -> int:
        return count_arrays(self.shape, layout.tp, layout.ep, *self[1:])


def accumulation_seconds(
    layout: ParallelLayout, cluster: Cluster, software: Software, stage: ModelPart
) -> tuple[float, float]:
    """Return the seconds of adding up the microbatches' gradients, and of sending them once.

    Sending counts the kernels that move gradients to the arrays in which they are sent, and that
    add what other ranks send; not the messages.
    """
    if software.accumulation == "fused":
        return 0.0, 0.0
    parameters, launch = stage.parameters(layout), cluster.kernels.launch
    size, weight = layout.gradient_itemsize, layout.itemsize
    added = memory_seconds(cluster.chip, parameters * (weight + 2 * size))
    if software.accumulation == "each":
        return layout.microbatches * added, 0.0
    added += (stage.arrays(layout) - 1) * launch
    ranks = layout.dp * layout.cp * layout.ep
    moved = parameters * (weight + size + 3 * size * (ranks - 1) / ranks)
    moving = memory_seconds(cluster.chip, moved) + messages_of(layout, software, stage) * (
        (ranks - 2) * launch
    )
    again = layout.microbatches - 1 if layout.zero_stage < 2 else 0  # ZeRO 2 and 3 send each
    return again * added, moving if ranks > 1 else 0.0


class GradientSeconds(NamedTuple):
    """Exposed seconds along dp: before the last microbatch's backward, in it, and after it."""

    before: float = 0.0
    last: float = 0.0
    after: float = 0.0


def messages_of(layout: ParallelLayout, software: Software, stage: ModelPart) -> int:
    """Return the number of messages in which the gradients of a rank travel along dp."""
    if layout.zero_stage == 3:
        return (stage.layers + stage.last) * (2 if sent_apart(layout) else 1) + stage.first
    if not software.buckets:
        return 1
    return len(buckets_of(layout, stage))


def sent_apart(layout: ParallelLayout) -> bool:
    return layout.sequence_parallel and layout.tp > 1 and layout.zero_stage > 0


def buckets_of(layout: ParallelLayout, stage: ModelPart) -> tuple[Gradients, ...]:
    """Return the buckets in which a stage's gradients travel, in the order backward fills them."""
    options = layout.itemsize, sent_apart(layout), 4 if layout.zero_stage else 2
    return buckets(stage, layout.tp, layout.ep, layout.recompute, *options)


@lru_cache(maxsize=1 << 12)
def buckets(
    stage: ModelPart, tp: int, ep: int, recompute: str, itemsize: int, apart: bool, at_least: int
) -> tuple[Gradients, ...]:
    """Return the buckets: of at most BUCKET bytes, or `at_least` of them if each is full.

    Args:
        itemsize: bytes of a weight. apart: whether some are sent separately.
    """
    of_stage = stage.layers, stage.first, stage.last
    arrays = stage_arrays(stage.shape, tp, ep, *of_stage, recompute)
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


def bucket_seconds(
    layout: ParallelLayout, cluster: Cluster, software: Software, stage: ModelPart, backward: float
) -> tuple[float, float]:
    """Return the seconds in which a backward waits for its buckets, and the seconds after it.

    Two buckets are on their way at a time: when backward has filled one, it sends it and waits for
    the sums of the one before. Without ZeRO, these sums are then sent on: the all-reduce's second
    half.

    Args:
        backward: seconds without waits.
    """
    ranks, found = layout.dp * layout.ep * layout.cp, buckets_of(layout, stage)
    per_work = backward / max(1.0, sum([work for _, _, work in found]))
    nbytes, how = layout.gradient_itemsize, software.collectives
    took = {
        size: all_gather_seconds(cluster, size * nbytes, ranks, layout.tp, algorithm=how)
        for size in {size for size, _, _ in found}
    }
    now = free = summed = waited = second_half = 0.0
    halves = 0.0 if layout.zero_stage else 1.0
    for size, _, work in found:  # most of the planner's time: no calls of max()
        now += work * per_work
        before, summed = summed, (now if now > free else free) + took[size]
        if before > now:
            waited += before - now
            now = before
        free = (now if now > summed else summed) + second_half
        second_half = halves * took[size]
    return waited, free + second_half - now


def gradient_seconds(
    layout: ParallelLayout,
    cluster: Cluster,
    software: Software,
    stage: ModelPart,
    forward: float,
    backward: float,
) -> GradientSeconds:
    """Return the exposed seconds of summing gradients and gathering weights, along dp, cp and ep.

    With overlap, messages are in flight while the GPU computes, but for those of the part that is
    last: with ZeRO-3, the layer that is first in a pass, too, and the embedding and the head.

    Args:
        forward, backward: seconds of one microbatch on this rank.
    """
    ranks = layout.dp * layout.ep * layout.cp
    if ranks == 1:
        return GradientSeconds()
    parameters, count = stage.parameters(layout), messages_of(layout, software, stage)
    # fewer ranks share experts
    experts = stage.layers * expert_parameters(stage.shape, layout.ep) if layout.ep > 1 else 0.0
    groups = (
        (1 - experts / parameters, ranks, layout.tp),
        (experts / parameters, ranks // layout.ep, layout.strides["cp" if layout.cp > 1 else "dp"]),
    )

    def seconds(size: int, part: float = 1.0, messages: int = count) -> float:
        """Return the seconds of a reduce-scatter or all-gather of a part of the parameters."""
        nbytes = part * parameters * size / max(1, messages)
        how = software.collectives
        return messages * sum(
            all_gather_seconds(cluster, share * nbytes, among, stride, algorithm=how)
            for share, among, stride in groups
        )

    # backward's own messages along cp and ep go first
    overlap = layout.overlap and software.dp_overlap and layout.cp == layout.ep == 1

    def exposed(messages: float, kernels: float, parts: int) -> float:
        """Return the exposed seconds of `parts` equal messages, one of which nothing hides."""
        if not overlap or parts < 2:
            return messages
        rest = (parts - 1) / parts
        return messages / parts + beside(rest * messages, rest * kernels, software)

    weight, gradient = layout.itemsize, layout.gradient_itemsize
    ends = stage.first + stage.last
    if layout.zero_stage < 3:
        gather = seconds(weight) if layout.zero_stage else 0.0
        times = layout.microbatches if layout.zero_stage == 2 else 1
        if software.buckets and overlap:
            waited, after = bucket_seconds(layout, cluster, software, stage, backward)
            return GradientSeconds((times - 1) * waited, waited, after + gather)
        summed = seconds(gradient) * (1 if layout.zero_stage else 2)  # scatter, or all-reduce
        summed = times * exposed(summed, backward, stage.layers + ends)
        return GradientSeconds(after=summed + gather)
    of_layers = stage.layers * layer_parameters(stage.shape, layout.tp, layout.ep) / parameters
    in_a_pass = stage.layers // layout.chunks  # then another stage's weights are gathered
    inside = count * stage.layers // (stage.layers + ends)
    gather, scatter = seconds(weight, of_layers, inside), seconds(gradient, of_layers, inside)
    outside, other = 1 - of_layers, count - inside
    alone = 2 * seconds(weight, outside, other) + seconds(gradient, outside, other)
    once = exposed(gather, forward, in_a_pass) + exposed(gather + scatter, backward, in_a_pass)
    return GradientSeconds(before=layout.microbatches * (once + alone))


def optimizer_seconds(
    layout: ParallelLayout, cluster: Cluster, software: Software, stage: ModelPart
) -> float:
    """Return the seconds of clipping and of the update."""
    mine = stage.parameters(layout) / (layout.dp if layout.zero_stage else 1)
    nbytes = software.optimizer_bytes if "mixed" in layout.precision else 28
    nbytes -= 8 * (2 - AVERAGES[layout.optimizer])  # AdamW reads and writes two averages
    pieces = max(stage.arrays(layout) * mine / stage.parameters(layout), 1)
    launches = software.optimizer_launches * pieces * cluster.kernels.launch
    return memory_seconds(cluster.chip, mine * nbytes) + launches
