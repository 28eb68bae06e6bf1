"""Seconds of one layer, of the embedding and of the head, for one microbatch on one rank.

    forward     Σ kernels + 2 sums along tp
    backward    Σ kernels + 2 sums along tp, + what is computed again

The kernels are those of layer_kernels.py, their seconds those of kernels.py. With sequence
parallel, an all-gather and a reduce-scatter take the place of each sum.
"""

from __future__ import annotations

from functools import lru_cache
from math import hypot
from typing import NamedTuple

from parallel101.cost.cluster import (
    Cluster,
    added_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from parallel101.cost.kernels import attention_seconds, memory_seconds, product_seconds
from parallel101.cost.layer_kernels import (
    LayerCut,
    Product,
    eager_memory,
    flash_attention,
    fused_memory,
    linear_products,
    ring_share,
    sizes,
    square_products,
)
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.software import Software


class Seconds(NamedTuple):
    """Seconds of kernels and of messages that nothing hides."""

    matmul: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(*(a + times * b for a, b in zip(self, other)))


class Pass(NamedTuple):
    """Forward and backward of one microbatch, with what backward computes again."""

    forward: Seconds
    backward: Seconds

    @property
    def both(self) -> Seconds:
        return self.forward.plus(self.backward)

    @property
    def seconds(self) -> float:
        return self.forward.total + self.backward.total


def waiting_for_host(gpu: float, kernels: int, software: Software) -> float:
    """Return the seconds in which the GPU waits for the CPU to launch its kernels.

    If each kernel took as long as the others, the slower of the two would decide. They don't: short
    ones make the GPU wait even where long ones let the CPU get ahead. √(GPU² + CPU²) is between the
    maximum and the sum.
    """
    return hypot(gpu, kernels * software.host) - gpu


def beside(messages: float, kernels: float, software: Software) -> float:
    """Return the exposed seconds of messages that are in flight while kernels run.

    Hidden messages slow the kernels down; see Software.contention.
    """
    return max(0.0, messages - kernels) + software.contention * min(messages, kernels)


def products_seconds(cluster: Cluster, products: list[Product], itemsize: int) -> float:
    return sum(
        product_seconds(cluster.chip, p.m, p.n, p.k, batch=p.batch, itemsize=itemsize)
        for p in products
    )


def context_seconds(
    shape: ModelShape, cluster: Cluster, cut: LayerCut, compute: float, tensors: int
) -> float:
    """Return the exposed seconds of Ulysses, or of ring attention that sends `tensors` tensors."""
    if cut.cp == 1:
        return 0.0
    of = sizes(shape, cut)
    if cut.context == "ulysses":
        nbytes = of.e * (2 * of.Q + tensors * of.K)
        return all_to_all_seconds(cluster, nbytes, cut.cp, cut.tp)
    step = send_seconds(cluster, tensors * of.e * of.K, cut.tp, ranks=cut.cp)
    return (cut.cp - 1) * max(0.0, step - compute / cut.cp)


@lru_cache(maxsize=1 << 14)
def layer_seconds(shape: ModelShape, cluster: Cluster, cut: LayerCut, software: Software) -> Pass:
    """Return the seconds of one layer's forward and backward for one microbatch."""
    chip, e, launch = cluster.chip, cut.itemsize, cluster.kernels.launch
    memory = (
        fused_memory(shape, cut)
        if software.fused
        else eager_memory(shape, cut, software.fused_ring)
    )
    linear = linear_products(shape, cut, joined=software.fused)
    forward = products_seconds(cluster, linear, e)
    weight_gradients = products_seconds(cluster, [p.weight_gradient for p in linear], e)
    backward = weight_gradients + products_seconds(cluster, [p.input_gradient for p in linear], e)
    backward += software.again * forward

    ring = cut.cp > 1 and cut.context != "ulysses"
    if shape.attention == "fused" and not (ring and not software.fused_ring):
        flops, nbytes = flash_attention(shape, cut)
        flops /= software.attention
        core = attention_seconds(chip, flops, nbytes, itemsize=e)
        core_after = attention_seconds(chip, 2.5 * flops, 2 * nbytes, backward=True, itemsize=e)
        if ring:  # a kernel for each block
            core, core_after = (x + (cut.cp - 1) * launch for x in (core, core_after))
    else:
        squares = square_products(shape, cut)
        gradients = [p.input_gradient for p in squares] + [p.weight_gradient for p in squares]
        gradients += squares[:1] if ring else []  # the scores again
        part = ring_share(cut) if ring else 1.0
        core = part * products_seconds(cluster, squares, 4 if ring else e)
        core_after = part * products_seconds(cluster, gradients, 4 if ring else e)
    around, in_core, after, in_core_after = (
        sum(memory_seconds(chip, nbytes) for nbytes in kernels) for kernels in memory
    )

    of = sizes(shape, cut)
    activations = of.tokens * shape.width * e
    tp = all_reduce_seconds(cluster, activations, cut.tp, algorithm=software.collectives)
    if shape.experts:  # they aren't cut: one sum instead of two
        tp /= 2
    tp_back = backward_messages(tp, weight_gradients, cut, software)
    if software.collectives == "direct":
        add = added_seconds(cluster, activations, cut.tp)
        tp += add  # of the last block; the others' come meanwhile
        tp_back += 2 * add * (cut.tp - 1 if cut.overlap else 1)
    ep = 0.0
    if shape.experts and cut.ep > 1:
        sent = activations * shape.top_k
        ep = 2 * all_to_all_seconds(cluster, sent, cut.ep, cut.tp * cut.cp)
    cp = context_seconds(shape, cluster, cut, core + in_core, 2)
    cp_back = context_seconds(shape, cluster, cut, core_after + in_core_after, 4)

    kernels = len(linear) + len(memory.around) + len(memory.core) + 2
    kernels_back = 2 * len(linear) + len(memory.after) + len(memory.core_after) + 4
    busy, products = around + in_core, forward + core
    host = waiting_for_host(products + busy, kernels, software)
    first = Seconds(products, busy, host, 2 * tp, cp, ep)
    busy, products = after + in_core_after, backward + core_after
    host = waiting_for_host(products + busy, kernels_back, software)
    second = Seconds(products, busy, host, tp_back, cp_back, ep)
    if cut.recompute == "full":
        second = second.plus(first)
        if not software.fused and not shape.dropout:  # torch stops before the last product
            down = products_seconds(cluster, linear[-1:], e)
            second = second.plus(Seconds(down, memory_seconds(chip, 3 * e * of.N), tp=tp), -1)
    elif cut.recompute == "selective":
        second = second.plus(Seconds(core, in_core, cp=cp))
    return Pass(first, second)


def backward_messages(
    tp: float, weight_gradients: float, cut: LayerCut, software: Software
) -> float:
    """Return the exposed seconds of a layer's messages along tp in backward.

    These are two sums of `tp` seconds. Sequence parallel replaces each by an all-gather and a
    reduce-scatter, which take half as long. Only the messages of column layers can overlap: row
    layers need theirs first.
    """
    if cut.tp == 1:
        return 0.0
    how = software.tp_overlap
    if how == "none" or (how == "halves" and not cut.overlap):
        return 2 * tp
    # reduce-scatters; in "column" also gathering again, or the second halves of the sums
    hidden = tp if how == "halves" else 2 * tp
    exposed = tp if how == "halves" or cut.sequence_parallel else 0.0
    return exposed + beside(hidden, weight_gradients, software)


@lru_cache(maxsize=1 << 14)
def embedding_seconds(
    shape: ModelShape, cluster: Cluster, cut: LayerCut, software: Software
) -> Pass:
    """Return the seconds of the embedding's forward and backward."""
    cut = cut._replace(tp=shape.tp_beside_attention(cut.tp))
    chip, e = cluster.chip, cut.itemsize
    of = sizes(shape, cut)
    size = of.tokens * shape.width * e
    kernels = [2 * size, 3 * size] if shape.positions == "learned" else [2 * size]
    kernels += [2 * size] if cut.tp > 1 else []  # other ranks' tokens become zeros
    seconds = sum(memory_seconds(chip, nbytes) for nbytes in kernels)
    # the gradient of the table is as large as the table
    table = shape.vocabulary * shape.width / cut.tp * e
    tp = all_reduce_seconds(cluster, size, cut.tp, algorithm=software.collectives)
    if cut.sequence_parallel:  # a reduce-scatter
        tp /= 2
    return Pass(
        Seconds(memory=seconds, tp=tp),
        Seconds(
            memory=seconds + memory_seconds(chip, table),
            tp=tp if cut.sequence_parallel else 0.0,
        ),
    )


def padded_vocabulary(shape: ModelShape, tp: int, software: Software) -> int:
    """Return the number of words in the output layer on each tp rank, with padding."""
    mine = -(-shape.vocabulary // tp)
    return -(-mine // software.padding) * software.padding


@lru_cache(maxsize=1 << 14)
def head_seconds(shape: ModelShape, cluster: Cluster, cut: LayerCut, software: Software) -> Pass:
    """Return the seconds of forward and backward of the final norm, output layer and loss."""
    cut = cut._replace(tp=shape.tp_beside_attention(cut.tp))
    chip, e = cluster.chip, cut.itemsize
    of = sizes(shape, cut)
    logits = Product(of.tokens, padded_vocabulary(shape, cut.tp, software), shape.width)
    loss = memory_seconds(chip, software.loss_bytes / 2 * logits.m * logits.n)
    size = of.tokens * shape.width * e
    tp = all_reduce_seconds(cluster, size, cut.tp, algorithm=software.collectives)
    numbers = 3 * all_reduce_seconds(cluster, 4 * of.tokens, cut.tp)
    weight_gradient = products_seconds(cluster, [logits.weight_gradient], e)
    # with sequence parallel an all-gather before, and its reduce-scatter after; else a sum after
    before, after = (tp / 2, tp / 2) if cut.sequence_parallel else (0.0, tp)
    if software.tp_overlap != "none" and cut.overlap:
        after = beside(after, weight_gradient, software)
    return Pass(
        Seconds(
            products_seconds(cluster, [logits], e),
            loss + memory_seconds(chip, 2 * e * of.N),
            tp=before + numbers,
        ),
        Seconds(
            weight_gradient + products_seconds(cluster, [logits.input_gradient], e),
            loss + memory_seconds(chip, 5 * e * of.N),
            tp=after,
        ),
    )
