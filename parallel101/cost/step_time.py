"""How long a training step takes: the quick model, in closed forms.

    a rank's microbatch   layers · (forward + backward), embedding on the first stage, head on the
                          last
    a step                M · the slowest rank's microbatch
                          + bubble: once through all other ranks, 1/chunks of it if interleaved
                          + messages between stages + sum of gradients along dp + optimizer

The seconds are those of the slowest rank, and its parts add up to them. Sources: Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv
2104.04473), section 2.2 (bubble) and the appendix (operations); kernels.py, layer_seconds.py and
collective_seconds.py have the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parallel101.cost.cluster import Cluster
from parallel101.cost.collective_seconds import (
    all_gather_seconds,
    all_reduce_seconds,
    send_seconds,
)
from parallel101.cost.kernels import memory_seconds
from parallel101.cost.layer_seconds import (
    Cut,
    Pass,
    Seconds,
    embedding_seconds,
    head_seconds,
    layer_seconds,
)
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import TRAINERS, Software
from parallel101.cost.stage_layers import stage_layers

ITEMSIZE = {"fp32": 4, "bf16": 2, "bf16-mixed": 2, "fp16-mixed": 2}
RANGE = 0.08  # of `low` and `high`: see BENCHMARKS.md


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by part, on the slowest rank.

    Attributes:
        matmul, memory_bound: of products (attention's included), and of all other kernels.
        tp, cp, ep, pp, dp: of messages along each axis that nothing hides.
        bubble: in which the rank waits for the other stages.
        optimizer: of clipping and the update.
        model_flops: of all ranks together, without what is computed again; hardware_flops: with it.
        tokens: of the batch.
        peak: operations per second of all GPUs together.
    """

    matmul: float
    memory_bound: float
    tp: float
    cp: float
    ep: float
    pp: float
    dp: float
    bubble: float
    optimizer: float
    model_flops: float
    hardware_flops: float
    tokens: int
    peak: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Name of a part → its seconds."""
        return {
            "matmul": self.matmul,
            "memory-bound": self.memory_bound,
            "tp": self.tp,
            "cp": self.cp,
            "ep": self.ep,
            "pp": self.pp,
            "dp": self.dp,
            "bubble": self.bubble,
            "optimizer": self.optimizer,
        }

    @property
    def low(self) -> float:
        return self.seconds * (1 - RANGE)

    @property
    def high(self) -> float:
        return self.seconds * (1 + RANGE)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al., PaLM, appendix B)."""
        return self.model_flops / self.seconds / self.peak

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: what is computed again counts, too (ibid.)."""
        return self.hardware_flops / self.seconds / self.peak

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def limit(self) -> str:
        """What takes most of the time besides the products, in words."""
        words = {
            "matmul": "the tensor cores: products of matrices",
            "memory-bound": "memory bandwidth: norms, softmax, additions",
            "tp": "messages of tensor parallelism that nothing hides",
            "cp": "messages of context parallelism that nothing hides",
            "ep": "messages between experts",
            "pp": "messages between pipeline stages",
            "dp": "the sum of gradients over the replicas",
            "bubble": "the pipeline's bubble: too few microbatches for its stages",
            "optimizer": "the optimizer's step, which is bound by memory bandwidth",
        }
        parts = self.parts
        if parts["matmul"] >= 0.7 * self.seconds:
            return words["matmul"]
        del parts["matmul"]
        return words[max(parts, key=lambda name: parts[name])]


def model_flops(shape: ModelShape, batch: int) -> float:
    """Operations of a step of `batch` samples, without recomputation: 6 a token and weight of a
    product, and 12 s h a token for attention's two products over the whole square of (time, time).

    For a GPT: 72 B s L h² (1 + s/(6h) + V/(12 L h)), which is 3/4 of formula (3) of Narayanan et
    al. without the recomputation. Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B.
    """
    return batch * shape.time * flops_per_token(shape)


@lru_cache(maxsize=1 << 10)
def flops_per_token(shape: ModelShape) -> float:
    h = shape.width
    return 6 * (shape.layers * weights_in_use(shape) + shape.vocabulary * h) + (
        12 * shape.layers * shape.time * h
    )


def weights_in_use(shape: ModelShape) -> float:
    """Weights of a layer's products that a token meets."""
    h = shape.width
    mlp = (3 if shape.gated else 2) * h * shape.inside
    if shape.experts:
        mlp = mlp * shape.top_k + h * shape.experts
    return 2 * h * h + 2 * h * shape.kv_width + mlp


def recomputed_flops(shape: ModelShape, layout: ParallelLayout) -> float:
    """Operations that a step computes again."""
    tokens = layout.batch * shape.time
    core = 4 * shape.time * shape.width
    if layout.recompute == "full":
        return tokens * shape.layers * (2 * weights_in_use(shape) + core)
    return tokens * shape.layers * core if layout.recompute == "selective" else 0.0


def step_time(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, *, software: Software = TRAINERS
) -> StepTime:
    """Return the time of a step of this model in this layout on this cluster.

    Raises ValueError if the layout has more GPUs than the cluster, or if the sizes don't divide.
    """
    check(shape, layout, cluster)
    cut = Cut(
        layout.tp,
        layout.cp,
        layout.ep,
        layout.microbatch,
        layout.sequence_parallel,
        layout.recompute,
        ITEMSIZE[layout.precision],
        layout.context,
    )
    layer = layer_seconds(shape, cluster, cut, software)
    embedding = embedding_seconds(shape, cluster, cut, software)
    head = head_seconds(shape, cluster, cut, software)
    # a rank has the global stages r, r + pp, r + 2 pp …
    layers = stage_layers(shape.layers, layout.pp * layout.chunks)
    mine = [sum(layers[rank :: layout.pp]) for rank in range(layout.pp)]
    ends = {0: embedding.total, layout.pp - 1: head.total}
    if layout.pp == 1:
        ends = {0: embedding.total + head.total}
    of_rank = [n * layer.total + ends.get(rank, 0.0) for rank, n in enumerate(mine)]
    slowest = max(range(layout.pp), key=lambda rank: of_rank[rank])

    busy = whole(layer, mine[slowest])
    if slowest == 0:
        busy = busy.plus(whole(embedding, 1))
    if slowest == layout.pp - 1:
        busy = busy.plus(whole(head, 1))
    M = layout.microbatches
    filled = (sum(of_rank) - of_rank[slowest]) / layout.chunks * waiting(layout)
    parameters = rank_parameters(shape, layout, mine[slowest], slowest)
    accumulate = accumulation_seconds(shape, layout, cluster, software, parameters)
    return StepTime(
        matmul=M * busy.matmul,
        memory_bound=M * busy.memory + accumulate,
        tp=M * busy.tp,
        cp=M * busy.cp,
        ep=M * busy.ep,
        pp=pipeline_seconds(shape, layout, cluster, software, cut),
        dp=gradient_seconds(layout, cluster, parameters, backward=whole(layer, 1).total),
        bubble=filled,
        optimizer=optimizer_seconds(layout, cluster, software, parameters),
        model_flops=model_flops(shape, layout.batch),
        hardware_flops=model_flops(shape, layout.batch) + recomputed_flops(shape, layout),
        tokens=layout.batch * shape.time,
        peak=cluster.chip.flops * layout.gpus,
    )


def check(shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> None:
    """Raise ValueError if this model can't be laid out so on this cluster."""
    if layout.gpus > cluster.gpus:
        raise ValueError(
            f"the layout has {layout.gpus} GPUs, the cluster {cluster.gpus}: expected at most as "
            "many"
        )
    for name in ("heads", "inside", "kv"):
        if getattr(shape, name) % layout.tp:
            raise ValueError(
                f"{name}={getattr(shape, name)} can't be cut over tp={layout.tp}: expected a "
                "multiple"
            )
    if shape.time % layout.cp:
        raise ValueError(f"time={shape.time} can't be cut over cp={layout.cp}: expected a multiple")


def whole(one: Pass, times: int) -> Seconds:
    """Forward and backward together."""
    return Seconds().plus(one.forward, times).plus(one.backward, times)


def waiting(layout: ParallelLayout) -> float:
    """The bubble, in forward + backward passes of the other stages. Zero-bubble schedules compute
    weight gradients in it, a third of the pass each (Qi et al., arXiv 2401.10241, Table 2).
    """
    return {"zb-h1": 1 / 3, "zb-h2": 0.0}.get(layout.schedule, 1.0)


@lru_cache(maxsize=1 << 14)
def _rank_parameters(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool
) -> float:
    experts = max(1, shape.experts)
    mlps = experts * shape.mlp_parameters / (ep if shape.experts else 1)
    found = layers * (shape.attention_parameters + mlps) / tp
    found += layers * 2 * shape.norm_parameters
    if first:
        found += shape.embedding_parameters / tp
    if last:
        found += shape.head_parameters / tp
        if shape.tied and not first:
            found += shape.vocabulary * shape.width / tp
    return found


def rank_parameters(shape: ModelShape, layout: ParallelLayout, layers: int, rank: int) -> float:
    """Parameters on a rank of stage `rank`, which has so many layers."""
    return _rank_parameters(shape, layout.tp, layout.ep, layers, rank == 0, rank == layout.pp - 1)


def gradient_itemsize(layout: ParallelLayout) -> int:
    return 4 if layout.gradient_dtype == "fp32" else ITEMSIZE[layout.precision]


def accumulation_seconds(
    shape: ModelShape,
    layout: ParallelLayout,
    cluster: Cluster,
    software: Software,
    parameters: float,
) -> float:
    """Seconds in which a microbatch's gradients are added to those before it."""
    times = layout.microbatches - (0 if software.accumulates else 1)
    nbytes = ITEMSIZE[layout.precision] + 2 * gradient_itemsize(layout)
    return times * memory_seconds(cluster.chip, parameters * nbytes)


def gradient_seconds(
    layout: ParallelLayout, cluster: Cluster, parameters: float, *, backward: float
) -> float:
    """Exposed seconds of summing gradients, and of gathering weights, along dp, ep and cp.

    With overlap, all but the last layers' gradients travel during the last microbatch's backward.
    """
    ranks, stride = layout.dp * layout.ep * layout.cp, layout.tp
    if ranks == 1:
        return 0.0
    nbytes = parameters * gradient_itemsize(layout)
    weights = parameters * ITEMSIZE[layout.precision]
    if layout.zero_stage == 0:
        seconds = all_reduce_seconds(cluster, nbytes, ranks, stride)
    else:
        times = 2 * layout.microbatches if layout.zero_stage == 3 else 1
        seconds = all_gather_seconds(cluster, nbytes, ranks, stride)
        seconds += times * all_gather_seconds(cluster, weights, ranks, stride)
    return seconds if not layout.overlap else max(0.0, seconds - backward)


def optimizer_seconds(
    layout: ParallelLayout, cluster: Cluster, software: Software, parameters: float
) -> float:
    """Seconds of clipping and of the optimizer's update, which are bound by memory bandwidth."""
    mine = parameters / (layout.dp if layout.zero_stage else 1)
    return memory_seconds(cluster.chip, mine * software.optimizer_bytes)


def pipeline_seconds(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, software: Software, cut: Cut
) -> float:
    """Exposed seconds of messages between stages."""
    if layout.pp == 1:
        return 0.0
    size = cut.microbatch * shape.time / cut.cp * shape.width * cut.itemsize
    stride = layout.strides["pp"]
    share = layout.tp if layout.sequence_parallel or software.scatter_gather else 1
    once = send_seconds(cluster, size / share, stride)
    if software.scatter_gather and not layout.sequence_parallel:
        once += all_gather_seconds(cluster, size, layout.tp)
    times = 2 * (layout.pp - 1)
    if not software.pp_overlap:
        times += 2 * layout.microbatches * layout.chunks
    return times * once
