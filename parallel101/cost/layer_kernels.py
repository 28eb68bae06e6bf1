"""The kernels of one transformer layer, for one microbatch on one rank.

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

from typing import NamedTuple

from parallel101.cost.model_shape import ModelShape, expert_parameters

SMALL = 1.0  # bytes of a kernel that takes as long as its launch


class LayerCut(NamedTuple):
    """The part of a ParallelLayout that a layer's time depends on."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    microbatch: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    itemsize: int = 2
    context: str = "zigzag"
    overlap: bool = True


class Product(NamedTuple):
    """A batch of `batch` products (m, k) · (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def input_gradient(self) -> Product:
        """The product of the input's gradient: ∂x (m, k) = g (m, n) · Wᵀ (n, k)."""
        return Product(self.m, self.k, self.n, self.batch)

    @property
    def weight_gradient(self) -> Product:
        """The product of the weight's gradient: ∂W (k, n) = xᵀ (k, m) · g (m, n)."""
        return Product(self.k, self.n, self.m, self.batch)


class MemoryKernels(NamedTuple):
    """Bytes that each memory-bound kernel reads and writes."""

    around: list[float]  # forward, outside of attention's core
    core: list[float]  # forward, between query, key, value and the output layer
    after: list[float]  # backward, outside of the core
    core_after: list[float]  # backward, in the core


class Sizes(NamedTuple):
    """The sizes named in this file's docstring, and the number of tokens."""

    N: float
    Q: float
    K: float
    F: float
    S: float
    e: int
    tokens: int


def sizes(shape: ModelShape, cut: LayerCut) -> Sizes:
    tokens = cut.microbatch * shape.time // cut.cp
    return Sizes(
        N=tokens * shape.width / (cut.tp if cut.sequence_parallel else 1),
        Q=tokens * shape.width / cut.tp,
        K=tokens * shape.kv_width / cut.tp,
        F=tokens * shape.inside * shape.top_k if shape.experts else tokens * shape.inside / cut.tp,
        S=cut.microbatch * shape.heads / cut.tp * shape.time**2 / cut.cp,
        e=cut.itemsize,
        tokens=tokens,
    )


def linear_products(shape: ModelShape, cut: LayerCut, *, joined: bool) -> list[Product]:
    """Return the products with weights.

    If `joined`, query, key and value are one product, and so are gate and up.
    """
    tokens, h = cut.microbatch * shape.time // cut.cp, shape.width
    q, kv = h // cut.tp, shape.kv_width // cut.tp
    inside = shape.inside // shape.tp_beside_attention(cut.tp)
    rows, experts = tokens, 1
    if shape.experts:  # each of this rank's experts gets an equal part of the tokens
        experts = max(1, shape.experts // cut.ep)
        rows = max(1, tokens * shape.top_k * cut.ep // shape.experts)
    columns = [q + 2 * kv] if joined else [q, kv, kv]
    first = 2 if shape.gated else 1
    up = [first * inside] if joined else [inside] * first
    # eager torch computes one expert after the other
    batch, times = (experts, 1) if joined else (1, experts)
    return [
        *(Product(tokens, n, h) for n in columns),
        Product(tokens, h, q),
        *(Product(rows, n, h, batch) for n in up * times),
        *[Product(rows, h, inside, batch)] * times,
    ]


def square_products(shape: ModelShape, cut: LayerCut) -> list[Product]:
    """Return the products of unfused attention, scores and context, over the whole square."""
    heads = cut.microbatch * shape.heads // cut.tp
    q, d = shape.time // cut.cp, shape.head_width
    return [Product(q, shape.time, d, heads), Product(q, d, shape.time, heads)]


def ring_share(cut: LayerCut) -> float:
    """Return the fraction of queries · keys that ring attention's slowest rank computes.

    The queries are the rank's own, the keys those of all ranks. In the contiguous layout, the last
    rank needs all blocks. In zigzag, each rank needs its own block, whose masked half is computed,
    too, and half of each other block.
    """
    return 1.0 if cut.context == "contiguous" else (cut.cp + 1) / (2 * cut.cp)


def flash_attention(shape: ModelShape, cut: LayerCut) -> tuple[float, float]:
    """Return the operations and the bytes of fused attention, on the slowest rank along cp.

    The operations are those of the causal half; the bytes those of queries, keys, values and the
    result.
    """
    of = sizes(shape, cut)
    ring = cut.cp > 1 and cut.context != "ulysses"
    half = (2 * cut.cp - 1) / cut.cp if ring and cut.context == "contiguous" else 1.0
    nbytes = 2 * of.e * (of.Q + of.K) * (cut.cp if ring else 1)
    return half * 2 * of.tokens * shape.time * shape.width / cut.tp, nbytes


def fused_memory(shape: ModelShape, cut: LayerCut) -> MemoryKernels:
    """Return the memory-bound kernels as Megatron-LM fuses them."""
    N, Q, K, F, S, e, _ = sizes(shape, cut)
    mask = 1 if shape.dropout else 0
    around = [2 * e * N] * 2  # norms
    around += [(3 * e + mask) * N] * 2  # bias, dropout and addition
    around += [(3 if shape.gated else 2) * e * F]  # bias and GELU
    after = [5 * e * N] * 2  # norms: g and x twice, once for their own weights
    after += [3 * e * N] * 2  # the two gradients that meet at a residual connection
    after += [(2 * e + mask) * N] * 2 if shape.dropout else []
    after += [(5 if shape.gated else 3) * e * F]
    if shape.biases:
        around += [2 * e * (Q + 2 * K)]
        after += [e * N] * 2 + [e * F, e * (Q + 2 * K)]
    after += [2 * e * (Q + 2 * K)]  # gradients of query, key and value beside each other
    if shape.positions == "rotary":
        around += [2 * e * (Q + K)]
        after += [2 * e * (Q + K)]
    core: list[float] = []
    core_after: list[float] = []
    if shape.attention == "unfused":
        around += [2 * e * Q]  # heads beside each other again
        after += [2 * e * Q]
        core += [1.5 * e * S]  # softmax: reads one half, writes all
        core_after += [2 * e * S]  # reads one half of its result and of the gradient, writes all
        if shape.dropout:
            core += [(2 * e + 1) * S]
            core_after += [(2 * e + 1) * S]
    return MemoryKernels(around, core, after, core_after)


def eager_memory(shape: ModelShape, cut: LayerCut, fused_ring: bool = False) -> MemoryKernels:
    """Return one memory-bound kernel per torch operation of models/gpt.py or models/llama.py."""
    N, Q, K, F, S, e, tokens = sizes(shape, cut)
    whole = tokens * shape.width  # the input of column layers
    around = [2 * e * N] * 2 + [3 * e * N] * 2
    around += [2 * e * F, 3 * e * F] if shape.gated else [2 * e * F]
    after = [3 * e * N] * 2 + [3 * e * N] * 2
    after += [3 * e * whole] * 2  # the gradients of the input of query, key and value are added
    after += [3 * e * F] * 3 + [3 * e * whole] if shape.gated else [3 * e * F]
    if shape.biases:
        around += [2 * e * N] * 2 if cut.tp > 1 else []  # after the sum; else the product adds it
        after += [e * N] * 2 + [e * F, e * Q, e * K]
    if shape.experts:  # rows to their experts and back; weight gradients of all experts are joined
        rows = tokens * shape.top_k * shape.width
        around += [2 * e * rows] * 2 + [3 * e * rows] * 2
        after += [2 * e * rows] * 2 + [3 * e * rows] * 2
        after += [2 * e * expert_parameters(shape, cut.ep)]
    if cut.sequence_parallel:  # a rank's own block is copied to its place
        around += [2 * e * N] * 2
        after += [2 * e * N] * 2
        if cut.microbatch > 1:  # time is dim 1: copies before and after each message
            around += [2 * e * whole] * 4 + [2 * e * N] * 3
            after += [2 * e * whole] * 4 + [2 * e * N] * 3
    if shape.dropout:
        around += [(2 * e + 1) * N] * 2
        after += [(2 * e + 1) * N] * 2
    if shape.positions == "rotary":  # in fp32: cast, complex product, cast
        turned = [each * x for x in (Q, K) for each in (e + 4, 8, e + 4)]
        around += turned + [SMALL] * 7  # the angles
        after += turned + [8 * Q, 8 * K, 2 * e * Q, 2 * e * K]
    if cut.tp > 1:  # two kernels that stand for the gradient of a column layer until it's computed
        after += [SMALL] * 2 * ((5 if shape.gated else 4) + (3 if shape.biases else 0))
    core: list[float] = []
    core_after: list[float] = []
    if cut.cp > 1 and cut.context != "ulysses" and fused_ring:  # blocks are added up in fp32
        core += [(e + 8) * Q] * (cut.cp - 1)
        core_after += [(e + 8) * Q, 2 * (e + 8) * K] * (cut.cp - 1)
    elif cut.cp > 1 and cut.context != "ulysses":
        blocks = S * ring_share(cut)  # in fp32
        mask = 8 * S / cut.cp  # of the rank's own block
        core += [4 * blocks] + [8 * blocks] * 3 + [mask]  # logsumexp, subtract, exp, a copy
        core_after += [8 * blocks] * 4 + [12 * blocks, mask]
        # to fp32 and back, scaled; ∂O · O
        core += [4 * Q, (e + 4) * Q, 8 * Q, (e + 4) * Q, 4 * e * K]
        core_after += [(e + 4) * Q] * 4 + [8 * Q] * 3 + [12 * Q, 2 * (e + 4) * K, 4 * e * K]
        part = Q * ring_share(cut)
        for _ in range(cut.cp):  # a block is added to the others, and its gradients, too
            core += [2 * (e + 4) * K] + [8 * part] * 4 + [SMALL] * 7
            core_after += [8 * K, 2 * (e + 4) * K] + [8 * part] * 2 + [12 * part]
            core_after += [8 * K] * 2 + [16 * K] * 2 + [24 * K]
    elif shape.attention == "unfused":
        core += [2 * e * Q] * 5 + [2 * e * S] * 2  # mask and softmax; copies that are contiguous
        core_after += [2 * e * Q] * 5 + [3 * e * S, 2 * e * S]
        if shape.dropout:
            core += [(2 * e + 1) * S]
            core_after += [(2 * e + 1) * S]
    return MemoryKernels(around, core, after, core_after)
