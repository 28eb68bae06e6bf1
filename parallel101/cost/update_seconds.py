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

from parallel101.cost.cluster import all_gather_seconds
from parallel101.cost.kernels import memory_seconds
from parallel101.cost.layer_seconds import RankWork, beside
from parallel101.cost.model_shape import (
    Gradients,
    ModelShape,
    Parts,
    expert_parameters,
    parameters_and_arrays,
    stage_arrays,
)
from parallel101.cost.parallel_layout import AVERAGES

BUCKET = 25 * 2**20  # bytes of a bucket of gradients, at most
# exposed seconds along dp: before the last microbatch's backward, in it, and after it
Waits = tuple[float, float, float]


def accumulation_seconds(of: RankWork) -> tuple[float, float]:
    """Return the seconds of adding up the microbatches' gradients, and of sending them once.

    Sending counts the kernels that move gradients to the arrays in which they are sent, and that
    add what other ranks send; not the messages.
    """
    layout, chip, launch, ranks = of.layout, of.cluster.chip, of.cluster.kernels.launch, of.ranks
    if of.software.accumulation == "fused":
        return 0.0, 0.0
    size = layout.gradient_itemsize
    added = memory_seconds(chip, of.parameters * (of.e + 2 * size))
    if of.software.accumulation == "each":
        return layout.microbatches * added, 0.0
    added += (of.arrays - 1) * launch
    again = layout.microbatches - 1 if layout.zero_stage < 2 else 0  # ZeRO 2 and 3 send each
    moved = of.parameters * (of.e + size + 3 * size * (ranks - 1) / ranks)
    moving = memory_seconds(chip, moved) + messages_of(of) * (ranks - 2) * launch
    return again * added, moving if ranks > 1 else 0.0


def messages_of(of: RankWork) -> int:
    """Return the number of messages in which the gradients of a rank travel along dp."""
    if of.layout.zero_stage == 3:
        return (of.layers + of.last) * (2 if of.apart else 1) + of.first
    return len(buckets_of(of)) if of.software.buckets else 1


def buckets_of(of: RankWork) -> tuple[Gradients, ...]:
    """Return the buckets in which a stage's gradients travel, in the order backward fills them."""
    layout = of.layout
    arrays = layout.tp, layout.ep, *of.part, layout.recompute
    return buckets(of.shape, arrays, of.e, of.apart, 4 if layout.zero_stage else 2)


@lru_cache(maxsize=1 << 12)
def buckets(
    shape: ModelShape, arguments: tuple, itemsize: int, apart: bool, at_least: int
) -> tuple[Gradients, ...]:
    """Return the buckets: of at most BUCKET bytes, or `at_least` of them if each is full.

    Args:
        arguments: of `stage_arrays`.
        itemsize: bytes of a weight. apart: whether some are sent separately.
    """
    arrays = stage_arrays(shape, *arguments)
    most = min(BUCKET, ceil(itemsize * sum(part.size for part in arrays) / at_least))
    found: Parts = []
    room = 0.0
    for size, other, work in reversed(arrays):
        nbytes, this = size * itemsize, other and apart
        if nbytes > room or not found or this != found[-1].apart:
            found.append(Gradients(0.0, this, 0.0))
            room = float(most)
        found[-1] = Gradients(found[-1].size + size, this, found[-1].work + work)
        room -= nbytes
    return tuple(found)


def bucket_seconds(of: RankWork, backward: float) -> tuple[float, float]:
    """Return the seconds in which a backward waits for its buckets, and the seconds after it.

    Two buckets are on their way at a time: when backward has filled one, it sends it and waits for
    the sums of the one before. Without ZeRO, these sums are then sent on: the all-reduce's second
    half.

    Args:
        backward: seconds without waits.
    """
    layout, found = of.layout, buckets_of(of)
    per_work = backward / max(1.0, sum([work for _, _, work in found]))
    nbytes, how = layout.gradient_itemsize, of.software.collectives
    took = {
        size: all_gather_seconds(of.cluster, size * nbytes, of.ranks, layout.tp, algorithm=how)
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


def gradient_seconds(of: RankWork, forward: float, backward: float) -> Waits:
    """Return the exposed seconds of summing gradients and gathering weights, along dp, cp and ep.

    With overlap, messages are in flight while the GPU computes, but for those of the part that is
    last: with ZeRO-3, the layer that is first in a pass, too, and the embedding and the head.

    Args:
        forward, backward: seconds of one microbatch on this rank.
    """
    layout, software, ranks, zero = of.layout, of.software, of.ranks, of.layout.zero_stage
    if ranks == 1:
        return 0.0, 0.0, 0.0
    count = messages_of(of)
    groups = [(1.0, ranks, layout.tp)]
    if layout.ep > 1:  # fewer ranks share experts
        experts = of.layers * expert_parameters(of.shape, layout.ep) / of.parameters
        stride = layout.strides["cp" if layout.cp > 1 else "dp"]
        groups = [(1 - experts, ranks, layout.tp), (experts, ranks // layout.ep, stride)]

    def seconds(size: int, part: float = 1.0, messages: int = count) -> float:
        """Return the seconds of a reduce-scatter or all-gather of a part of the parameters."""
        nbytes, how = part * of.parameters * size / max(1, messages), software.collectives
        of_groups = [
            all_gather_seconds(of.cluster, share * nbytes, among, stride, algorithm=how)
            for share, among, stride in groups
        ]
        return messages * sum(of_groups)

    # backward's own messages along cp and ep go first
    overlap = layout.overlap and software.dp_overlap and layout.cp == layout.ep == 1

    def exposed(messages: float, kernels: float, parts: int) -> float:
        """Return the exposed seconds of `parts` equal messages, one of which nothing hides."""
        if not overlap or parts < 2:
            return messages
        rest = (parts - 1) / parts
        return messages / parts + beside(rest * messages, rest * kernels, software)

    weight, gradient, ends = of.e, layout.gradient_itemsize, of.first + of.last
    if zero < 3:
        gather = seconds(weight) if zero else 0.0
        times = layout.microbatches if zero == 2 else 1
        if software.buckets and overlap:
            waited, after = bucket_seconds(of, backward)
            return (times - 1) * waited, waited, after + gather
        summed = seconds(gradient) * (1 if zero else 2)  # scatter, or all-reduce
        return 0.0, 0.0, times * exposed(summed, backward, of.layers + ends) + gather
    of_layer, _ = parameters_and_arrays(of.shape, layout.tp, layout.ep, 1, False, False)
    of_layers = of.layers * of_layer / of.parameters
    in_a_pass = of.layers // layout.chunks  # then another stage's weights are gathered
    inside = count * of.layers // (of.layers + ends)
    gather, scatter = seconds(weight, of_layers, inside), seconds(gradient, of_layers, inside)
    outside, other = 1 - of_layers, count - inside
    alone = 2 * seconds(weight, outside, other) + seconds(gradient, outside, other)
    once = exposed(gather, forward, in_a_pass) + exposed(gather + scatter, backward, in_a_pass)
    return layout.microbatches * (once + alone), 0.0, 0.0


def optimizer_seconds(of: RankWork) -> float:
    """Return the seconds of clipping and of the update."""
    layout, software = of.layout, of.software
    mine = of.parameters / (layout.dp if layout.zero_stage else 1)
    nbytes = software.optimizer_bytes if "mixed" in layout.precision else 28
    nbytes -= 8 * (2 - AVERAGES[layout.optimizer])  # AdamW reads and writes two averages
    pieces = max(of.arrays * mine / of.parameters, 1)
    launches = software.optimizer_launches * pieces * of.cluster.kernels.launch
    return memory_seconds(of.cluster.chip, mine * nbytes) + launches
