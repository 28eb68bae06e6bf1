"""The time of a training step: the quick model, in closed forms.

    a rank's microbatch   layers · (forward + backward), embedding on the first stage, head on the
                          last
    a step                M · the slowest rank's microbatch
                          + bubble: once through all other ranks, 1/chunks of it if interleaved
                          + messages between stages + sum of gradients along dp + optimizer

The seconds are those of the slowest rank, and its parts add up to them. Sources: Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv
2104.04473), section 2.2 (bubble) and the appendix (operations); kernels.py, layer_seconds.py and
cluster.py have the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parallel101.cost.cluster import (
    Cluster,
    all_gather_seconds,
    all_reduce_seconds,
    send_seconds,
)
from parallel101.cost.layer_seconds import Passes, RankWork, Seconds, seconds_of_parts
from parallel101.cost.model_shape import ModelShape, hardware_flops, model_flops, table_parameters
from parallel101.cost.parallel_layout import ParallelLayout, stage_layers
from parallel101.cost.software import TRAINERS, Software
from parallel101.cost.update_seconds import (
    Waits,
    accumulation_seconds,
    gradient_seconds,
    optimizer_seconds,
)

# name of a part → what takes its time, and limits the step if that is most
LIMITS = {
    "matmul": "the tensor cores: products of matrices",
    "memory-bound": "memory bandwidth: norms, softmax, additions",
    "host": "the CPU, which launches kernels too slowly",
    "tp": "messages of tensor parallelism that nothing hides",
    "cp": "messages of context parallelism that nothing hides",
    "ep": "messages between experts",
    "pp": "messages between pipeline stages",
    "dp": "the sum of gradients over the replicas",
    "bubble": "the pipeline's bubble: too few microbatches for its stages",
    "optimizer": "the optimizer's step, which is bound by memory bandwidth",
}


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by part, on the slowest rank.

    Attributes:
        shape, layout, cluster: what is trained, how, and on what.
        parts: by name:
            "matmul", "memory-bound": of products (attention's included), and of all other kernels.
            "host": in which the GPU waits for the CPU to launch kernels, if it is modelled.
            "tp", "cp", "ep", "pp", "dp": of messages along each axis that nothing hides.
            "bubble": in which the rank waits for the other stages.
            "optimizer": of clipping and the update.
    """

    shape: ModelShape
    layout: ParallelLayout
    cluster: Cluster
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def low(self) -> float:
        """The least of the range that published runs took; see KernelFigures.runs."""
        return self.seconds * self.cluster.kernels.runs[0]

    @property
    def high(self) -> float:
        return self.seconds * self.cluster.kernels.runs[1]

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al., PaLM, appendix B)."""
        return self._utilization(model_flops(self.shape, self.layout.batch))

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: what is computed again counts, too (ibid.)."""
        layout = self.layout
        return self._utilization(hardware_flops(self.shape, layout.batch, layout.recompute))

    def _utilization(self, flops: float) -> float:
        return flops / self.seconds / (self.cluster.chip.flops * self.layout.gpus)

    @property
    def tokens_per_second(self) -> float:
        return self.layout.batch * self.shape.time / self.seconds

    @property
    def limit(self) -> str:
        """The part that takes the most time besides the products, in words."""
        if self.parts["matmul"] >= 0.7 * self.seconds:
            return LIMITS["matmul"]
        return LIMITS[max([*self.parts][1:], key=self.parts.__getitem__)]


def step_time(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, *, software: Software = TRAINERS
) -> StepTime:
    """Return the time of a step of this model in this layout on this cluster.

    Raises ValueError if the layout has more GPUs than the cluster, or if the sizes don't divide.
    """
    if layout.gpus > cluster.gpus:
        raise ValueError(
            f"the layout has {layout.gpus} GPUs, the cluster {cluster.gpus}: expected at most as "
            "many"
        )
    of_model = seconds_of_parts(shape, of_a_layer(layout), cluster, software)
    P, M = layout.pp, layout.microbatches
    # a rank has the global stages rank, rank + P, rank + 2P …
    layers = stage_layers(shape.layers, P * layout.chunks)
    kinds: dict[tuple[int, bool, bool], RankSeconds] = {}  # most ranks are alike
    ranks = []
    for rank in range(P):
        stage = sum(layers[rank::P]), rank == 0, rank == P - 1
        if stage not in kinds:
            of, one = RankWork(shape, layout, stage, cluster, software), together(*of_model, *stage)
            forward, backward = map(sum, one)
            added, moved = accumulation_seconds(of)
            waits = gradient_seconds(of, forward, backward + moved)
            kinds[stage] = RankSeconds(of, one, forward + backward, added, moved, waits)
        ranks.append(kinds[stage])
    slowest = max(ranks, key=lambda rank: rank.seconds)
    of_rank = [rank.seconds for rank in ranks]
    busy = slowest.one[0].plus(slowest.one[1])
    # LIMITS has the parts in the order of Seconds' fields
    parts = {name: M * seconds for name, seconds in zip(LIMITS, busy)}
    parts["memory-bound"] += slowest.added + (M if layout.zero_stage >= 2 else 1) * slowest.moved
    if not busy.host:
        del parts["host"]
    parts["pp"] = pipeline_seconds(slowest.of, of_rank)
    parts["dp"], moved_elsewhere = waiting_for_gradients(ranks, slowest)
    others = sum(of_rank) - slowest.seconds
    parts["bubble"] = bubble_seconds(layout, others, slowest.one) + moved_elsewhere
    parts["optimizer"] = optimizer_seconds(slowest.of)
    return StepTime(shape, layout, cluster, parts)


# the fields of a layout that a layer's seconds depend on
OF_LAYER = ("tp", "cp", "ep", "microbatch", "recompute", "precision", "context", "overlap")
one_layout = lru_cache(maxsize=1 << 14)(ParallelLayout)


def of_a_layer(layout: ParallelLayout) -> ParallelLayout:
    """Return the layout with all other fields as they are by default, the same for many layouts."""
    in_time = layout.sequence_parallel and layout.tp > 1
    return one_layout(sequence_parallel=in_time, **{n: getattr(layout, n) for n in OF_LAYER})


@lru_cache(maxsize=1 << 12)
def together(
    layer: Passes, embedding: Passes, head: Passes, layers: int, first: bool, last: bool
) -> Passes:
    """Return the seconds of a stage: its layers, and maybe the embedding or the head."""
    forward, backward = (
        Seconds().plus(inside, layers).plus(before, first).plus(after, last)
        for inside, before, after in zip(layer, embedding, head)
    )
    return forward, backward


class RankSeconds(NamedTuple):
    """The seconds of a microbatch on a rank, and of adding up, moving and summing gradients."""

    of: RankWork
    one: Passes
    seconds: float  # of both passes
    added: float
    moved: float
    waits: Waits


def waiting_for_gradients(ranks: list[RankSeconds], slowest: RankSeconds) -> tuple[float, float]:
    """Return the exposed seconds along dp, and those in which other stages fill buckets.

    The last microbatch's backward goes through one stage after the other, and on each it waits for
    messages of the stage's own gradients, which are first moved to buckets. The slowest rank waits
    for all of them.
    """
    (before, last, after), others, layout = slowest.waits, [*ranks], slowest.of.layout
    if len(ranks) == 1 or not slowest.of.software.buckets:
        return before + last + after, 0.0
    others.remove(slowest)
    parts = layout.chunks if layout.zero_stage == 2 else 1  # ZeRO-2 sends a chunk's at a time
    waited = sum(rank.waits[1] for rank in others) / parts
    moved = sum(rank.moved for rank in others) / parts
    # the first rank's backward is the last one
    return before + last + waited + ranks[0].waits[2], moved


def bubble_seconds(layout: ParallelLayout, others: float, one: Passes) -> float:
    """Return the seconds in which a rank waits while the others compute one microbatch each.

    Interleaved stages are 1/chunks as long. Zero-bubble schedules compute weight gradients instead
    of waiting: zb-h1 waits (P − 1)(F + B − W), where W is half of what backward takes besides a
    forward that it repeats (Qi et al., arXiv 2401.10241, Table 2). zb-h2's (P − 1)(F + B − 2W)
    counts from each rank's own first start. In steps that start together it waits at least
    (P − 1) F, as each rank waits for its first input.
    """
    forward, backward = map(sum, one)
    gradients = backward - forward * (layout.recompute == "full")
    saved = {"zb-h1": gradients, "zb-h2": min(1.5 * gradients, backward)}
    share = saved.get(layout.schedule, 0.0) / (forward + backward)
    return others / layout.chunks * (1 - share)


def pipeline_seconds(of: RankWork, of_rank: list[float]) -> float:
    """Return the exposed seconds of messages between stages, and of a tied embedding's sum.

    The sum is that of the tied embedding's gradient over the first and the last stage.

    A microbatch's activations and gradients pass each border while the pipeline fills and drains.
    After that, programs that don't overlap them wait for two messages a microbatch and stage.
    Programs that do wait, too, in 1F1B: see `waiting_in_1f1b`. Interleaved and zero-bubble
    schedules have work to do meanwhile.

    Args:
        of_rank: seconds of one microbatch, forward and backward, on each rank.
    """
    layout, cluster, software = of.layout, of.cluster, of.software
    if layout.pp == 1:
        return 0.0
    stride, P = layout.strides["pp"], layout.pp
    size, gathered = of.tokens * of.shape.width * of.e, 0.0
    cut = layout.tp if layout.sequence_parallel or software.scatter_gather else 1
    if software.scatter_gather and not layout.sequence_parallel:
        gathered = all_gather_seconds(cluster, size, layout.tp)
    once = send_seconds(cluster, size / cut, stride, ranks=P) + gathered
    exposed = 2 * (P - 1) * once
    if not software.pp_overlap:
        exposed += 2 * layout.microbatches * layout.chunks * once
    elif layout.chunks > 1:
        exposed += 2 * P * (layout.chunks - 1) * once
    elif layout.schedule == "1f1b":
        exposed += waiting_in_1f1b(layout, once, of_rank)
    if of.shape.tied:
        nbytes = table_parameters(of.shape, layout.tp) * layout.gradient_itemsize
        exposed += all_reduce_seconds(cluster, nbytes, 2, stride * (P - 1))
    return exposed


def waiting_in_1f1b(layout: ParallelLayout, once: float, of_rank: list[float]) -> float:
    """Return the seconds in which 1F1B waits for messages after the pipeline has filled.

    A microbatch's way from a rank to the n-th one behind it and back takes the compute of these n
    ranks and 2 (n − 1) messages. On the first of them, n microbatches are under way meanwhile, so
    that one takes

        (Σ compute of n ranks + 2 (n − 1) messages) / n

    if that is more than the slowest rank's compute. All ranks between the ends take equally
    long, so only the longest ways count.
    """
    P, slowest = layout.pp, max(of_rank)
    of_one = slowest
    for first in range(min(2, P - 1)):
        for end in range(max(first + 2, P - 1), P + 1):
            n = end - first
            of_one = max(of_one, (sum(of_rank[first:end]) + 2 * (n - 1) * once) / n)
    rounds = -(-layout.microbatches // P) - 1  # after the first one
    return rounds * P * (of_one - slowest)
