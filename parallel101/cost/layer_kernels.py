"""The kernels of one transformer layer, for one microbatch on one rank, as a table of operations.

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
from typing import Any

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
