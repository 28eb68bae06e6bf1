"""Seconds of one layer, of the embedding and of the head, for one microbatch on one rank.

    forward     Σ kernels + 2 sums along tp
    backward    Σ kernels + 2 sums along tp, + what is computed again

The kernels are those of layer_kernels.py, their seconds those of kernels.py. With sequence
parallel, an all-gather and a reduce-scatter take the place of each sum.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import hypot
from typing import NamedTuple

from parallel101.cost.cluster import (
    Cluster,
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from parallel101.cost.kernels import attention_seconds, memory_seconds, product_seconds
from parallel101.cost.layer_kernels import Products, RankWork, linear_products, memory_kernels
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import Software


class Seconds(NamedTuple):
    """Seconds of kernels and of messages that nothing hides."""

    matmul: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(*(a + times * b for a, b in zip(self, other)))


Passes = tuple[Seconds, Seconds]  # forward, and backward with what it computes again


def beside(messages: float, kernels: float, software: Software) -> float:
    """Return the exposed seconds of messages that are in flight while kernels run.

    Hidden messages slow the kernels down; see Software.contention.
    """
    return max(0.0, messages - kernels) + software.contention * min(messages, kernels)


@lru_cache(maxsize=1 << 14)
def seconds_of_parts(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, software: Software
) -> tuple[Passes, Passes, Passes]:
    """Return the seconds of one layer, of the embedding and of the head, for one microbatch."""
    of = RankWork(shape, layout, cluster=cluster, software=software)
    return layer_seconds(of), embedding_seconds(of), head_seconds(of)


def products_seconds(
    of: RankWork, products: Products, order: str = "mnk", itemsize: int = 0
) -> float:
    """Return the seconds of products (m, k) · (k, n), or of the gradients that belong to them.

    Args:
        order: which of their sizes are a product's m, n and k: "mkn" for the gradients of the
            inputs, ∂x (m, k) = g (m, n) · Wᵀ (n, k), and "knm" for those of the weights,
            ∂W (k, n) = xᵀ (k, m) · g (m, n).
        itemsize: bytes of a number; 0: those of the layout.
    """
    places, itemsize = ["mnk".index(size) for size in order], itemsize or of.e
    return sum(
        product_seconds(
            of.cluster.chip, *(sizes[i] for i in places), batch=batch, itemsize=itemsize
        )
        for *sizes, batch in products
    )


def bound_by_memory(of: RankWork, kernels: list[float]) -> float:
    return sum(memory_seconds(of.cluster.chip, nbytes) for nbytes in kernels)


def core_seconds(of: RankWork) -> tuple[float, float]:
    """Return the seconds of the products of attention's core, forward and backward.

    The operations of fused attention are those of the causal half, its bytes those of queries,
    keys, values and the result, on the slowest rank along cp.
    """
    shape, layout, chip, cp, e = of.shape, of.layout, of.cluster.chip, of.layout.cp, of.e
    if shape.attention == "fused" and (of.software.fused_ring or not of.ring):
        half = (2 * cp - 1) / cp if of.ring and layout.context == "contiguous" else 1.0
        flops = half * 2 * of.Q * shape.time / of.software.attention
        nbytes = 2 * e * (of.Q + of.K) * (cp if of.ring else 1)
        more = (cp - 1) * of.cluster.kernels.launch if of.ring else 0.0  # a kernel for each block
        after = attention_seconds(chip, 2.5 * flops, 2 * nbytes, backward=True, itemsize=e)
        return attention_seconds(chip, flops, nbytes, itemsize=e) + more, after + more
    # scores and context, over the whole square
    heads, queries = layout.microbatch * shape.heads // layout.tp, shape.time // cp
    squares = [(queries, shape.time, d := shape.head_width, heads), (queries, d, shape.time, heads)]
    part, e = (of.share, 4) if of.ring else (1.0, e)
    seconds = partial(products_seconds, of, itemsize=e)
    gradients = seconds(squares, "mkn") + seconds(squares, "knm")
    gradients += seconds(squares[:1]) if of.ring else 0.0  # the scores again
    return part * seconds(squares), part * gradients


def context_seconds(of: RankWork, compute: float, tensors: int) -> float:
    """Return the exposed seconds of Ulysses, or of ring attention that sends `tensors` tensors."""
    cp, tp = of.layout.cp, of.layout.tp
    if of.ring:
        step = send_seconds(of.cluster, tensors * of.e * of.K, tp, ranks=cp)
        return (cp - 1) * max(0.0, step - compute / cp)
    # queries, keys, values and result, or their gradients; of one rank none
    how = of.software.collectives
    exchange = partial(all_to_all_seconds, of.cluster, ranks=cp, stride=tp, algorithm=how)
    return 2 * exchange(of.e * of.Q) + 2 * exchange(of.e * of.K)


def layer_seconds(of: RankWork) -> Passes:
    """Return the seconds of one layer's forward and backward for one microbatch."""
    shape, cluster, layout, software = of.shape, of.cluster, of.layout, of.software
    (around, after), (in_core, in_core_after) = memory_kernels(of)
    linear = linear_products(of)
    forward, gradients = products_seconds(of, linear), products_seconds(of, linear, "knm")
    backward = gradients + products_seconds(of, linear, "mkn") + software.again * forward
    core, core_after = core_seconds(of)

    how, activations = software.collectives, of.tokens * shape.width * of.e
    tp = all_reduce_seconds(cluster, activations, layout.tp, algorithm=how)
    if shape.experts:  # they aren't cut: one sum instead of two
        tp /= 2
    tp_back = backward_messages(tp, gradients, layout, software)
    if how == "direct" and layout.tp > 1:
        # our own reduce-scatter adds each block in a kernel: the last one, after it has come
        add = memory_seconds(cluster.chip, 3 * activations / layout.tp)
        tp += add
        tp_back += 2 * add * (layout.tp - 1 if layout.overlap else 1)
    stride = layout.tp * layout.cp
    exchange = partial(all_to_all_seconds, cluster, ranks=layout.ep, stride=stride, algorithm=how)
    ep = 2 * exchange(activations * shape.top_k if shape.experts else 0.0)
    counts = exchange(8.0 * shape.experts)  # how many rows each rank sends, before it sends them

    def one_pass(
        linears: float, core: float, memory: list[float], in_core: list[float],
        launches: int, tp: float, tensors: int, ep: float,
    ) -> Passes:  # fmt: skip
        """Return the seconds of a pass, and those of its core."""
        of_core = bound_by_memory(of, in_core)
        cp = context_seconds(of, core + of_core, tensors)
        products, busy = linears + core, bound_by_memory(of, memory) + of_core
        # The GPU waits for the CPU to launch its kernels. If each took as long as the others, the
        # slower of the two would decide. They don't: short ones make the GPU wait even where long
        # ones let the CPU get ahead. √(GPU² + CPU²) is between the maximum and the sum.
        launched = (launches + len(memory) + len(in_core)) * software.host
        host = hypot(products + busy, launched) - (products + busy)
        return Seconds(products, busy, host, tp, cp, ep), Seconds(core, of_core, cp=cp)

    n = len(linear)
    first, again = one_pass(forward, core, around, in_core, n + 2, 2 * tp, 2, ep + counts)
    second, _ = one_pass(backward, core_after, after, in_core_after, 2 * n + 4, tp_back, 4, ep)
    if layout.recompute == "full":
        second = second.plus(first)
        if not software.fused and not shape.dropout:  # torch stops before the last product
            added = bound_by_memory(of, [3 * of.e * of.N])
            second = second.plus(Seconds(products_seconds(of, linear[-1:]), added, tp=tp), -1)
    elif layout.recompute == "selective":
        second = second.plus(again)
    return first, second


def backward_messages(
    tp: float, weight_gradients: float, layout: ParallelLayout, software: Software
) -> float:
    """Return the exposed seconds of a layer's messages along tp in backward.

    These are two sums of `tp` seconds. Sequence parallel replaces each by an all-gather and a
    reduce-scatter, which take half as long. Only the messages of column layers can overlap: row
    layers need theirs first.
    """
    how = software.tp_overlap
    if how == "none" or (how == "halves" and not layout.overlap):
        return 2 * tp
    # reduce-scatters; in "column" also gathering again, or the second halves of the sums
    hidden = tp if how == "halves" else 2 * tp
    exposed = tp if how == "halves" or layout.sequence_parallel else 0.0
    return exposed + beside(hidden, weight_gradients, software)


def embedding_seconds(of: RankWork) -> Passes:
    """Return the seconds of the embedding's forward and backward."""
    size, cut = of.tokens * of.shape.width * of.e, of.layout.sequence_parallel
    kernels = [2.0 * size] + [3.0 * size] * (of.shape.positions == "learned")
    kernels += [2.0 * size] * (of.beside > 1)  # other ranks' tokens become zeros
    # the gradient of the table is as large as the table
    table = [of.shape.vocabulary * of.shape.width / of.beside * of.e]
    tp = all_reduce_seconds(of.cluster, size, of.beside, algorithm=of.software.collectives)
    # with sequence parallel a reduce-scatter, and an all-gather in backward
    forward = Seconds(memory=bound_by_memory(of, kernels), tp=tp / 2 if cut else tp)
    backward = bound_by_memory(of, kernels + table)
    return forward, Seconds(memory=backward, tp=tp / 2 if cut else 0.0)


def head_seconds(of: RankWork) -> Passes:
    """Return the seconds of forward and backward of the final norm, output layer and loss."""
    shape, layout, software, n = of.shape, of.layout, of.software, of.beside
    words = -(-shape.vocabulary // n)  # on each rank along tp
    words = -(-words // software.padding) * software.padding
    logits: Products = [(of.tokens, words, shape.width, 1)]
    size = of.tokens * shape.width * of.e
    outside = size / (n if layout.sequence_parallel else 1)
    loss = software.loss_bytes / 2 * of.tokens * words
    tp = all_reduce_seconds(of.cluster, size, n, algorithm=software.collectives)
    numbers = 3 * all_reduce_seconds(of.cluster, 4 * of.tokens, n)
    gradient = products_seconds(of, logits, "knm")
    # with sequence parallel an all-gather before, and its reduce-scatter after; else a sum after
    before, after = (tp / 2, tp / 2) if layout.sequence_parallel else (0.0, tp)
    if software.tp_overlap != "none" and layout.overlap:
        after = beside(after, gradient, software)
    backward = gradient + products_seconds(of, logits, "mkn")
    norm, norm_back = (bound_by_memory(of, [loss, k * outside]) for k in (2.0, 5.0))
    return (
        Seconds(products_seconds(of, logits), norm, tp=before + numbers),
        Seconds(backward, norm_back, tp=after),
    )
