"""Seconds of one layer, of the embedding and of the head, for one microbatch on one rank.

    forward     Σ kernels + 2 sums along tp
    backward    Σ kernels + 2 sums along tp, + what is computed again

With sequence parallel, an all-gather and a reduce-scatter take the place of each sum. The seconds
of a kernel are those of kernels.py. The kernels of a layer are a table of operations:

    forward     norm ─ query, key, value ─ scores ─ softmax ─ dropout ─ context ─ out ─ add
                norm ─ up ─ GELU ─ down ─ add
    backward    two products for each product: ∂x = g W and ∂W = gᵀ x

Sizes in numbers, of which each takes e bytes (2 in 16 bit):

    N    tokens · width outside of the products; sequence parallel leaves 1/tp of them
    Q, K tokens · features of queries, and of keys, on this tp rank
    F    tokens · features inside an MLP
    S    heads · queries · keys: the square of unfused attention

Megatron-LM fuses what is elementwise (`fused_memory`); eager torch has a kernel for each operation
(`eager_memory`). Sources: Megatron-LM, megatron/model/transformer.py and megatron/fused_kernels
(the causal softmax reads the half that counts, and writes the square); what torch runs for
models/gpt.py and models/llama.py on a virtual GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from math import hypot
from typing import Any, NamedTuple

from parallel101.cost.cluster import (
    Cluster,
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from parallel101.cost.kernels import attention_seconds, memory_seconds, product_seconds
from parallel101.cost.model_shape import (
    ModelShape,
    expert_parameters,
    linears,
    parameters_and_arrays,
)
from parallel101.cost.parallel_layout import ParallelLayout, check_cut
from parallel101.cost.software import TRAINERS, Software

SMALL = 1.0  # bytes of a kernel that takes as long as its launch

Products = list[tuple[int, int, int, int]]  # m, n, k, batch: `batch` products (m, k) · (k, n)
# whether a program has the operation, and the bytes that each of its memory-bound kernels reads and
# writes: forward, and backward
Row = tuple[bool, list[float], list[float]]


@dataclass(eq=False)
class RankWork:
    """What a rank computes of a model, and with what; and the sizes named in this file's docstring.

    Attributes:
        part, layers, first, last: its number of layers; whether it has the embedding, and the head.
        cluster: for seconds; bytes need none.
        parameters, arrays: how many it has.
        ranks: along dp, cp and ep, which sum gradients.
        ring: whether attention is ring attention.
        share: of queries · keys, that the slowest rank computes with ring attention's own kernels.
            Its queries are its own, its keys those of all ranks. In the contiguous layout, the last
            rank needs all blocks. In zigzag, each needs its own block, whose masked half is
            computed, too, and half of each other block.
        beside: over how many ranks tp cuts the embedding and the head.
        outside: tokens outside of the products.
        apart: whether the gradients of norms are sent separately.
    """

    shape: ModelShape
    layout: ParallelLayout
    part: tuple[int, bool, bool] = (1, True, True)
    cluster: Any = None
    software: Software = TRAINERS

    def __post_init__(self) -> None:
        shape, layout, part = self.shape, self.layout, self.part
        check_cut(shape, layout)
        self.layers, self.first, self.last = part
        tp, cp = layout.tp, layout.cp
        self.parameters, self.arrays = parameters_and_arrays(shape, tp, layout.ep, *part)
        self.ranks = layout.dp * cp * layout.ep
        self.e, self.ring = layout.itemsize, cp > 1 and layout.context != "ulysses"
        self.share = 1.0 if layout.context == "contiguous" else (cp + 1) / (2 * cp)
        self.beside = shape.tp_beside_attention(tp)
        self.tokens = tokens = layout.microbatch * shape.time // cp
        self.outside = tokens / tp if layout.sequence_parallel else float(tokens)
        self.apart = layout.sequence_parallel and tp > 1 and layout.zero_stage > 0
        self.N = self.outside * shape.width
        self.Q, self.K = tokens * shape.width / tp, tokens * shape.kv_width / tp
        self.F = tokens * shape.inside * (shape.top_k if shape.experts else 1) / self.beside
        self.S = layout.microbatch * shape.heads / tp * shape.time**2 / cp


def linear_products(of: RankWork) -> Products:
    """Return the products with weights.

    A program that fuses computes query, key and value as one product, and gate and up.
    """
    shape, joined, rows, batch, times = of.shape, of.software.fused, of.tokens, 1, 1
    if shape.experts:  # each of this rank's experts gets an equal part of the tokens
        experts = max(1, shape.experts // of.layout.ep)
        rows = max(1, of.tokens * shape.top_k * of.layout.ep // shape.experts)
        # eager torch computes one expert after the other
        batch, times = (experts, 1) if joined else (1, experts)
    found: Products = []
    for i, (k, outputs) in enumerate(linears(shape, of.layout.tp)):
        m, many, again = (of.tokens, 1, 1) if i < 2 else (rows, batch, times)
        found += [(m, n, k, many) for n in ([sum(outputs)] if joined else outputs)] * again
    return found


# ── what memory bandwidth bounds ──


def memory_kernels(of: RankWork) -> list[tuple[list[float], list[float]]]:
    """Return the bytes of each kernel forward, and of each backward: of those outside of
    attention's core, and of those in it, between query, key, value and the output layer.
    """
    return [
        (
            [nbytes for there, forward, _ in rows if there for nbytes in forward],
            [nbytes for there, _, backward in rows if there for nbytes in backward],
        )
        for rows in (fused_memory(of) if of.software.fused else eager_memory(of))
    ]


def fused_memory(of: RankWork) -> tuple[list[Row], list[Row]]:
    """Return the memory-bound kernels as Megatron-LM fuses them."""
    shape, e, N, Q, K, F, S = of.shape, of.e, of.N, of.Q, of.K, of.F, of.S
    unfused, dropout, gated = shape.attention == "unfused", shape.dropout, shape.gated
    mask = 1 if dropout else 0
    return [
        # norms; backward reads g and x twice, once for their own weights
        (True, [2 * e * N] * 2, [5 * e * N] * 2),
        # bias, dropout and addition; the two gradients that meet at a residual connection
        (True, [(3 * e + mask) * N] * 2, [3 * e * N] * 2),
        (dropout, [], [(2 * e + mask) * N] * 2),
        (True, [(3 if gated else 2) * e * F], [(5 if gated else 3) * e * F]),  # bias and GELU
        (shape.biases, [2 * e * (Q + 2 * K)], [e * N] * 2 + [e * F, e * (Q + 2 * K)]),
        (True, [], [2 * e * (Q + 2 * K)]),  # of query, key and value beside each other
        (shape.positions == "rotary", [2 * e * (Q + K)], [2 * e * (Q + K)]),
        (unfused, [2 * e * Q], [2 * e * Q]),  # heads beside each other again
    ], [
        # softmax reads one half, and writes all; its backward reads two halves
        (unfused, [1.5 * e * S], [2 * e * S]),
        (unfused and dropout, [(2 * e + 1) * S], [(2 * e + 1) * S]),
    ]


def eager_memory(of: RankWork) -> tuple[list[Row], list[Row]]:
    """Return one memory-bound kernel per torch operation of models/gpt.py or models/llama.py."""
    shape, layout, e, N, Q, K, F = of.shape, of.layout, of.e, of.N, of.Q, of.K, of.F
    tp, gated, cut = layout.tp, shape.gated, layout.sequence_parallel
    whole = float(of.tokens * shape.width)  # the input of column layers
    rows, experts = whole * shape.top_k, max(1, shape.experts // layout.ep)  # of this rank
    moved = [2 * e * rows] * 2 + [3 * e * rows] * 2
    copies = [2 * e * whole] * 4 + [2 * e * N] * 3
    # in fp32: cast, complex product, cast; and the angles
    turned = [each * x for x in (Q, K) for each in (e + 4, 8, e + 4)] + [SMALL] * 7
    # kernels that stand for the gradient of a column layer until it's computed
    waiting = [SMALL] * 2 * ((5 if gated else 4) + (3 if shape.biases else 0)) * (tp > 1)
    added = [2 * e * N] * 2 if shape.biases and tp > 1 else []  # after the sum; else by the product
    joined = [2 * e * expert_parameters(shape, layout.ep)]  # weight gradients of all experts
    angles = [8 * Q, 8 * K, 2 * e * Q, 2 * e * K]
    table: list[Row] = [
        (True, [2 * e * N] * 2 + [3 * e * N] * 2, [3 * e * N] * 4),  # norms and additions
        # the gradients of query, key and value's input are added
        (True, added, [3 * e * whole] * 2 + waiting),
        (gated, [2 * e * F, 3 * e * F], [3 * e * F] * 3 + [3 * e * whole]),
        (not gated, [2 * e * F], [3 * e * F]),
        (shape.biases, [], [e * N] * 2 + [e * F, e * Q, e * K]),
        # rows to their experts and back
        (shape.experts > 0, moved, moved + joined),
        # the router's, for the order of the rows, and each expert's GELU and biases
        (shape.experts > 0, [SMALL] * (18 + experts), [SMALL] * (20 + 3 * experts)),
        (cut, [2 * e * N] * 2, [2 * e * N] * 2),  # a rank's own block is copied to its place
        (cut and layout.microbatch > 1, copies, copies),  # time is dim 1: around each message
        (shape.dropout, [(2 * e + 1) * N] * 2, [(2 * e + 1) * N] * 2),
        (shape.positions == "rotary", turned, turned[:6] + angles),
    ]
    return table, eager_core(of)


def eager_core(of: RankWork) -> list[Row]:
    """Return the rows of attention's core: of ring attention, or of the square."""
    e, cp, Q, K, S = of.e, of.layout.cp, of.Q, of.K, of.S
    if of.ring and of.software.fused_ring:  # blocks are added up in fp32
        return [(True, [(e + 8) * Q] * (cp - 1), [(e + 8) * Q, 2 * (e + 8) * K] * (cp - 1))]
    if not of.ring:
        unfused, squares = of.shape.attention == "unfused", [2 * e * S] * 2
        return [  # mask and softmax; copies that are contiguous
            (unfused, [2 * e * Q] * 5 + squares, [2 * e * Q] * 5 + [3 * e * S, 2 * e * S]),
            (unfused and of.shape.dropout, [(2 * e + 1) * S], [(2 * e + 1) * S]),
        ]
    blocks, part, mask = S * of.share, Q * of.share, 8 * S / cp  # fp32; the mask of the own block
    added = [8 * K, 2 * (e + 4) * K] + [8 * part] * 2 + [12 * part]
    added += [8 * K] * 2 + [16 * K] * 2 + [24 * K]
    return [
        # logsumexp, subtract, exp, a copy
        (True, [4 * blocks] + [8 * blocks] * 3 + [mask], [8 * blocks] * 4 + [12 * blocks, mask]),
        # to fp32 and back, scaled
        (True, [4 * Q, (e + 4) * Q, 8 * Q, (e + 4) * Q, 4 * e * K], [(e + 4) * Q] * 4),
        (True, [], [8 * Q] * 3 + [12 * Q, 2 * (e + 4) * K, 4 * e * K]),  # ∂O · O
        # a block is added to the others, and its gradients, too
        (True, ([2 * (e + 4) * K] + [8 * part] * 4 + [SMALL] * 7) * cp, added * cp),
    ]


# ── seconds ──


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
        # ones let the CPU get ahead. √(GPU² + CPU²) is between the maximum and the sum. A pass's
        # messages along tp are launched, too: two sums, or twice as many gathers and scatters.
        messages = 2 * (1 + layout.sequence_parallel) * (layout.tp > 1)
        launched = (launches + messages + len(memory) + len(in_core)) * software.host
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
