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
    added_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from parallel101.cost.kernels import attention_seconds, memory_seconds, product_seconds
from parallel101.cost.layer_kernels import (
    Products,
    RankWork,
    flash_attention,
    input_gradients,
    linear_products,
    memory_kernels,
    ring_share,
    square_products,
    weight_gradients,
)
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


@lru_cache(maxsize=1 << 14)
def seconds_of_parts(
    shape: ModelShape, cluster: Cluster, layout: ParallelLayout, software: Software
) -> tuple[Pass, Pass, Pass]:
    """Return the seconds of one layer, of the embedding and of the head, for one microbatch."""
    of = RankWork(shape, cluster, layout, software)
    return layer_seconds(of), embedding_seconds(of), head_seconds(of)


def products_seconds(of: RankWork, products: Products, itemsize: int | None = None) -> float:
    chip, e = of.cluster.chip, of.e if itemsize is None else itemsize
    return sum(product_seconds(chip, m, n, k, batch=b, itemsize=e) for m, n, k, b in products)


def bound_by_memory(of: RankWork, kernels: list[float]) -> float:
    return sum(memory_seconds(of.cluster.chip, nbytes) for nbytes in kernels)


def core_seconds(of: RankWork) -> tuple[float, float]:
    """Return the seconds of the products of attention's core, forward and backward."""
    chip, cp, e = of.cluster.chip, of.layout.cp, of.e
    if of.shape.attention == "fused" and (of.software.fused_ring or not of.ring):
        flops, nbytes = flash_attention(of)
        flops /= of.software.attention
        more = (cp - 1) * of.cluster.kernels.launch if of.ring else 0.0  # a kernel for each block
        after = attention_seconds(chip, 2.5 * flops, 2 * nbytes, backward=True, itemsize=e)
        return attention_seconds(chip, flops, nbytes, itemsize=e) + more, after + more
    squares = square_products(of)
    gradients = input_gradients(squares) + weight_gradients(squares)
    gradients += squares[:1] if of.ring else []  # the scores again
    part, e = (ring_share(of.layout), 4) if of.ring else (1.0, e)
    return part * products_seconds(of, squares, e), part * products_seconds(of, gradients, e)


def context_seconds(of: RankWork, compute: float, tensors: int) -> float:
    """Return the exposed seconds of Ulysses, or of ring attention that sends `tensors` tensors."""
    cp, tp = of.layout.cp, of.layout.tp
    if not of.ring:  # queries, keys, values and result, or their gradients; of one rank none
        how = of.software.collectives
        exchange = partial(all_to_all_seconds, of.cluster, ranks=cp, stride=tp, algorithm=how)
        return 2 * exchange(of.e * of.Q) + 2 * exchange(of.e * of.K)
    step = send_seconds(of.cluster, tensors * of.e * of.K, tp, ranks=cp)
    return (cp - 1) * max(0.0, step - compute / cp)


def layer_seconds(of: RankWork) -> Pass:
    """Return the seconds of one layer's forward and backward for one microbatch."""
    shape, cluster, layout, software = of.shape, of.cluster, of.layout, of.software
    (around, after), (in_core, in_core_after) = memory_kernels(of)
    linear = linear_products(of)
    forward, gradients = (products_seconds(of, x) for x in (linear, weight_gradients(linear)))
    backward = gradients + products_seconds(of, input_gradients(linear)) + software.again * forward
    core, core_after = core_seconds(of)

    activations = of.tokens * shape.width * of.e
    tp = all_reduce_seconds(cluster, activations, layout.tp, algorithm=software.collectives)
    if shape.experts:  # they aren't cut: one sum instead of two
        tp /= 2
    tp_back = backward_messages(tp, gradients, layout, software)
    if software.collectives == "direct":
        add = added_seconds(cluster, activations, layout.tp)
        tp += add  # of the last block; the others' come meanwhile
        tp_back += 2 * add * (layout.tp - 1 if layout.overlap else 1)
    exchange = partial(
        all_to_all_seconds,
        cluster,
        ranks=layout.ep,
        stride=layout.tp * layout.cp,
        algorithm=software.collectives,
    )
    ep = 2 * exchange(activations * shape.top_k if shape.experts else 0.0)
    counts = exchange(8.0 * shape.experts)  # how many rows each rank sends, before it sends them

    def one_pass(
        linears: float, core: float, memory: list[float], in_core: list[float],
        launches: int, tp: float, tensors: int, ep: float,
    ) -> tuple[Seconds, Seconds]:  # fmt: skip
        """Return the seconds of a pass, and those of its core."""
        of_core = bound_by_memory(of, in_core)
        cp = context_seconds(of, core + of_core, tensors)
        products, busy = linears + core, bound_by_memory(of, memory) + of_core
        kernels = launches + len(memory) + len(in_core)
        host = waiting_for_host(products + busy, kernels, software)
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
    return Pass(first, second)


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


def embedding_seconds(of: RankWork) -> Pass:
    """Return the seconds of the embedding's forward and backward."""
    shape, layout = of.shape, of.layout
    size = of.tokens * shape.width * of.e
    kernels = [2.0 * size] + [3.0 * size] * (shape.positions == "learned")
    kernels += [2.0 * size] * (of.beside > 1)  # other ranks' tokens become zeros
    # the gradient of the table is as large as the table
    table = [shape.vocabulary * shape.width / of.beside * of.e]
    tp = all_reduce_seconds(of.cluster, size, of.beside, algorithm=of.software.collectives)
    # with sequence parallel a reduce-scatter, and an all-gather in backward
    messages, back = (tp / 2, tp / 2) if layout.sequence_parallel else (tp, 0.0)
    return Pass(
        Seconds(memory=bound_by_memory(of, kernels), tp=messages),
        Seconds(memory=bound_by_memory(of, kernels + table), tp=back),
    )


def head_seconds(of: RankWork) -> Pass:
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
    gradient = products_seconds(of, weight_gradients(logits))
    # with sequence parallel an all-gather before, and its reduce-scatter after; else a sum after
    before, after = (tp / 2, tp / 2) if layout.sequence_parallel else (0.0, tp)
    if software.tp_overlap != "none" and layout.overlap:
        after = beside(after, gradient, software)
    backward = gradient + products_seconds(of, input_gradients(logits))
    norm, norm_back = (bound_by_memory(of, [loss, k * outside]) for k in (2.0, 5.0))
    return Pass(
        Seconds(products_seconds(of, logits), norm, tp=before + numbers),
        Seconds(backward, norm_back, tp=after),
    )
