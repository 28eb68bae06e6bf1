"""Seconds of one layer's kernels and messages, for one microbatch on one rank.

    forward     norm ─ qkv ─ scores ─ softmax ─ dropout ─ context ─ out ─ add
                norm ─ up ─ GELU ─ down ─ add
    backward    two products for each product: ∂x = g W and ∂W = gᵀ x

tokens T = microbatch · time / cp, of which sequence parallel leaves T / tp outside the products.
What is elementwise is fused: a kernel for each line of the table in `forward_memory`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel101.cost.cluster import Cluster
from parallel101.cost.collective_seconds import (
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from parallel101.cost.kernels import attention_seconds, memory_seconds, product_seconds
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.software import Software


class Cut(NamedTuple):
    """What of a ParallelLayout a layer's time depends on."""

    tp: int
    cp: int
    ep: int
    microbatch: int
    sequence_parallel: bool
    recompute: str
    itemsize: int
    context: str


class Seconds(NamedTuple):
    """Seconds of kernels and exposed messages, and the operations of the products."""

    matmul: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    flops: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.memory + self.tp + self.cp + self.ep

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(*(a + times * b for a, b in zip(self, other)))


class Pass(NamedTuple):
    """Forward and backward of one microbatch, with what backward computes again."""

    forward: Seconds
    backward: Seconds
    kernels: int  # launched, both ways

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total


class Product(NamedTuple):
    """`batch` products (m, k) · (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch

    def seconds(self, cluster: Cluster, itemsize: int) -> float:
        return product_seconds(
            cluster.chip, self.m, self.n, self.k, batch=self.batch, itemsize=itemsize
        )

    @property
    def input_gradient(self) -> Product:
        return Product(self.m, self.k, self.n, self.batch)

    @property
    def weight_gradient(self) -> Product:
        return Product(self.k, self.n, self.m, self.batch)


def linear_products(shape: ModelShape, cut: Cut) -> list[Product]:
    """The products with weights of a layer."""
    tokens = cut.microbatch * shape.time // cut.cp
    h, qkv = shape.width, shape.width + 2 * shape.kv_width
    rows, copies = tokens, 1
    if shape.experts:  # every rank has experts / ep of them, and each gets its share of tokens
        copies = max(1, shape.experts // cut.ep)
        rows = max(1, tokens * shape.top_k * cut.ep // shape.experts)
    inside, first = shape.inside // cut.tp, 2 if shape.gated else 1
    return [
        Product(tokens, qkv // cut.tp, h),
        Product(tokens, h, h // cut.tp),
        Product(rows, first * inside, h, copies),
        Product(rows, h, inside, copies),
    ]


def attention_products(shape: ModelShape, cut: Cut) -> list[Product]:
    """Scores and context of unfused attention, over the whole square."""
    heads = cut.microbatch * shape.heads // cut.tp
    q, d = shape.time // cut.cp, shape.head_width
    return [Product(q, shape.time, d, heads), Product(q, d, shape.time, heads)]


def forward_memory(shape: ModelShape, cut: Cut) -> tuple[list[float], list[float]]:
    """Bytes of each memory-bound kernel of a forward: outside of attention's core, and in it."""
    e, mask = cut.itemsize, 1 if shape.dropout else 0
    tokens = cut.microbatch * shape.time // cut.cp
    outside = tokens * shape.width / (cut.tp if cut.sequence_parallel else 1)
    inside = tokens * shape.inside / cut.tp * (shape.top_k if shape.experts else 1)
    around = [2 * e * outside] * 2  # norms: read, write
    around += [(3 * e + mask) * outside] * 2  # bias, dropout, addition: read two, write
    around += [(3 if shape.gated else 2) * e * inside]  # GELU, or SiLU times the other half
    if shape.positions == "rotary":
        around += [2 * e * tokens * (shape.width + shape.kv_width) / cut.tp]
    core = []
    if shape.attention == "unfused":
        square = cut.microbatch * shape.heads / cut.tp * shape.time**2 / cut.cp
        around += [2 * e * tokens * shape.width / cut.tp]  # heads beside each other again
        core += [1.5 * e * square]  # softmax with a causal mask: read one half, write
        if shape.dropout:
            core += [(2 * e + 1) * square]
    return around, core


def backward_memory(shape: ModelShape, cut: Cut) -> list[float]:
    """Bytes of each memory-bound kernel of a backward."""
    e, mask = cut.itemsize, 1 if shape.dropout else 0
    tokens = cut.microbatch * shape.time // cut.cp
    outside = tokens * shape.width / (cut.tp if cut.sequence_parallel else 1)
    inside = tokens * shape.inside / cut.tp * (shape.top_k if shape.experts else 1)
    nbytes = [5 * e * outside] * 2  # norms: g and x twice, for ∂x and for their own weights
    nbytes += [3 * e * outside] * 2  # the residual connection's two gradients are added
    if shape.dropout:
        nbytes += [(2 * e + mask) * outside] * 2
    nbytes += [(5 if shape.gated else 3) * e * inside]
    if shape.biases:
        columns = tokens * (shape.width + 2 * shape.kv_width) / cut.tp
        nbytes += [e * outside] * 2 + [e * inside, e * columns]
    if shape.positions == "rotary":
        nbytes += [2 * e * tokens * (shape.width + shape.kv_width) / cut.tp]
    if shape.attention == "unfused":
        square = cut.microbatch * shape.heads / cut.tp * shape.time**2 / cut.cp
        nbytes += [2 * e * tokens * shape.width / cut.tp * 2]
        nbytes += [2 * e * square]  # softmax: its output and its gradient, one half each; write
        if shape.dropout:
            nbytes += [(2 * e + 1) * square]
    return nbytes


def fused_attention(shape: ModelShape, cut: Cut) -> tuple[float, float]:
    """Operations of the causal half, and bytes."""
    tokens = cut.microbatch * shape.time / cut.cp
    flops = 2 * tokens * shape.time * shape.width / cut.tp
    return flops, 2 * cut.itemsize * tokens * (shape.width + shape.kv_width) / cut.tp


def context_seconds(
    shape: ModelShape, cluster: Cluster, cut: Cut, compute: float, tensors: int
) -> float:
    """Exposed seconds of ring attention, in which so many `tensors` travel, or of Ulysses."""
    if cut.cp == 1:
        return 0.0
    tokens = cut.microbatch * shape.time // cut.cp
    block = tensors * cut.itemsize * tokens * shape.kv_width / cut.tp
    if cut.context == "ulysses":
        whole = cut.itemsize * tokens * (2 * shape.width + tensors * shape.kv_width) / cut.tp
        return all_to_all_seconds(cluster, whole, cut.cp, cut.tp)
    step = send_seconds(cluster, block, cut.tp)
    return (cut.cp - 1) * max(0.0, step - compute / cut.cp)


@lru_cache(maxsize=1 << 14)
def layer_seconds(shape: ModelShape, cluster: Cluster, cut: Cut, software: Software) -> Pass:
    """Return forward and backward of one layer for one microbatch."""
    chip, e = cluster.chip, cut.itemsize
    linear = linear_products(shape, cut)
    around, core = forward_memory(shape, cut)
    after = backward_memory(shape, cut)
    tokens = cut.microbatch * shape.time // cut.cp

    forward = sum(product.seconds(cluster, e) for product in linear)
    weight_gradients = sum(p.weight_gradient.seconds(cluster, e) for p in linear)
    backward = weight_gradients + sum(p.input_gradient.seconds(cluster, e) for p in linear)
    flops = sum(p.flops for p in linear)
    kernels = 3 * len(linear) + len(around) + len(core) + len(after)

    if shape.attention == "fused":
        operations, nbytes = fused_attention(shape, cut)
        core_matmul, core_flops = attention_seconds(chip, operations, nbytes), 2 * operations
        core_back = attention_seconds(chip, 2.5 * operations, 2 * nbytes, backward=True)
        kernels += 2
    else:
        squares = attention_products(shape, cut)
        core_matmul = sum(p.seconds(cluster, e) for p in squares)
        core_back = sum(
            p.input_gradient.seconds(cluster, e) + p.weight_gradient.seconds(cluster, e)
            for p in squares
        )
        core_flops = sum(p.flops for p in squares)
        kernels += 6
    core_memory = sum(memory_seconds(chip, n) for n in core)
    around_memory = sum(memory_seconds(chip, n) for n in around)

    sums = tokens * shape.width * e
    # with sequence parallel, an all-gather and a reduce-scatter take the place of an all-reduce
    tp_sum = all_reduce_seconds(cluster, sums, cut.tp)
    tp_back = 2 * tp_sum
    if software.tp_overlap:
        tp_back = 2 * max(0.0, tp_sum - weight_gradients / 2)
        if cut.sequence_parallel:  # gathers in backward are not hidden
            tp_back = tp_sum + max(0.0, tp_sum - weight_gradients)
    ep = 0.0
    if shape.experts and cut.ep > 1:
        stride = cut.tp * cut.cp
        ep = 2 * all_to_all_seconds(cluster, sums * shape.top_k, cut.ep, stride)
    ring = context_seconds(shape, cluster, cut, core_matmul + core_memory, 2)
    ring_back = context_seconds(shape, cluster, cut, core_back, 4)

    first = Seconds(
        forward + core_matmul, around_memory + core_memory, 2 * tp_sum, ring, ep, flops + core_flops
    )
    second = Seconds(
        backward + core_back,
        sum(memory_seconds(chip, n) for n in after),
        tp_back,
        ring_back,
        ep,
        2 * (flops + core_flops),
    )
    if cut.recompute == "full":
        second = second.plus(first)
    elif cut.recompute == "selective":
        second = second.plus(Seconds(core_matmul, core_memory, 0.0, ring, 0.0, core_flops))
    return Pass(first, second, kernels)


@lru_cache(maxsize=1 << 14)
def embedding_seconds(shape: ModelShape, cluster: Cluster, cut: Cut, software: Software) -> Pass:
    """Forward and backward of the embedding."""
    chip, e = cluster.chip, cut.itemsize
    size = cut.microbatch * shape.time // cut.cp * shape.width * e
    forward = memory_seconds(chip, 2 * size) + memory_seconds(chip, 3 * size)
    backward = memory_seconds(chip, 2 * size) + memory_seconds(chip, 3 * size)
    tp = all_reduce_seconds(cluster, size, cut.tp)
    return Pass(Seconds(memory=forward, tp=tp), Seconds(memory=backward), 4)


@lru_cache(maxsize=1 << 14)
def head_seconds(shape: ModelShape, cluster: Cluster, cut: Cut, software: Software) -> Pass:
    """Forward and backward of the final norm, the output layer and the loss."""
    chip, e = cluster.chip, cut.itemsize
    tokens = cut.microbatch * shape.time // cut.cp
    logits = Product(tokens, -(-shape.vocabulary // cut.tp), shape.width)
    outside = tokens * shape.width / (cut.tp if cut.sequence_parallel else 1)
    loss = memory_seconds(chip, software.loss_bytes / 2 * logits.m * logits.n)
    sums = all_reduce_seconds(cluster, tokens * shape.width * e, cut.tp)
    scalars = 3 * all_reduce_seconds(cluster, 4 * tokens, cut.tp)
    first = Seconds(
        logits.seconds(cluster, e),
        loss + memory_seconds(chip, 2 * e * outside),
        scalars + (sums / 2 if cut.sequence_parallel else 0.0),
        flops=logits.flops,
    )
    second = Seconds(
        logits.input_gradient.seconds(cluster, e) + logits.weight_gradient.seconds(cluster, e),
        loss + memory_seconds(chip, 5 * e * outside),
        sums / 2 if cut.sequence_parallel else sums,
        flops=2 * logits.flops,
    )
    return Pass(first, second, 12)
